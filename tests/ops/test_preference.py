"""Losses on pairs against their definitions, and the gradient of the entropy."""

from __future__ import annotations

import math

import pytest
import torch

from foresight.ops import preference, tokens
from tests.sabotage import change, flip_sign, sabotaged_by, scaled, swap

D = [-3.0, -0.5, 0.0, 0.2, 4.0]


def _sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@sabotaged_by("foresight.ops.preference.sigmoid", flip_sign, change("difference", lambda d: -d))
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_and_cdpo(smoothing):
    loss = preference.sigmoid(torch.tensor(D), 0.3, smoothing)
    expected = [-(1 - smoothing) * math.log(_sigma(0.3 * d)) - smoothing * math.log(_sigma(-0.3 * d)) for d in D]
    torch.testing.assert_close(loss, torch.tensor(expected), atol=1e-5, rtol=0)


@sabotaged_by("foresight.ops.preference.ipo", change("beta", lambda b: 2 * b))
def test_ipo_has_its_minimum_where_the_odds_are_half_the_inverse_of_beta():
    torch.testing.assert_close(preference.ipo(torch.tensor([5.0, 4.0, 0.0]), 0.1), torch.tensor([0.0, 1.0, 25.0]))


@sabotaged_by("foresight.ops.preference.hinge", scaled(2.0))
def test_hinge_stops_at_its_margin():
    torch.testing.assert_close(preference.hinge(torch.tensor([20.0, 5.0, -10.0]), 0.1), torch.tensor([0.0, 0.5, 2.0]))


@sabotaged_by("foresight.ops.preference.bradley_terry", swap("chosen", "rejected"), change("margin", lambda m: -m))
@sabotaged_by("foresight.ops.preference.centring", scaled(0.5))
def test_bradley_terry_with_a_margin_and_centring():
    chosen, rejected, margin = (torch.tensor(x) for x in ([2.0, -1.0], [0.5, 3.0], [1.0, 0.5]))
    expected = [-math.log(_sigma(2.0 - 0.5 - 1.0)), -math.log(_sigma(-1.0 - 3.0 - 0.5))]
    torch.testing.assert_close(preference.bradley_terry(chosen, rejected, margin), torch.tensor(expected))
    assert preference.centring(chosen, rejected).tolist() == [6.25, 4.0]


@sabotaged_by("foresight.ops.tokens._wide", lambda f: lambda logits, t: f(logits, t) * 1.001)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_entropy_has_its_gradient_too(temperature):
    logits = torch.randn(70, 5, dtype=torch.float64, requires_grad=True)
    chosen = torch.randint(5, (70,))
    logprob, entropy = tokens.token_logprob(logits, chosen, temperature)
    (grad,) = torch.autograd.grad((2 * logprob + 3 * entropy).sum(), logits)
    plain = torch.distributions.Categorical(logits=logits / temperature)
    (expected,) = torch.autograd.grad((2 * plain.log_prob(chosen) + 3 * plain.entropy()).sum(), logits)
    torch.testing.assert_close(grad, expected)


def test_the_entropys_gradient_is_zero_at_a_token_that_is_ruled_out():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], requires_grad=True)
    tokens.token_logprob(logits, torch.tensor([0]))[1].sum().backward()
    assert logits.grad[0, 1] == 0 and logits.grad.isfinite().all()
