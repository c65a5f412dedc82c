"""MC Basic: the action values of the policy that it ends with, as far as its episodes reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import mc_basic
from tests.fixed_points import mdps
from tests.fixed_points.tabular import env, name, optimal_q
from tests.sabotage import change, sabotaged_by


@pytest.mark.learning
@pytest.mark.parametrize(
    "fields", [{}, {"gamma": 0.99, "max_episode_steps": 2}, {"gamma": 1.0, "max_episode_steps": 3}], ids=name
)
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
@sabotaged_by("foresight.ops.targets.monte_carlo", change("reward", lambda r: 1.1 * r))
def test_it_finds_the_values_of_its_policy(fields: dict[str, Any]) -> None:
    """The action values of the policy that it ends with; optimal where its episodes reach the end."""
    config = mc_basic.Config(episodes_per_pair=5_000, **fields)
    mdp = env(1, 1)
    *_, (_, _, state) = mc_basic.train(config, mdp)
    assert state.stable
    values, states = torch.zeros(mdp.states, dtype=torch.float64), torch.arange(mdp.states)
    for _ in range(config.max_episode_steps):
        q = mdps.action_values(mdp, values, config.gamma)
        values = q[states, state.policy]
    torch.testing.assert_close(state.q, q, atol=0.06, rtol=0)
    if config.max_episode_steps == 100:
        torch.testing.assert_close(q, optimal_q(mdp, config.gamma), atol=1e-6, rtol=0)
