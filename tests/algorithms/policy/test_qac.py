"""QAC: losses by hand, Sarsa targets, and the sum over all actions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foresight.algorithms.policy import qac
from tests.algorithms.policy.small_batches import LN2, blank, digits, gradient
from tests.algorithms.policy.small_envs import Clock
from tests.sabotage import change, flip_sign, sabotaged_by, scaled, shift


def _qac_state(**options) -> qac.State:
    state = blank(qac, **options)
    with torch.no_grad():
        state.network.body.value.layers()[0][0][1].copy_(torch.tensor([1.0, 2.0]))  # q(s, 0) = 1, q(s, 1) = 2
    return state


@sabotaged_by("foresight.ops.policy.reinforce", flip_sign)
@sabotaged_by("foresight.ops.targets.taken", lambda f: lambda q, action: f(q, 1 - action))
@sabotaged_by("foresight.ops.returns.lambda_return", shift("next_value"), change("lam", lambda x: 1.0))
def test_qac_golden():
    rows = digits(next_value=torch.tensor([[2.0, 2.0, 1.5]]))  # Sarsa: q of actions 1, 1, then the mean over both
    metrics = qac.update(_qac_state(), rows)
    assert metrics["policy_loss"] == pytest.approx(LN2 * (1 + 2 + 2) / 3, rel=1e-5)
    errors = [1.2 - 1, 2.2 - 2, 3.15 - 2]
    assert metrics["value_loss"] == pytest.approx(sum(e * e for e in errors) / 6, rel=1e-4)
    assert qac.update(_qac_state(all_actions=True), rows)["policy_loss"] == pytest.approx(-1.5, rel=1e-5)


@sabotaged_by("foresight.envs.collect.successors", shift("value"))
@sabotaged_by("foresight.ops.targets.expected", scaled(0.5))
def test_sarsa_follows_the_action_that_was_taken_next():
    env = Clock((1.0, 1.0), num_envs=3)
    state = _qac_state(rollout_steps=20)
    batch, _ = qac.rollout(state, env, env.reset(0))
    assert 0.2 < batch.action.float().mean() < 0.8
    expected = 1.0 + batch.action[:, 1:]  # q of the next action
    expected = torch.where(batch.cut[:, :-1] > 0, 1.5, expected)  # the mean over the policy, at a time limit
    assert torch.equal(batch.value, 1.0 + batch.action)
    assert torch.equal(batch.next_value[:, :-1], expected)
    assert batch.next_value[:, -1].tolist() == [1.5] * 3


@sabotaged_by("foresight.ops.targets.expected", scaled(0.9))
@given(seed=st.integers(0, 2**31))
def test_summing_over_actions_is_the_mean_of_drawing_them(seed):
    """∇ Σ_a π(a|s) q(s, a) = Σ_a π(a|s) q(s, a) ∇log π(a|s)."""
    generator = torch.Generator().manual_seed(seed)
    state, every = blank(qac), blank(qac, all_actions=True)
    with torch.no_grad():
        for a, b in zip(state.network.parameters(), every.network.parameters(), strict=True):
            a.copy_(torch.randn(a.shape, generator=generator))
            b.copy_(a)
    rows = digits().map(lambda x: x[0, :1])
    chances = state.network.policy(rows.obs).mean().detach()[0]
    drawn = sum(
        p * gradient(state, qac.actor_loss(state, rows.replace(action=torch.tensor([a])))[0])
        for a, p in enumerate(chances)
    )
    torch.testing.assert_close(gradient(every, qac.actor_loss(every, rows)[0]), drawn, rtol=1e-4, atol=1e-6)
