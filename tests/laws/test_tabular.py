"""Where the algorithms on tables meet: n-step is Sarsa and Monte Carlo, traces are λ-returns, soft becomes hard."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from foresight.algorithms.tabular import (
    expected_sarsa,
    monte_carlo_prediction,
    n_step_sarsa,
    q_learning,
    sarsa,
    soft_value_iteration,
    td_lambda,
    td_prediction,
    value_iteration,
)
from foresight.envs.tabular import grid
from foresight.ops import returns
from foresight.planning.dynamic import bellman
from foresight.training import tabular
from tests.sabotage import change, flip_sign, sabotaged_by, scaled
from tests.small_mdps import small_mdp

SEED = 16  # its first episode has 10 steps and sees all 6 states


def last(module, mdp, **fields):
    *_, (_, _, state) = module.train(module.Config(**fields), mdp)
    return state


def test_one_step_is_sarsa_to_the_last_bit() -> None:
    mdp, common = small_mdp(1, 10), {"steps": 2_000, "gamma": 0.9, "alpha": 0.3}
    assert torch.equal(last(n_step_sarsa, mdp, n_steps=1, **common).q, last(sarsa, mdp, **common).q)
    assert not torch.equal(last(n_step_sarsa, mdp, n_steps=2, **common).q, last(sarsa, mdp, **common).q)


def test_expected_sarsa_without_exploration_is_q_learning() -> None:
    mdp, common = small_mdp(1, 10), {"steps": 2_000, "gamma": 0.9, "alpha": 0.3, "initial": 9.0}
    one, other = (last(module, mdp, epsilon=0.0, **common).q for module in (expected_sarsa, q_learning))
    torch.testing.assert_close(one, other)
    assert not torch.equal(
        last(expected_sarsa, mdp, epsilon=0.3, **common).q, last(q_learning, mdp, epsilon=0.3, **common).q
    )


def test_no_trace_is_one_step() -> None:
    mdp, common = small_mdp(2, 10), {"steps": 2_000, "gamma": 0.9, "alpha": 0.2}
    torch.testing.assert_close(last(td_lambda, mdp, trace_lambda=0.0, **common).v, last(td_prediction, mdp, **common).v)


@sabotaged_by("foresight.ops.returns.discounted_return", flip_sign, change("reward", lambda r: 2 * r))
def test_more_steps_than_an_episode_has_are_monte_carlo() -> None:
    """Both walk by the same numbers: an action and an outcome each step, and where to begin."""
    mdp, common = small_mdp(2, 10, ending=0.3), {"gamma": 0.9, "alpha": 0.2, "seed": 3}
    steps = last(td_prediction, mdp, n_steps=500, steps=10**6, episodes=40, **common)
    whole = last(monte_carlo_prediction, mdp, steps=40, alpha_power=0.0, first_visit=False, **common)
    torch.testing.assert_close(steps.v, whole.v)


@sabotaged_by("foresight.ops.returns.lambda_return", scaled(1.01), change("lam", lambda x: 1 - 0.9 * x))
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9, 1.0])
def test_traces_are_the_lambda_return_if_values_hold_still(lam: float) -> None:
    """S&B section 12.2: with a tiny α, the changes of an episode add up to α Σ (G^λ − v) at each state."""
    mdp, gamma, alpha = small_mdp(7, 6, ending=0.2), 0.9, 1e-9
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(6, generator=generator, dtype=torch.float64)
    config = td_lambda.Config(
        gamma=gamma, trace_lambda=lam, alpha=alpha, episodes=1, yield_every=0, steps=10**6, seed=SEED
    )
    state = td_lambda.build(config, mdp.spaces)
    state.v = before.clone()
    list(td_lambda.train(config, mdp, state))
    batch = tabular.episodes(tabular.Tables(mdp, gamma), mdp.uniform(), 1, 10**6, np.random.default_rng(SEED))
    assert batch.shape[1] == state.step > 5
    following = torch.cat([batch.obs[:, 1:], batch.obs[:, :1]], 1)
    target = returns.lambda_return(batch.reward, batch.discount, batch.cut, before[following], lam)
    expected = torch.zeros(6, dtype=torch.float64).index_add(0, batch.obs[0], (target - before[batch.obs])[0])
    torch.testing.assert_close((state.v - before) / alpha, expected, rtol=1e-5, atol=1e-5)


@sabotaged_by("foresight.ops.targets.soft_maximum", change("temperature", lambda t: t + 0.01))
def test_the_soft_bellman_operator_becomes_the_hard_one() -> None:
    mdp, gamma = grid.make("FrozenLake-v1"), 0.9
    hard = last(value_iteration, mdp, gamma=gamma, tolerance=1e-12)
    gaps = []
    for temperature in (0.1, 0.01, 1e-3, 1e-5, 0.0):
        soft = last(soft_value_iteration, mdp, gamma=gamma, entropy_temperature=temperature, tolerance=1e-12)
        gap = soft.values - hard.values
        assert float(gap.min()) > -1e-9
        assert float(gap.max()) <= temperature * math.log(4) / (1 - gamma) + 1e-9
        gaps.append(float(gap.max()))
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > 0.1 and gaps[-1] < 1e-9
    greedy = soft.policy.argmax(1)
    assert bellman.expected_return(mdp, greedy, gamma) == pytest.approx(bellman.start_value(mdp, hard.values))


@sabotaged_by("foresight.ops.targets.soft_maximum", scaled(1.05))
def test_the_soft_operator_solves_for_the_best_policy_with_entropy() -> None:
    """v = Σ π (q − α log π): evaluate the soft policy with its entropy as a reward, exactly, and get the same v."""
    mdp, gamma, temperature = small_mdp(4, 8), 0.9, 0.5
    soft = last(soft_value_iteration, mdp, gamma=gamma, entropy_temperature=temperature, tolerance=1e-12)
    entropy = -(soft.policy * soft.policy.log()).sum(1)
    next_state, weight, reward = bellman.policy_model(mdp, soft.policy)
    chain = torch.zeros(8, 8, dtype=torch.float64)
    chain.scatter_add_(1, next_state.long(), weight)
    exact = torch.linalg.solve(torch.eye(8).double() - gamma * chain, reward + temperature * entropy)
    torch.testing.assert_close(soft.values, exact, rtol=0, atol=1e-8)
