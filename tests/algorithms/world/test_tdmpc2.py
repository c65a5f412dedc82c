"""TD-MPC2 as a program: settings, masks of its losses, learning, resuming, and mistakes."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.world import tdmpc2
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Feedback, Spaces
from foresight.errors import UserError
from tests.algorithms.policy.sac_runs import aim
from tests.algorithms.policy.small_envs import choice
from tests.algorithms.small_runs import last
from tests.algorithms.states import assert_seeds_decide, continued, forgets, halfway_and_end, restored, weights
from tests.sabotage import change, flip_sign, sabotaged_by

SMALL = tdmpc2.Config(
    steps=160, num_envs=8, learning_starts=64, train_every=8, batch_size=16, replay_size=4_000, learning_rate=3e-3,
    horizon=2, candidates=24, proposals=4, elites=6, iterations=2, latent_size=16, hidden=16, encoder_hidden=16,
    bins=21, channels=4,
)  # fmt: skip


class Steer:
    """Five steps from 0, moved by the actions: each earns minus the square of the place reached. Truncated, not ended.

    With `pixels` the place is the brightness of an image.
    """

    name, num_envs = "Steer", 8

    def __init__(self, pixels: bool = False) -> None:
        shown = gs.Box(0, 255, (40, 40, 1), np.uint8) if pixels else gs.Box(-9, 9, (1,), np.float32)
        self.pixels, self.spaces = pixels, Spaces(shown, gs.Box(-2, 2, (1,), np.float32), continuing=True)

    def reset(self, seed: int) -> torch.Tensor:
        self._generator, self._time = torch.Generator().manual_seed(seed), 0
        self._start()
        return self._see()

    def step(self, action: torch.Tensor) -> Feedback:
        self._place = (self._place + action[:, 0].clamp(-2, 2)).clamp(-3, 3)
        reward, self._time = -self._place.square(), self._time + 1
        self._total += reward
        ones, final, info = torch.ones(8), self._see(), {}
        cut = self._time % 5 == 0
        if cut:
            info = {"episode_return": self._total.tolist(), "episode_length": [5] * 8}
            self._start()
        return Feedback(self._see(), reward, ones, cut * ones, ones, final, info)

    def _start(self) -> None:
        self._place, self._total = 4 * torch.rand(8, generator=self._generator) - 2, torch.zeros(8)

    def _see(self) -> torch.Tensor:
        if not self.pixels:
            return self._place.clone().unsqueeze(1)
        level = (self._place + 3) / 6 * 255
        return level.to(torch.uint8).view(8, 1, 1, 1).expand(8, 40, 40, 1).clone()


def test_it_counts_steps_and_updates_and_reports_its_metrics() -> None:
    (step, metrics, state), = tdmpc2.train(SMALL, aim())  # fmt: skip
    assert step == state.step == 160 and state.gradient_steps == 20  # those of the random steps too
    assert set(metrics) >= set(tdmpc2.METRICS) and "termination" in metrics
    assert all(isinstance(x, float) for x in metrics.values())
    assert "termination" not in next(tdmpc2.train(SMALL, Steer()))[1]


@pytest.mark.parametrize("make", [aim, Steer])
def test_equal_seeds_give_equal_runs_and_others_do_not(make) -> None:
    assert_seeds_decide(tdmpc2, SMALL, make)


FIELDS = (
    "model", "critics", "target", "policy", "spread", "optimizer", "policy_optimizer", "replay", "generator", "inner",
    "sampler", "gradient_steps",
)  # fmt: skip


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in FIELDS])
def test_a_loaded_run_continues_as_the_one_in_memory() -> None:
    halfway, whole = halfway_and_end(tdmpc2, SMALL, aim, 192, _spread)
    resumed = continued(tdmpc2, restored(tdmpc2, halfway, aim()), aim(), 192)
    assert whole.step == resumed.step == 192
    assert torch.equal(weights(whole), weights(resumed))
    assert whole.episodes == resumed.episodes


def _spread(state: tdmpc2.State) -> None:
    state.spread.estimate.fill_(5.0)  # that of a longer run


def _returns(state, env) -> float:
    obs, carry, total = env.reset(7), None, 0.0
    for _ in range(5):
        action, _, carry = tdmpc2.act(state, obs, carry)
        feedback = env.step(action)
        obs, total = feedback.obs, total + feedback.reward.mean().item()
    return total


@sabotaged_by("foresight.algorithms.world.tdmpc2.q_target", change("reward", torch.neg))
def test_the_policy_alone_learns_to_steer(monkeypatch: pytest.MonkeyPatch) -> None:
    _learns_to_steer(0, monkeypatch)


@sabotaged_by("foresight.planning.continuous.cem.lookahead", flip_sign)
def test_plans_steer(monkeypatch: pytest.MonkeyPatch) -> None:
    _learns_to_steer(2, monkeypatch)


def _learns_to_steer(iterations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From U[-2, 2] one step reaches 0, so the best return is 0."""
    env = Steer()
    config = dataclasses.replace(SMALL, steps=640, train_every=4, iterations=iterations)
    drawn = last(tdmpc2, dataclasses.replace(config, learning_starts=640, train_every=640), env).episodes.returns
    assert sum(drawn) / len(drawn) < -10  # of random actions
    assert _steers(config, env, -3, monkeypatch)


