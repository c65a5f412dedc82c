"""MDPs whose exact values are known, from books or computed independently of this library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foresight.algorithms.tabular import policy_iteration, truncated_policy_iteration, value_iteration
from foresight.envs.tabular import grid
from foresight.planning.dynamic import bellman
from tests.sabotage import change, sabotaged_by

ALGORITHMS = {
    "value_iteration": (value_iteration, {"tolerance": 1e-11}),
    "policy_iteration": (policy_iteration, {}),
    "truncated_policy_iteration": (truncated_policy_iteration, {"tolerance": 1e-11}),
}
# (options, start value without discount, with gamma 0.99): planning tables computed with exact arithmetic elsewhere
EXACT = {
    "FrozenLake-v1": ({}, 14 / 17, 0.542026),
    "FrozenLake-v1 dry": ({"is_slippery": False}, 1.0, 0.99**5),
    "FrozenLake-v1 8x8": ({"map_name": "8x8"}, 1.0, 0.414640),
    "CliffWalking-v1": ({}, -13.0, -12.247898),
    "CliffWalkingSlippery-v1": ({}, -64.709176, -46.352672),
    "Taxi-v4": ({}, 7.93, 6.327464),
    "Taxi-v4 rainy": ({"is_rainy": True}, 3.954575, 2.247629),
}


def solve(name: str, mdp: Any, gamma: float) -> Any:
    module, options = ALGORITHMS[name]
    *_, (_, _, state) = module.train(module.Config(gamma=gamma, **options), mdp)
    return state


@sabotaged_by("foresight.envs.tabular.mdp.assemble", change("discount", np.zeros_like, "everything_ends"))
@sabotaged_by("foresight.envs.tabular.mdp.assemble", change("start", lambda x: np.roll(x, 1), "starts_elsewhere"))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("env", EXACT)
def test_toy_text_with_discount(env: str, algorithm: str) -> None:
    options, _, discounted = EXACT[env]
    mdp = grid.make(env.split()[0], **options)
    assert bellman.start_value(mdp, solve(algorithm, mdp, 0.99).values) == pytest.approx(discounted, abs=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("env", EXACT)
def test_toy_text_without_discount(env: str, algorithm: str) -> None:
    options, total, _ = EXACT[env]
    mdp = grid.make(env.split()[0], **options)
    assert bellman.start_value(mdp, solve(algorithm, mdp, 1.0).values) == pytest.approx(total, abs=1e-6)


@sabotaged_by(
    "foresight.planning.dynamic.bellman.optimal_return", change("horizon", lambda h: h - 1, "one_action_less")
)
@pytest.mark.parametrize(("size", "limit", "success"), [("4x4", 100, 0.744190), ("8x8", 200, 0.913220)])
def test_frozen_lake_within_its_time_limit(size: str, limit: int, success: float) -> None:
    mdp = grid.make("FrozenLake-v1" if size == "4x4" else "FrozenLake8x8-v1")
    assert mdp.time_limit == limit
    assert bellman.optimal_return(mdp, horizon=limit) == pytest.approx(success, abs=1e-6)


def test_sweeps_and_iterations_as_published() -> None:
    """Value iteration from 0 to a change of 1e-10 at gamma 0.99 takes as many sweeps as counted elsewhere."""
    counts = {"FrozenLake-v1": 571, "FrozenLake8x8-v1": 662, "Taxi-v4": 19}
    for name, expected in counts.items():
        *_, (sweeps, _, _) = value_iteration.train(value_iteration.Config(tolerance=1e-10), grid.make(name))
        assert sweeps == expected, name


# Sutton & Barto (2018), figure 4.1: the equiprobable policy in the 4 × 4 grid, k = ∞.
FIGURE_4_1 = [0, -14, -20, -22, -14, -18, -20, -20, -20, -20, -18, -14, -22, -20, -14, 0]


@sabotaged_by("foresight.envs.tabular.mdp.assemble", change("discount", lambda d: 0.9 * d, "fades"))
def test_the_random_policy_of_sutton_and_barto() -> None:
    mdp = grid.make("GridWorld4x4")
    try:
        values = bellman.policy_value(mdp, mdp.uniform(), gamma=1.0)
    except ValueError:  # nothing ends: no value
        values = torch.zeros(16)
    np.testing.assert_allclose(values, FIGURE_4_1, atol=1e-9)


def test_the_first_sweeps_of_sutton_and_barto() -> None:
    """Figure 4.1 again, k = 1, 2, 3 sweeps of the equiprobable policy, to the figures printed there."""
    mdp = grid.make("GridWorld4x4")
    sweeps, values = bellman.Sweeps(mdp, 1.0), torch.zeros(16, dtype=torch.float64)
    seen = []
    for _ in range(3):
        values, _ = sweeps.evaluate(values, mdp.uniform())
        seen.append(values[1].item())
    assert seen == pytest.approx([-1.0, -1.75, -2.4375])


# Russell & Norvig, "Artificial Intelligence", figure 16.3(b) (17.3 in the third edition): utilities, -0.04 a step.
RUSSELL_NORVIG = [0.812, 0.868, 0.918, 0.762, 0.660, 0.705, 0.655, 0.611, 0.388]


@sabotaged_by("foresight.envs.tabular.grid.gridworld", change("slip", lambda p: p / 2, "slips_less"))
@sabotaged_by("foresight.envs.tabular.mdp.assemble", change("reward", lambda r: 0.9 * r, "pays_less"))
def test_the_four_by_three_grid_of_russell_and_norvig() -> None:
    mdp = grid.make("GridWorld4x3")
    *_, (_, _, state) = value_iteration.train(value_iteration.Config(gamma=1.0, steps=1000), mdp)
    np.testing.assert_allclose(state.values[~mdp.absorbing()], RUSSELL_NORVIG, atol=5e-4)
    arrows = "".join(mdp.arrows[int(a)] for a in state.policy[~mdp.absorbing()])
    assert arrows == "→→→" + "↑↑" + "↑←←←"  # the policy of figure 16.2(a)
