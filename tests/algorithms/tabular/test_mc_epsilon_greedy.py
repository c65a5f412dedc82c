"""Monte Carlo control converges to the action values of the best ε-soft policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import mc_epsilon_greedy
from tests.fixed_points.tabular import DECAYING, controlled, name
from tests.sabotage import change, sabotaged_by


@pytest.mark.learning
@pytest.mark.parametrize(
    ("fields", "forbidden"),
    [
        ({"steps": 200_000, "improve_every": 1_000, **DECAYING}, 0),
        (
            {"gamma": 0.9, "epsilon": 0.5, "first_visit": False, "alpha": 0.005, "steps": 60_000, "improve_every": 100},
            1,
        ),
        ({"gamma": 1.0, "epsilon": 1.0, "steps": 200_000, "improve_every": 1_000, **DECAYING}, 1),
    ],
    ids=name,
)
@sabotaged_by("foresight.ops.targets.epsilon_greedy", change("epsilon", lambda epsilon: abs(epsilon - 0.6)))
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_it_converges_to_the_best_epsilon_soft_policy(fields: dict[str, Any], forbidden: int) -> None:
    found, exact = controlled(mc_epsilon_greedy, fields, forbidden)
    torch.testing.assert_close(found, exact, atol=0.05, rtol=0)
