"""Soft value iteration converges to the soft values and their policy; at temperature 0 to the optimal values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import soft_value_iteration, value_iteration
from foresight.envs.tabular import grid
from foresight.planning.dynamic import bellman
from tests.fixed_points import mdps
from tests.fixed_points.tabular import env, name
from tests.sabotage import change, sabotaged_by, scaled
from tests.small_mdps import last, small_mdp


@pytest.mark.parametrize(
    "fields", [{}, {"gamma": 0.8, "entropy_temperature": 0.5}, {"gamma": 1.0, "entropy_temperature": 0.0}], ids=name
)
@sabotaged_by("foresight.ops.targets.soft_maximum", change("temperature", lambda alpha: alpha + 0.1))
def test_it_finds_the_soft_values(fields: dict[str, Any]) -> None:
    config = soft_value_iteration.Config(**fields)
    for seed in range(3):
        mdp = env(seed, forbidden=seed)
        *_, (_, _, state) = soft_value_iteration.train(config, mdp)
        if config.entropy_temperature == 0:
            best = mdps.optimal_values(mdp, config.gamma)
            torch.testing.assert_close(state.values, best, atol=1e-6, rtol=0)
            continue
        best = mdps.soft_optimal_values(mdp, config.gamma, config.entropy_temperature)
        torch.testing.assert_close(state.values, best, atol=1e-6, rtol=0)
        policy = torch.softmax(mdps.action_values(mdp, best, config.gamma) / config.entropy_temperature, 1)
        torch.testing.assert_close(state.policy, policy, atol=1e-4, rtol=0)


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
