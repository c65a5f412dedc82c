"""Discrete SAC: the policy and the temperature that it converges to, and masked actions."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.policy import sac_discrete
from tests.algorithms.policy.sac_runs import DISCRETE
from tests.algorithms.policy.small_envs import choice, hidden_choice
from tests.algorithms.small_runs import bandit, last
from tests.sabotage import flip_sign, sabotaged_by, scaled


@sabotaged_by("foresight.ops.value.squared_loss", lambda f: lambda *a: -f(*a))
def test_discrete_sac_learns_what_to_choose() -> None:
    env = choice()
    state = last(sac_discrete, dataclasses.replace(DISCRETE, steps=2_000, target_entropy=0.3), env)
    obs = env.reset(0)
    action, extras, carry = sac_discrete.act(state, obs)
    assert (action == env._context).all() and extras == {} and carry is None


def test_masked_actions_are_never_taken() -> None:
    env = hidden_choice()
    for _, metrics, state in sac_discrete.train(DISCRETE, env):  # noqa: B007
        assert metrics["return"] == 1
    assert metrics["entropy"] == 0
    assert sac_discrete.act(state, env.reset(0))[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


@sabotaged_by("foresight.nets.outputs.Categorical.entropy", scaled(0.5))
def test_discrete_sac_finds_the_soft_optimal_policy() -> None:
    """π = softmax(r / α), and the soft value is α log Σ exp(r / α)."""
    rewards = torch.tensor([0.0, 0.3, 0.5])
    env = bandit(gs.Discrete(3), lambda c, a: rewards[a])
    config = sac_discrete.Config(
        steps=2_500, num_envs=8, learning_rate=5e-3, batch_size=64, learning_starts=200, train_every=8,
        replay_size=10_000, entropy_temperature=0.25, learn_temperature=False, hidden=(16,),
    )  # fmt: skip
    state = last(sac_discrete, config, env)
    found = state.actor(torch.ones(1, 1)).mean()[0].detach()
    torch.testing.assert_close(found, (rewards / 0.25).softmax(0), atol=0.03, rtol=0)


@sabotaged_by("foresight.nets.outputs.Categorical.entropy", flip_sign)
def test_the_temperature_finds_the_entropy_that_is_wanted() -> None:
    """Where nothing is to be gained the entropy would be the greatest; the temperature holds it where it should be."""
    env = bandit(gs.Discrete(3), lambda c, a: torch.tensor([0.0, 0.3, 0.5])[a])
    config = sac_discrete.Config(
        steps=4_000, num_envs=8, learning_rate=1e-2, batch_size=64, learning_starts=200, train_every=8,
        replay_size=10_000, entropy_temperature=1.0, target_entropy=0.5, hidden=(16,), tau=0.02,
    )  # fmt: skip
    state = last(sac_discrete, config, env)
    assert state.actor(torch.ones(1, 1)).entropy().item() == pytest.approx(0.5 * math.log(3), abs=0.08)
