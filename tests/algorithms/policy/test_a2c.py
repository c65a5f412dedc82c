"""A2C: losses and the first step of RMSProp on batches that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foresight.algorithms.policy import a2c
from tests.algorithms.policy.small_batches import LN2, blank, digits
from tests.sabotage import change, flip_sign, sabotaged_by, scaled, shift, swap


@sabotaged_by("foresight.ops.policy.reinforce", flip_sign)
@sabotaged_by("foresight.ops.returns.gae", swap("discount", "cut"), shift("next_value"), change("lam", lambda x: 0.0))
@sabotaged_by("foresight.ops.value.squared_loss", scaled(2.0))
def test_a2c_golden():
    metrics = a2c.update(blank(a2c), digits())
    gains = [1.234, 2.34, 3.4]
    assert metrics["policy_loss"] == pytest.approx(LN2 * sum(gains) / 3, rel=1e-5)
    assert metrics["value_loss"] == pytest.approx(sum(g * g for g in gains) / 6, rel=1e-5)
    assert metrics["entropy"] == pytest.approx(LN2, rel=1e-5)
    ended = digits(discount=torch.tensor([[1.0, 0.0, 1.0]]), cut=torch.tensor([[0.0, 1.0, 0.0]]))
    gains = [1.2, 2.0, 3.4]
    assert a2c.update(blank(a2c), ended)["policy_loss"] == pytest.approx(LN2 * sum(gains) / 3, rel=1e-5)
    lost = digits(mask=torch.tensor([[1.0, 1.0, 0.0]]), cut=torch.tensor([[0.0, 1.0, 1.0]]))
    lost = lost.replace(discount=torch.tensor([[1.0, 0.0, 0.0]]), reward=torch.tensor([[1.0, 2.0, 1e3]]))
    assert a2c.update(blank(a2c), lost)["policy_loss"] == pytest.approx(LN2 * (1.2 + 2.0) / 2, rel=1e-5)


@sabotaged_by("foresight.ops.fused.mlp.backward", change("grads", lambda gs: [0.9 * g for g in gs]))
@sabotaged_by("foresight.ops.policy.reinforce", scaled(1.1))
def test_a2c_takes_a_step_of_rmsprop_along_the_policy_gradient():
    state = blank(a2c, value_coef=0.0, max_grad_norm=1e9)
    a2c.update(state, digits())
    # ∇ of -mean(A log π) at the uniform policy: (π - onehot) A / 3, here for the bias; see the gains above.
    gradient = np.array([-1.234 + 2.34 + 3.4, 1.234 - 2.34 - 3.4]) / 6
    # RMSProp's first step is lr · g / √((1 - decay) g²), whatever the size of g, so the mean square is read instead.
    (slot,) = state.optimizer.state.values()
    bias = state.network.body.layers()[0][0][1]
    assert (bias.sign().numpy() == -np.sign(gradient)).all()
    found = (slot["square_avg"] / 0.01).sqrt()
    assert found[4:6].tolist() == pytest.approx(np.abs(gradient).tolist(), rel=1e-4)
    assert not found[6:].any()  # nothing of the value
