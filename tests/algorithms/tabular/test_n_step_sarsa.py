"""n-step Sarsa converges to the action values of the best ε-soft policy, at every n."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import n_step_sarsa
from tests.fixed_points.tabular import SELDOM, controlled, name
from tests.sabotage import change, sabotaged_by


@pytest.mark.learning
@pytest.mark.parametrize(
    ("fields", "forbidden", "time_limit"),
    [
        ({"steps": 1_500_000, **SELDOM}, 0, None),
        ({"n_steps": 2, "gamma": 0.9, "epsilon": 0.5, "steps": 500_000, **SELDOM}, 1, 3),
        ({"n_steps": 9, "gamma": 1.0, "epsilon": 1.0, "steps": 500_000, **SELDOM}, 1, None),
    ],
    ids=name,
)
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_it_converges_to_the_best_epsilon_soft_policy(
    fields: dict[str, Any], forbidden: int, time_limit: int | None
) -> None:
    found, exact = controlled(n_step_sarsa, fields, forbidden, time_limit)
    torch.testing.assert_close(found, exact, atol=0.05, rtol=0)
