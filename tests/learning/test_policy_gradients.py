"""Each policy gradient walks the corridor in 5 steps, where a random walk takes 30; within seconds."""

from __future__ import annotations

from typing import Any

import torch

from foresight.algorithms.policy import a2c, off_policy_ac, ppg, qac, reinforce, trpo
from tests.algorithms.policy.small_envs import Corridor
from tests.sabotage import change, flip_sign, sabotaged_by


def _mean_return(choose: Any, episodes: int = 200) -> float:
    """Of the first episode of each of as many environments: no short ones before long ones."""
    env = Corridor(episodes)
    obs, alive, total = env.reset(0), torch.ones(episodes), torch.zeros(episodes)
    while alive.any():
        feedback = env.step(choose(obs))
        total += alive * feedback.reward
        alive *= 1 - feedback.cut
        obs = feedback.obs
    return total.mean().item()


def _learns(module: Any, steps: int, **options: Any) -> None:
    """From the random baseline, which is measured, to the best that can be."""
    generator = torch.Generator().manual_seed(0)
    random = _mean_return(lambda obs: torch.randint(0, 2, (len(obs),), generator=generator))
    assert -30 < random < -20
    config = module.Config(steps=steps, num_envs=8, hidden=(16,), **options)
    *_, (_, metrics, state) = module.train(config, Corridor())
    assert _mean_return(lambda obs: module.act(state, obs)[0]) == -5
    assert metrics["return"] > 0.5 * random  # of the last 100 episodes, exploring


@sabotaged_by("foresight.ops.policy.reinforce", flip_sign)
@sabotaged_by("foresight.ops.returns.discounted_return", lambda f: lambda reward, *rest: f(0 * reward, *rest))
def test_reinforce():
    _learns(reinforce, 5_000, learning_rate=0.03, value_learning_rate=0.03)


def test_reinforce_without_a_baseline():
    _learns(reinforce, 6_000, learning_rate=0.02, form="reward_to_go", normalize_advantage=True)
    _learns(reinforce, 6_000, learning_rate=0.02, form="trajectory", normalize_advantage=True)


@sabotaged_by("foresight.ops.policy.reinforce", flip_sign)
def test_qac():
    _learns(qac, 14_000, rollout_steps=8, learning_rate=0.01, value_learning_rate=0.03, trace_lambda=0.9)


@sabotaged_by("foresight.ops.returns.lambda_return", lambda f: lambda reward, *rest: f(0 * reward, *rest))
def test_qac_over_all_actions():
    _learns(qac, 8_000, rollout_steps=8, learning_rate=0.01, value_learning_rate=0.03, all_actions=True)


@sabotaged_by("foresight.ops.fused.weighted.weighted_step", change("columns", lambda x: [x[0], x[1], -x[2], x[3]]))
@sabotaged_by("foresight.ops.returns.gae", lambda f: lambda reward, *rest: f(0 * reward, *rest))
def test_a2c():
    _learns(a2c, 4_000, learning_rate=0.01)


@sabotaged_by("foresight.ops.policy.reinforce", flip_sign)
def test_off_policy_actor_critic():
    _learns(off_policy_ac, 5_000, learning_rate=0.01, value_learning_rate=0.03)


@sabotaged_by("foresight.algorithms.policy.trpo.surrogate", flip_sign)
def test_trpo():
    _learns(trpo, 4_000, rollout_steps=32, value_learning_rate=0.03, value_batch=64, target_kl=0.05)


@sabotaged_by("foresight.ops.policy.clipped_surrogate", flip_sign)
def test_ppg():
    options = {"policy_iterations": 8, "auxiliary_minibatches": 1, "normalize_reward": False}
    _learns(ppg, 4_000, rollout_steps=16, learning_rate=0.01, gamma=0.99, **options)
