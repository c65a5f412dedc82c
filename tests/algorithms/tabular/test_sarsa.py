"""Sarsa converges to the action values of the best ε-soft policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import q_learning, sarsa
from tests.fixed_points.tabular import CONTROL, controlled, name
from tests.sabotage import change, sabotaged_by


@pytest.mark.learning
@pytest.mark.parametrize(("fields", "forbidden", "time_limit"), CONTROL, ids=name)
@sabotaged_by("foresight.training.tabular.control", change("act_and_update", lambda _: q_learning.act_and_update))
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_it_converges_to_the_best_epsilon_soft_policy(
    fields: dict[str, Any], forbidden: int, time_limit: int | None
) -> None:
    found, exact = controlled(sarsa, fields, forbidden, time_limit)
    torch.testing.assert_close(found, exact, atol=0.05, rtol=0)
