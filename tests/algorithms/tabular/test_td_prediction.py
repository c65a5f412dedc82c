"""TD prediction converges to the values of the policy, at every n."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foresight.algorithms.tabular import td_prediction
from foresight.envs.tabular import grid
from tests.fixed_points.tabular import SELDOM, name, predicted
from tests.sabotage import change, sabotaged_by


@pytest.mark.learning
@pytest.mark.parametrize(
    ("fields", "forbidden", "time_limit"),
    [
        ({"alpha": 0.01, "steps": 500_000, "yield_every": 2_000}, 0, None),
        ({"n_steps": 5, "gamma": 0.9, "steps": 500_000, **SELDOM}, 1, 3),
        ({"n_steps": 2, "gamma": 1.0, "steps": 500_000, **SELDOM}, 1, None),
    ],
    ids=name,
)
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_it_converges_to_the_values_of_the_policy(
    fields: dict[str, Any], forbidden: int, time_limit: int | None
) -> None:
    found, exact = predicted(td_prediction, fields, forbidden, time_limit)
    torch.testing.assert_close(found, exact, atol=0.03, rtol=0)


@pytest.mark.learning
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda g: 0.9 * g))
@sabotaged_by("foresight.training.tabular.start", change("n", lambda n: 2 * n))
def test_a_u_over_n_on_the_19_state_walk() -> None:
    """S&B figure 7.2 at the best α of each n, 40 runs."""
    mdp, best = grid.make("RandomWalk19"), {1: 0.8, 4: 0.4, 16: 0.1}
    found = {}
    for n, alpha in best.items():
        fields = {"gamma": 1.0, "n_steps": n, "alpha": alpha, "episodes": 10, "yield_every": 0, "steps": 10**9}
        runs = [[m["rms_error"] for _, m, _ in td_prediction.train(td_prediction.Config(seed=i, **fields), mdp)]
                for i in range(40)]  # fmt: skip
        found[n] = np.mean(runs)
    assert found[4] == pytest.approx(0.263, abs=0.015)
    assert found[1] == pytest.approx(0.347, abs=0.02) and found[16] == pytest.approx(0.323, abs=0.02)
