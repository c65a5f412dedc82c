"""TD(λ) converges to the values of the policy, at every λ and with both kinds of trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foresight.algorithms.tabular import td_lambda
from foresight.ops import returns
from foresight.training import tabular
from tests.fixed_points.tabular import SELDOM, name, predicted
from tests.sabotage import change, sabotaged_by, scaled
from tests.small_mdps import small_mdp


@pytest.mark.learning
@pytest.mark.parametrize(
    ("fields", "forbidden", "time_limit"),
    [
        ({"alpha": 0.01, "steps": 2_000_000, "yield_every": 2_000}, 0, None),
        ({"trace_lambda": 1.0, "replacing": True, "gamma": 0.9, "steps": 2_000_000, **SELDOM}, 1, None),
        ({"trace_lambda": 0.5, "gamma": 1.0, "steps": 2_000_000, **SELDOM}, 1, 3),
    ],
    ids=name,
)
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_it_converges_to_the_values_of_the_policy(
    fields: dict[str, Any], forbidden: int, time_limit: int | None
) -> None:
    found, exact = predicted(td_lambda, fields, forbidden, time_limit)
    torch.testing.assert_close(found, exact, atol=0.03, rtol=0)


SEED = 16  # its first episode has 10 steps and sees all 6 states


@sabotaged_by("foresight.ops.returns.lambda_return", scaled(1.01), change("lam", lambda x: 1 - 0.9 * x))
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9, 1.0])
def test_traces_are_the_lambda_return_if_values_hold_still(lam: float) -> None:
    """S&B section 12.2: with a tiny α, the changes of an episode add up to α Σ (G^λ − v) at each state."""
    mdp, gamma, alpha = small_mdp(7, 6, ending=0.2), 0.9, 1e-9
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(6, generator=generator, dtype=torch.float64)
    config = td_lambda.Config(
        gamma=gamma, trace_lambda=lam, alpha=alpha, episodes=1, yield_every=0, steps=10**6, seed=SEED
    )
    state = td_lambda.build(config, mdp.spaces)
    state.v = before.clone()
    list(td_lambda.train(config, mdp, state))
    batch = tabular.episodes(tabular.Tables(mdp, gamma), mdp.uniform(), 1, 10**6, np.random.default_rng(SEED))
    assert batch.shape[1] == state.step > 5
    following = torch.cat([batch.obs[:, 1:], batch.obs[:, :1]], 1)
    target = returns.lambda_return(batch.reward, batch.discount, batch.cut, before[following], lam)
    expected = torch.zeros(6, dtype=torch.float64).index_add(0, batch.obs[0], (target - before[batch.obs])[0])
    torch.testing.assert_close((state.v - before) / alpha, expected, rtol=1e-5, atol=1e-5)