def _steers(config: tdmpc2.Config, env: Steer, least: float, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a run steers better than `least`, which takes no luck, before it ends; `env` is left to it alone."""
    monkeypatch.setattr(tdmpc2, "REPORT", 128)
    return any(_returns(copy.deepcopy(state), copy.deepcopy(env)) > least for _, _, state in tdmpc2.train(config, env))


def test_pixels_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Steer(pixels=True)
    config = dataclasses.replace(SMALL, steps=480, train_every=4, batch_size=8)
    assert _steers(config, env, -5, monkeypatch)


def _batch(state, cut: list[list[float]]) -> Trajectory:
    generator = torch.Generator().manual_seed(0)
    cuts = torch.tensor(cut)
    rows = cuts.shape
    obs, reward = torch.randn(*rows, 4, generator=generator), torch.randn(rows, generator=generator)
    action = torch.rand(*rows, 2, generator=generator)
    return Trajectory(obs, action, reward, torch.ones(rows), cuts, 1 - cuts)


@sabotaged_by("foresight.data.sequences.arrivals", change("batch", lambda b: b.replace(cut=torch.zeros_like(b.cut))))
def test_what_follows_a_cut_is_not_trained_on() -> None:
    cut = [[0.0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]
    moved = []
    for noise in (0.0, 1.0):
        state = tdmpc2.build(dataclasses.replace(SMALL, dropout=0.0, entropy_coef=0.0), aim().spaces)
        for part in [*state.model.parameters(), *state.critics.parameters(), *state.target.parameters()]:
            torch.nn.init.normal_(part, std=0.3, generator=torch.Generator().manual_seed(part.numel()))
        batch = _batch(state, cut)
        batch.obs[1, 2] += noise
        batch.reward[1, 1:] += noise
        batch.action[1, 1:] += noise
        batch.reward[2] += noise
        batch.reward[:, 2] += noise  # the last row is only arrived at
        tdmpc2.update(state, batch)
        moved.append(weights(state))
    torch.testing.assert_close(moved[0], moved[1], atol=1e-6, rtol=0)


@sabotaged_by("foresight.algorithms.world.tdmpc2.q_target", change("discount", torch.ones_like))
def test_targets_do_not_look_beyond_a_termination() -> None:
    state = tdmpc2.build(SMALL, aim().spaces)
    for part in state.target.parameters():
        torch.nn.init.normal_(part, std=0.5)
    reward, latent = torch.tensor([1.0, 2.0]), torch.randn(2, 16)
    found = tdmpc2.q_target(state, reward, torch.tensor([0.0, 1.0]), latent)
    assert found[0] == 1 and found[1] != 2
    action = state.policy(latent).sample(torch.Generator().manual_seed(SMALL.seed + 1))
    least = torch.stack([q.mean() for q in state.target(latent, action)]).amin(0)
    torch.testing.assert_close(found[1], 2 + SMALL.gamma * least[1])


def test_first_actions_are_uniform_within_the_bounds() -> None:
    state = tdmpc2.build(SMALL, aim().spaces)
    drawn = tdmpc2.act(state, torch.eye(4)[torch.zeros(20_000, dtype=torch.int64)], explore=True)[0]
    torch.testing.assert_close(drawn.mean(0), torch.tensor([0.0, 2.0]), atol=0.05, rtol=0)
    torch.testing.assert_close(drawn.std(0), torch.full((2,), 4 / 12**0.5), atol=0.03, rtol=0)


def test_a_plan_starts_from_the_plan_before_except_after_a_cut() -> None:
    state = tdmpc2.build(dataclasses.replace(SMALL, learning_starts=0), aim().spaces)
    obs = torch.eye(4)
    _, extras, carry = tdmpc2.act(state, obs, explore=True)
    assert extras == {} and carry.shape == (4, 2, 2) and (carry != 0).all()
    kept = tdmpc2.reset_carry(carry, torch.tensor([0.0, 1.0, 0.0, 0.0]))
    assert (kept[1] == 0).all() and torch.equal(kept[0], carry[0])


MISTAKES = [
    ({"num_envs": 4}, "num_envs is 4, but the environment has num_envs 8"),
    ({"horizon": 0}, "horizon must be at least 1"),
    ({"critics": 1}, "critics must be at least 2"),
    ({"rho": 1.5}, "rho must be between 0 and 1"),
    ({"replay_size": 16, "num_envs": 8}, "replay_size 16 is too small"),
    ({"simnorm_dim": 0}, "simnorm_dim must be at least 1"),
    ({"latent_size": 20}, "latent_size must be a multiple of simnorm_dim, 8, not 20"),
    ({"proposals": 24}, "proposals must be below candidates, 24, not 24"),
    ({"elites": 25}, "elites is 25, but there are only 24 candidates"),
    ({"encoder_lr_scale": -1.0}, "encoder_lr_scale must be at least 0"),
    ({"min_std": 3.0}, "max_std must be above 0 and at least min_std, 3.0, not 2.0"),
    ({"max_std": -1.0, "min_std": 0.0}, "max_std must be above 0"),
    ({"temperature": float("inf")}, "temperature must be finite"),
    ({"episodic": False}, "This environment terminated, but episodic is false.*--episodic"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_named(options, message) -> None:
    with pytest.raises(UserError, match=message):
        next(tdmpc2.train(dataclasses.replace(SMALL, **options), aim()))


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(UserError, match=r"tdmpc2 needs continuous actions.*takes Discrete\(4\)"):
        tdmpc2.build(SMALL, choice().spaces)


def test_the_learning_rates_are_annealed() -> None:
    config, env = dataclasses.replace(SMALL, anneal_lr=True), aim()
    state = tdmpc2.build(config, env.spaces)
    segment, *_ = tdmpc2.rollout(state, env, env.reset(0))
    tdmpc2.learn(state, segment)
    encoder, rest = state.optimizer.param_groups
    rate = SMALL.learning_rate * (1 - 8 / 160)  # after one step of 8 environments
    assert rest["lr"] == state.policy_optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert encoder["lr"] == pytest.approx(rate * config.encoder_lr_scale)
    tdmpc2.learn(dataclasses.replace(state, step=160), segment)
    assert rest["lr"] == encoder["lr"] == 0
