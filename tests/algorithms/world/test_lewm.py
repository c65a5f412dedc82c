"""LeWorldModel as a program: settings, data, resuming, plans, what it learns, and mistakes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import gymnasium.spaces as gs
import numpy as np
import pytest
import torch

from foresight.algorithms.world import lewm
from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.ops import latent
from foresight.runtime.evaluation import returns
from tests.algorithms.small_runs import last
from tests.algorithms.states import assert_seeds_decide, forgets, restored, stopped_and_whole, weights
from tests.algorithms.world.line import LEWM, SPEED, draw, line
from tests.sabotage import change, flip_sign, sabotaged_by


def test_it_counts_updates_and_reports_its_metrics() -> None:
    seen = list(lewm.train(LEWM, line()))
    assert [step for step, _, _ in seen] == [50, 60] and seen[-1][2].step == 60
    for _, metrics, _ in seen:
        assert set(metrics) == set(lewm.METRICS) and all(isinstance(x, float) for x in metrics.values())


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    config = dataclasses.replace(LEWM, steps=10)
    assert_seeds_decide(lewm, config, line)


@sabotaged_by(
    "tests.algorithms.states.restored", *[forgets(name) for name in ("model", "optimizer", "generator", "sampler")]
)
def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    config = dataclasses.replace(LEWM, steps=90)
    stopped, whole = stopped_and_whole(lewm, config, line)
    resumed = last(lewm, config, line(), restored(lewm, stopped, line()))
    assert resumed.step == whole.step == 90 and stopped.step == 50
    assert torch.equal(weights(resumed), weights(whole))
    for name, buffer in whole.model.named_buffers():
        assert torch.equal(buffer, dict(resumed.model.named_buffers())[name])


def _ignores_cuts(original):
    def gather(config, env, model):
        step = env.step
        env.step = lambda action: (lambda f: f._replace(cut=torch.zeros_like(f.cut)))(step(action))
        return original(config, env, model)

    return gather


@sabotaged_by("foresight.algorithms.world.lewm.gather", _ignores_cuts)
@sabotaged_by(
    "foresight.algorithms.world.lewm.gather",
    lambda f: lambda *args: (lambda data: data._replace(action=data.action.roll(1, 1)))(f(*args)),
)
def test_sequences_are_what_the_actions_did_within_one_episode() -> None:
    env = line()
    state = lewm.build(LEWM, env.spaces)
    data = lewm.gather(LEWM, env, state.model)
    assert data.image.shape == (16, 128, 8, 8, 1) and 0.9 < data.action.abs().max() <= 1
    same = (data.action[:, 1:] == data.action[:, :-1]).float().mean()
    assert same == pytest.approx(0.5, abs=0.05)  # held for two steps on average
    images, actions = lewm.sample(state, data)
    assert images.shape == (64, 3, 8, 8, 1) and actions.shape == (64, 2, 2)
    grid = torch.linspace(0, 1, 1_001)
    drawn = draw(grid)[:, 0, :, 0].float()
    place = grid[torch.cdist(images[:, :, 0, :, 0].float(), drawn).argmin(-1)]  # [64, 3]
    moved = place[:, 0]
    for block in range(2):
        for k in range(2):
            moved = (moved + SPEED * actions[:, block, k]).clamp(0, 1)
        torch.testing.assert_close(moved, place[:, block + 1], atol=0.01, rtol=0)


@sabotaged_by("foresight.algorithms.world.lewm.reset_carry", lambda f: lambda carry, cut: carry)
def test_a_plan_is_executed_to_its_end_and_left_where_an_episode_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    env, config = line(3), dataclasses.replace(LEWM, executed=2)
    state = lewm.build(config, env.spaces)
    made = []

    def planned(state: lewm.State, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        made.append(len(obs["image"]))
        steps = torch.arange(6.0).view(1, 6, 1) / 10 + len(made)
        return steps.repeat(made[-1], 1, 1)

    monkeypatch.setattr(lewm, "plan", planned)
    obs, carry, found = env.reset(0), None, []
    for t in range(5):
        action, _, carry = lewm.act(state, obs, carry)
        found.append((action / 2).squeeze(-1).tolist())  # an action of the plan is a half of the environment's
        carry = lewm.reset_carry(carry, torch.tensor([0.0, float(t == 1), 0.0]))
    one, other = [1.0, 1.1, 1.2, 1.3, 3.0], [1.0, 1.1, 2.0, 2.1, 2.2]
    for row, expected in zip(found, zip(one, other, one, strict=True), strict=True):
        assert row == pytest.approx(expected)
    assert made == [3, 1, 2]  # only where a plan is needed


@sabotaged_by(
    "foresight.algorithms.world.lewm.held", lambda f: lambda blocks, actions, steps: blocks.repeat(1, 1, steps)
)
def test_the_actions_of_a_plan_are_held() -> None:
    env = line(3)
    state = lewm.build(dataclasses.replace(LEWM, plan_hold=2), env.spaces)
    plan = lewm.plan(state, env.reset(0)).unflatten(1, (-1, 2))
    assert plan.shape == (3, LEWM.horizon, 2, 1) and torch.equal(plan[:, :, 0], plan[:, :, 1])
    assert plan[:, :, 0].unique().numel() > LEWM.horizon
    blocks = torch.arange(8.0).view(1, 8)
    assert torch.equal(lewm.held(blocks, 2, 1), blocks)  # becomes the paper's
    assert lewm.held(blocks, 4, 2).tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]]
    with pytest.raises(UserError, match="plan_hold is 3, which does not divide a block of 2 env steps"):
        lewm.build(dataclasses.replace(LEWM, plan_hold=3), env.spaces)


@functools.cache
def _of_line(sigreg: Callable[..., torch.Tensor]) -> lewm.State:
    """A trained model; `sigreg` is an argument so that its mutant has a model of its own, which shows at once."""
    for _, metrics, state in lewm.train(dataclasses.replace(LEWM, steps=300), line()):  # noqa: B007
        assert metrics["sigreg"] > 0  # as of any distance
    return state


@sabotaged_by("foresight.planning.continuous.cem.best", change("returns", torch.neg))
@sabotaged_by("foresight.ops.latent.sigreg", flip_sign)
def test_it_reaches_goals_that_random_actions_miss() -> None:
    env = line(50)
    chance = returns.evaluate(env, returns.random_policy(env, 0), 200, 0, None).mean
    state = _of_line(latent.sigreg)
    state.generator.manual_seed(1)

    def act(obs, carry):
        action, _, carry = lewm.act(state, obs, carry)
        return action, carry

    reached = returns.evaluate(env, act, 100, 0, lewm.reset_carry).mean
    assert chance < 0.6 and reached > 0.85, (chance, reached)


MISTAKES = [
    ({"num_envs": 4}, "num_envs is 4, but the environment has num_envs 16"),
    ({"batch_size": 1}, "batch_size must be at least 2"),
    ({"elites": 40}, "elites must be between 1 and 32, not 40"),
    ({"executed": 4}, "executed must be between 1 and 3, not 4"),
    ({"data_steps": 60}, "data_steps must be at least 80, not 60"),
    ({"block": 10, "history": 1}, "No episode has 10 steps"),
    ({"heads": 3}, "width must be a multiple of heads, 3, not 16"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_named(options, message) -> None:
    with pytest.raises(UserError, match=message):
        next(lewm.train(dataclasses.replace(LEWM, **options), line()))


def test_spaces_that_are_not_supported_are_named() -> None:
    image, box = gs.Box(0, 255, (8, 8, 1), np.uint8), gs.Box(-1, 1, (2,), np.float32)
    vector = gs.Box(-1, 1, (3,), np.float32)
    for obs, action, message in (
        (image, box, "an 'image' and a 'goal'"),
        (gs.Dict({"image": image}), box, "an 'image' and a 'goal'"),
        (gs.Dict({"image": image, "goal": vector}), box, "of equal shape"),
        (gs.Dict({"image": vector, "goal": vector}), box, "reads images"),
        (gs.Dict({"image": image, "goal": image}), gs.Discrete(3), "a bounded Box"),
        (gs.Dict({"image": image, "goal": image}), gs.Box(0, np.array([1, 0], np.float32)), "equal bounds"),
    ):
        with pytest.raises(UserError, match=message):
            lewm.build(LEWM, Spaces(obs, action))
