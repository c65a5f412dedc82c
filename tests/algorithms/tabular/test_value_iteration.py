"""Value iteration converges to the optimal values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import value_iteration
from tests.fixed_points.tabular import name, planned
from tests.sabotage import change, sabotaged_by


@pytest.mark.parametrize("fields", [{}, {"gamma": 0.8}, {"gamma": 1.0, "yield_every": 7}], ids=name)
@sabotaged_by("foresight.planning.dynamic.bellman.Sweeps.__init__", change("gamma", lambda gamma: 0.9 * gamma))
def test_it_finds_the_optimal_values(fields: dict[str, Any]) -> None:
    for found, of_policy, best in planned(value_iteration, fields):
        torch.testing.assert_close(found, best, atol=1e-6, rtol=0)
        torch.testing.assert_close(of_policy, best, atol=1e-9, rtol=0)
