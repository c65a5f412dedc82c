"""GRPO of episodes: groups begin alike, equal returns give no gradient, and reward improves a weak policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from foresight.algorithms.imitation import vla
from foresight.algorithms.policy import episode_grpo as grpo
from foresight.errors import UserError
from foresight.nets.outputs import Categorical
from foresight.nets.sequence import vla as networks
from tests.algorithms.imitation.scenes import FIELDS, SPACES, Pointing, Touching, scene
from tests.algorithms.small_runs import last
from tests.algorithms.states import forgets, restored, weights
from tests.sabotage import flip_sign, sabotaged_by

CONFIG = grpo.Config(steps=64, num_envs=16, group=4, longest=3, learning_rate=1e-2, minibatches=2, anneal_lr=False)


@pytest.fixture
def policy(tmp_path: Path) -> str:
    """An untrained policy."""
    state = vla.build(vla.Config(data=("d",), **FIELDS), SPACES)
    state.policy.words.known[:] = True
    networks.save(state.policy, tmp_path)
    return str(tmp_path)


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in ("network", "optimizer", "rounds")])
def test_a_resumed_run_is_the_uninterrupted_one(policy: str) -> None:
    config = dataclasses.replace(CONFIG, policy=policy)
    whole = last(grpo, config, Pointing(16))
    stopped = next(state for _, _, state in grpo.train(config, Pointing(16)))
    resumed = last(grpo, config, Pointing(16), restored(grpo, stopped, Pointing(16)))
    assert stopped.step == 16 and resumed.step == 64 and torch.equal(weights(resumed), weights(whole))


@sabotaged_by("foresight.ops.advantage.differs", lambda f: lambda rewards: f(rewards) | True)
@sabotaged_by("tests.algorithms.imitation.scenes.Pointing.same_starts", lambda f: lambda self, group: None)
def test_a_group_begins_alike_and_equal_returns_are_left_out(policy: str) -> None:
    state, env = grpo.build(dataclasses.replace(CONFIG, policy=policy), SPACES), Pointing(16)
    env.same_starts(4)
    batch, metrics = grpo.rollout(state, env)
    used = round(4 * metrics["used_groups"])
    assert 0 < used < 4 and len(batch.reward) == 4 * used
    images = batch.obs["image"].flatten(1).view(used, 4, -1)
    assert (images == images[:, :1]).all() and len(images[:, 0].unique(dim=0)) == used
    gains = batch.extras["advantage"].view(used, 4)
    torch.testing.assert_close(gains.sum(1), torch.zeros(used), atol=1e-5, rtol=0)
    assert ((gains > 0) == (batch.reward.view(used, 4) > 0)).all()


@sabotaged_by("foresight.ops.policy.clipped_surrogate", flip_sign)
def test_reward_improves_the_policy(policy: str) -> None:
    config = dataclasses.replace(CONFIG, steps=2_560, num_envs=64, group=8, policy=policy)
    obs, right = scene(torch.Generator().manual_seed(9), 300)
    before, after = (
        (grpo.act(state, obs, explore=True)[0] == right).float().mean().item()
        for state in (grpo.build(config, SPACES), last(grpo, config, Pointing(64)))
    )
    assert before < 0.6 and after > before + 0.05


@sabotaged_by("foresight.ops.policy.clipped_surrogate", flip_sign)
def test_reward_improves_a_policy_that_points(tmp_path: Path) -> None:
    state = vla.build(vla.Config(data=("d",), head="point", **FIELDS), Touching.spaces)
    state.policy.words.known[:] = True
    networks.save(state.policy, tmp_path)
    config = dataclasses.replace(
        CONFIG, steps=5_120, num_envs=64, group=8, epochs=2, learning_rate=3e-3, policy=str(tmp_path)
    )
    obs, right = scene(torch.Generator().manual_seed(9), 300)
    before, after = (
        ((grpo.act(state, obs, explore=True)[0][:, 0] > 0.5) == right).float().mean().item()
        for state in (grpo.build(config, Touching.spaces), last(grpo, config, Touching(64)))
    )
    assert before < 0.6 and after > before + 0.05


def test_a_network_of_ones_own_may_read_single_observations_alone(policy: str) -> None:
    """It maps observations to a distribution of actions, and has no steps of a sequence."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Linear(1, 3)

        def forward(self, obs: dict[str, torch.Tensor]) -> Categorical:
            return Categorical(self.table(torch.ones(len(obs["image"]), 1)))

    own = Own()
    state = grpo.build(dataclasses.replace(CONFIG, policy=policy), SPACES)
    state = dataclasses.replace(state, network=own, optimizer=torch.optim.Adam(own.parameters(), lr=1e-2))
    before = weights(state).clone()
    *_, (step, _, after) = grpo.train(state.config, Pointing(16), state)
    assert step == 64 and not torch.equal(weights(after), before)


@pytest.mark.parametrize(("broken", "message"), [("forward", "of acting differ"), ("act", "of evaluation differ")])
def test_paths_are_checked_before_step_1(
    policy: str, monkeypatch: pytest.MonkeyPatch, broken: str, message: str
) -> None:
    forward, act = networks.VLA.forward, grpo.act
    if broken == "forward":  # steps are read without their pictures
        dark = lambda obs: obs if obs["image"].dim() == 4 else {**obs, "image": 0 * obs["image"]}  # noqa: E731
        monkeypatch.setattr(networks.VLA, "forward", lambda self, obs: forward(self, dark(obs)))
    else:
        monkeypatch.setattr(grpo, "act", lambda state, obs, *rest: (2 - act(state, obs)[0], {}, None))
    with pytest.raises(UserError, match=message):
        next(grpo.train(dataclasses.replace(CONFIG, policy=policy), Pointing(16)))


def test_mistakes_are_named(policy: str, tmp_path: Path) -> None:
    flow = vla.build(vla.Config(data=("d",), head="flow", **FIELDS), Touching.spaces)
    networks.save(flow.policy, tmp_path / "flow")
    with pytest.raises(UserError, match="head 'flow' does not have"):
        grpo.build(dataclasses.replace(CONFIG, policy=str(tmp_path / "flow")), Touching.spaces)
    for changed, message in (
        ({}, "No policy given. .* --out RUN, and give it with --policy RUN"),
        ({"policy": policy, "group": 3}, "must be a multiple of group"),
        ({"policy": policy + "x"}, "There is no trained VLA"),
    ):
        with pytest.raises(UserError, match=message):
            grpo.build(dataclasses.replace(CONFIG, **changed), SPACES)
    env = Pointing(16)
    env.same_starts = None  # type: ignore[assignment]
    with pytest.raises(UserError, match="cannot begin several episodes alike"):
        next(grpo.train(dataclasses.replace(CONFIG, policy=policy), env))
