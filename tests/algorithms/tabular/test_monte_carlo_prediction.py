"""Monte Carlo prediction converges to the values of the policy, by first and by all visits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import monte_carlo_prediction
from tests.fixed_points.tabular import name, predicted
from tests.sabotage import change, sabotaged_by


@pytest.mark.learning
@pytest.mark.parametrize(
    ("fields", "forbidden"),
    [
        ({"steps": 100_000, "yield_every": 1_000}, 0),
        ({"first_visit": False, "gamma": 0.9, "steps": 100_000, "yield_every": 1_000}, 1),
        ({"alpha": 0.001, "alpha_power": 0.0, "gamma": 1.0, "steps": 100_000, "yield_every": 1_000}, 1),
    ],
    ids=name,
)
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_it_converges_to_the_values_of_the_policy(fields: dict[str, Any], forbidden: int) -> None:
    found, exact = predicted(monte_carlo_prediction, fields, forbidden)
    torch.testing.assert_close(found, exact, atol=0.03, rtol=0)
