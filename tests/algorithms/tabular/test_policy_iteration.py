"""Policy iteration converges to the optimal values, and without a discount starts from a policy that ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import policy_iteration
from foresight.envs.tabular import grid
from tests.fixed_points.tabular import name, planned
from tests.sabotage import change, sabotaged_by


@pytest.mark.parametrize("fields", [{}, {"gamma": 0.8, "evaluation": "sweeps"}, {"gamma": 1.0}], ids=name)
@sabotaged_by("foresight.planning.dynamic.bellman.Sweeps.__init__", change("gamma", lambda gamma: 0.9 * gamma))
def test_it_finds_the_optimal_values(fields: dict[str, Any]) -> None:
    for found, of_policy, best in planned(policy_iteration, fields):
        torch.testing.assert_close(found, best, atol=1e-6, rtol=0)
        torch.testing.assert_close(of_policy, best, atol=1e-9, rtol=0)


def test_policy_iteration_without_discount_starts_from_a_policy_that_ends() -> None:
    mdp = grid.make("CliffWalking-v1")
    *_, (_, metrics, state) = policy_iteration.train(policy_iteration.Config(gamma=1.0), mdp)
    assert state.stable and metrics["value"] == pytest.approx(-13.0)
