"""Truncated policy iteration converges to the optimal values; span bounds save sweeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import truncated_policy_iteration, value_iteration
from foresight.planning.dynamic import bellman
from tests.fixed_points.tabular import name, planned
from tests.sabotage import change, sabotaged_by
from tests.small_mdps import small_mdp


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gamma": 0.8, "evaluation_sweeps": 0},
        {"gamma": 0.95, "span_bounds": True},
        {"gamma": 1.0, "evaluation_sweeps": 3},
    ],
    ids=name,
)
@sabotaged_by("foresight.planning.dynamic.bellman.Sweeps.__init__", change("gamma", lambda gamma: 0.9 * gamma))
def test_it_finds_the_optimal_values(fields: dict[str, Any]) -> None:
    for found, of_policy, best in planned(truncated_policy_iteration, fields):
        torch.testing.assert_close(found, best, atol=1e-6, rtol=0)
        torch.testing.assert_close(of_policy, best, atol=1e-9, rtol=0)


def test_zero_evaluation_sweeps_are_value_iteration() -> None:
    mdp = small_mdp(5, 40)
    truncated = truncated_policy_iteration.Config(gamma=0.9, evaluation_sweeps=0)
    a = [(s, m, st.values) for s, m, st in truncated_policy_iteration.train(truncated, mdp)]
    b = [(s, m, st.values) for s, m, st in value_iteration.train(value_iteration.Config(gamma=0.9), mdp)]
    assert [x[:2] for x in a] == [x[:2] for x in b] and torch.equal(a[-1][2], b[-1][2])


def test_span_bounds_need_fewer_sweeps_where_nothing_ends() -> None:
    mdp = small_mdp(6, 200, 4, 5, ending=0.0)
    counts = {}
    for span in (False, True):
        config = truncated_policy_iteration.Config(gamma=0.99, tolerance=1e-6, span_bounds=span)
        *_, (counts[span], _, state) = truncated_policy_iteration.train(config, mdp)
        exact = bellman.policy_value(mdp, state.policy, 0.99)
        assert float((state.values - exact).abs().max()) < 99 * 1e-6
    assert counts[True] < counts[False] / 10
