"""Double Q-learning converges to the optimal action values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foresight.algorithms.tabular import double_q_learning, q_learning, sarsa
from foresight.envs.tabular.mdp import MDP, from_table
from tests.fixed_points.tabular import CONTROL, converged, env, name, optimal_q
from tests.sabotage import change, sabotaged_by
from tests.small_mdps import last


@pytest.mark.learning
@pytest.mark.parametrize(("fields", "forbidden", "time_limit"), CONTROL, ids=name)
@sabotaged_by("foresight.training.tabular.control", change("act_and_update", lambda _: sarsa.act_and_update))
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_it_converges_to_the_optimal_values(fields: dict[str, Any], forbidden: int, time_limit: int | None) -> None:
    mdp = env(1, forbidden, time_limit)
    found, state = converged(double_q_learning, mdp, "q", fields)
    exact = optimal_q(mdp, state.config.gamma)
    torch.testing.assert_close(found, exact, atol=0.05, rtol=0)
    assert torch.equal(state.policy, exact.argmax(1))


def maximization_bias() -> MDP:
    """S&B example 6.7: left leads to ten actions worth -0.1 on average, and very noisy; right ends at once."""
    noisy = [(0.5, 2, 0.9, True), (0.5, 2, -1.1, True)]
    table: dict[int, Any] = {
        0: {0: [(1.0, 1, 0.0, False)], **{a: [(1.0, 2, 0.0, True)] for a in range(1, 10)}},
        1: {a: noisy for a in range(10)},
        2: {a: [(1.0, 2, 0.0, True)] for a in range(10)},
    }
    return from_table("Bias", table, np.eye(3)[0])


@pytest.mark.learning
@sabotaged_by("foresight.ops.targets.double_q_learning", change("eval_q", lambda q: q + 1.0))
def test_two_tables_do_not_overestimate() -> None:
    """The value of the noisy state is -0.1, whatever is done there. One table thinks more of it, two do not."""
    mdp, fields = (
        maximization_bias(),
        {"gamma": 1.0, "alpha": 0.1, "epsilon": 1.0, "steps": 20_000, "yield_every": 20_000},
    )
    one = np.mean([float(last(q_learning, mdp, seed=i, **fields).q[0, 0]) for i in range(20)])
    two = np.mean([float(last(double_q_learning, mdp, seed=i, **fields).q[:, 0, 0].mean()) for i in range(20)])
    assert one > 0.1 and two == pytest.approx(-0.1, abs=0.06)
    # and the target shows why: valued by itself the best of noise is good, valued by another table it is not
    from foresight.ops import targets

    noise = torch.randn(2, 1, 1_000, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros(1, 1_000, dtype=torch.float64)
    assert float(targets.q_learning(zero, zero + 1, noise[0]).mean()) > 1.0
    assert abs(float(targets.double_q_learning(zero, zero + 1, noise[0], noise[1]).mean())) < 0.15
