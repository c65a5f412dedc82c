"""No loss and no target broadcasts: `[B]` against `[B, 1]` would give `[B, B]`, a wrong mean of plausible size."""

from __future__ import annotations

import pytest
import torch

from foresight.ops import kl, policy, preference, targets, value
from tests.sabotage import returns, sabotaged_by

WIDE, FLAT = torch.full((3, 1), 0.5), torch.full((3,), 0.25)
ONES = torch.ones(3, dtype=torch.bool)

CASES = {
    "reinforce": lambda x, y: policy.reinforce(x, y),
    "ratio": lambda x, y: policy.ratio(x, y),
    "importance_weight": lambda x, y: policy.importance_weight(x, y, "truncated", 2.0),
    "clipped_surrogate": lambda x, y: policy.clipped_surrogate(x, y, 0.2),
    "clipped_weight": lambda x, y: policy.clipped_weight(x, y, y, 0.2),
    "clip_fraction": lambda x, y: policy.clip_fraction(x, 0.2, mask=y),
    "squared_loss": lambda x, y: value.squared_loss(x, y),
    "clipped_loss": lambda x, y: value.clipped_loss(x, y, x, 0.2),
    "huber_loss": lambda x, y: value.huber_loss(x, y),
    "k1": kl.k1,
    "k2": kl.k2,
    "k3": kl.k3,
    "normal": lambda x, y: kl.normal(x, y, y, y),
    "bradley_terry": lambda x, y: preference.bradley_terry(x, y),
    "margin": lambda x, y: preference.bradley_terry(x, x, y),
    "centering": lambda x, y: preference.centering(x, y),
    "kto": lambda x, y: preference.kto(x, 0.0, ONES if x is y else y > 0, 0.1),
    "odds_ratio": lambda x, y: preference.odds_ratio(-x, -y),
    "td": lambda x, y: targets.td(x, x, y),
    "expected": lambda x, y: targets.expected(x, y),
}


@pytest.mark.parametrize("name", CASES)
def test_shapes_that_differ_are_refused(name):
    compute = CASES[name]
    assert compute(FLAT, FLAT).dim() <= 1  # equal shapes fit
    with pytest.raises(ValueError, match=r"must have one shape, but they have .*\(3, 1\).*\(3,\)|\(3,\).*\(3, 1\)"):
        compute(WIDE, FLAT)


def test_actions_and_choices_need_the_shape_of_the_steps():
    q = torch.arange(6.0).view(3, 2)
    action = torch.tensor([0, 1, 1])
    assert targets.taken(q, action).tolist() == [0.0, 3.0, 5.0]
    with pytest.raises(ValueError, match=r"'action': \(3, 1\), 'q': \(3,\)"):
        targets.taken(q, action[:, None])
    with pytest.raises(ValueError, match=r"'discount': \(3, 1\)"):
        value.double_q_target(FLAT, WIDE, q, action)


@sabotaged_by("foresight.ops.value.squared_loss", returns(lambda x: x + 1))
def test_scalars_fit_any_shape():
    torch.testing.assert_close(value.squared_loss(WIDE, torch.tensor(0.5)), torch.zeros(3, 1))
    assert policy.reinforce(WIDE, torch.tensor(2.0)).shape == (3, 1)
    assert preference.bradley_terry(FLAT, FLAT, 0.5).shape == (3,)
    assert targets.td(FLAT, torch.tensor(0.9), FLAT).shape == (3,)
