"""Q-learning converges to the optimal action values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import q_learning, sarsa
from tests.fixed_points.tabular import CONTROL, converged, env, name, optimal_q
from tests.sabotage import change, sabotaged_by


@pytest.mark.learning
@pytest.mark.parametrize(("fields", "forbidden", "time_limit"), CONTROL, ids=name)
@sabotaged_by("foresight.training.tabular.control", change("act_and_update", lambda _: sarsa.act_and_update))
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_it_converges_to_the_optimal_values(fields: dict[str, Any], forbidden: int, time_limit: int | None) -> None:
    mdp = env(1, forbidden, time_limit)
    found, state = converged(q_learning, mdp, "q", fields)
    exact = optimal_q(mdp, state.config.gamma)
    torch.testing.assert_close(found, exact, atol=0.05, rtol=0)
    assert torch.equal(state.policy, exact.argmax(1))
