"""PPO balances a pole: far above a random policy, within seconds."""

from __future__ import annotations

import pytest
import torch

from foresight.algorithms.policy import ppo
from foresight.envs.make import make
from tests.sabotage import change, flip_sign, sabotaged_by


def _mean_return(state: ppo.State, explore: bool, episodes: int = 32) -> float:
    """Of the first episode of each of as many environments: no short ones before long ones."""
    env = make("CartPole-v1", num_envs=episodes)
    obs, alive, total = env.reset(1_000), torch.ones(episodes), torch.zeros(episodes)
    while alive.any():
        action, _, _ = ppo.act(state, obs, explore=explore)
        feedback = env.step(action.clone())
        total += alive * feedback.reward
        alive *= 1 - feedback.cut
        obs = feedback.obs
    return total.mean().item()


def _blind(original):
    return lambda reward, discount, cut, value, next_value, *rest: original(
        reward * 0, discount, cut, value, next_value, *rest
    )


@sabotaged_by("foresight.ops.returns.gae", flip_sign, _blind)
@sabotaged_by("foresight.ops.fused.clipped.clipped_epochs", change("columns", lambda xs: [*xs[:3], -xs[3], *xs[4:]]))
def test_ppo_balances_the_pole():
    config = ppo.Config(
        steps=25_000, num_envs=8, rollout_steps=32, epochs=20, minibatches=1, learning_rate=1e-3, gamma=0.98,
        gae_lambda=0.8, anneal_clip=True, value_coef=1.0,
    )  # fmt: skip
    env = make("CartPole-v1", num_envs=config.num_envs)
    state = ppo.build(config, env.spaces)
    random = _mean_return(state, explore=True)
    *_, (_, _, state) = ppo.train(config, env, state)
    trained = _mean_return(state, explore=False)
    assert random < 40
    assert trained > 200 and trained > 5 * random


@pytest.mark.learning
@sabotaged_by("foresight.ops.policy.clipped_surrogate", flip_sign)
def test_ppo_swings_the_pendulum_up():
    config = ppo.Config(
        steps=36_000, num_envs=4, rollout_steps=256, epochs=10, minibatches=4, learning_rate=2e-3, gamma=0.9,
        anneal_lr=False, value_coef=1.0, normalize_reward=True,
    )  # fmt: skip
    first = next(ppo.train(config, make("Pendulum-v1", num_envs=4)))[1]["return"]
    assert first < -900
    for step, metrics, _ in ppo.train(config, make("Pendulum-v1", num_envs=4)):
        assert step < 12_000 or metrics["return"] > -1_275  # by then no worse than it was
    assert metrics["return"] > -600
