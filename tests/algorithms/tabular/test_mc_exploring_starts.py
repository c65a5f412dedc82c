"""Monte Carlo control with exploring starts converges to the optimal action values, and plays blackjack."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import mc_exploring_starts
from foresight.envs.tabular import grid
from foresight.planning.dynamic import bellman
from tests.fixed_points.tabular import converged, env, name, optimal_q
from tests.sabotage import change, flip_sign, sabotaged_by
from tests.small_mdps import last


@pytest.mark.learning
@pytest.mark.parametrize(
    ("fields", "forbidden"),
    [
        ({"steps": 200_000, "improve_every": 1_000, "alpha_power": 0.8}, 0),
        ({"gamma": 0.9, "first_visit": False, "steps": 200_000, "improve_every": 1_000}, 1),
        ({"gamma": 1.0, "alpha": 0.01, "alpha_power": 0.0, "steps": 200_000, "improve_every": 1_000}, 1),
    ],
    ids=name,
)
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_it_converges_to_the_optimal_values(fields: dict[str, Any], forbidden: int) -> None:
    mdp = env(1, forbidden)
    found, state = converged(mc_exploring_starts, mdp, "q", fields)
    torch.testing.assert_close(found, optimal_q(mdp, state.config.gamma), atol=0.05, rtol=0)


@pytest.mark.learning
@sabotaged_by("foresight.ops.targets.greedy", flip_sign)
def test_exploring_starts_plays_blackjack_almost_perfectly() -> None:
    mdp = grid.make("Blackjack-v1")
    best = -0.043113
    baseline = bellman.expected_return(mdp, mdp.uniform())
    state = last(mc_exploring_starts, mdp, gamma=1.0, steps=300_000, improve_every=1_000)
    reached = bellman.expected_return(mdp, state.policy)
    assert baseline < -0.3 and best - 0.012 < reached <= best + 1e-6
