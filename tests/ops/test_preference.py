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


@sabotaged_by("foresight.ops.preference.robust", flip_sign, change("smoothing", lambda e: e / 2))
def test_rdpo_is_unbiased_under_the_noise_that_it_expects():
    """(1 − ε) L(D) + ε L(−D) is DPO's loss; without noise it is that loss itself."""
    differences = torch.tensor(D, dtype=torch.float64)
    noisy = 0.8 * preference.robust(differences, 0.3, 0.2) + 0.2 * preference.robust(-differences, 0.3, 0.2)
    torch.testing.assert_close(noisy, preference.sigmoid(differences, 0.3))
    torch.testing.assert_close(preference.robust(differences, 0.3), preference.sigmoid(differences, 0.3))


@sabotaged_by("foresight.ops.preference.ipo", change("beta", lambda b: 2 * b))
def test_ipo_has_its_minimum_where_the_odds_are_half_the_inverse_of_beta():
    torch.testing.assert_close(preference.ipo(torch.tensor([5.0, 4.0, 0.0]), 0.1), torch.tensor([0.0, 1.0, 25.0]))


@sabotaged_by("foresight.ops.preference.hinge", scaled(2.0))
def test_hinge_stops_at_its_margin():
    torch.testing.assert_close(preference.hinge(torch.tensor([20.0, 5.0, -10.0]), 0.1), torch.tensor([0.0, 0.5, 2.0]))


@sabotaged_by("foresight.ops.preference.bradley_terry", swap("chosen", "rejected"), change("margin", lambda m: -m))
@sabotaged_by("foresight.ops.preference.centering", scaled(0.5))
def test_bradley_terry_with_a_margin_and_centering():
    chosen, rejected, margin = (torch.tensor(x) for x in ([2.0, -1.0], [0.5, 3.0], [1.0, 0.5]))
    expected = [-math.log(_sigma(2.0 - 0.5 - 1.0)), -math.log(_sigma(-1.0 - 3.0 - 0.5))]
    torch.testing.assert_close(preference.bradley_terry(chosen, rejected, margin), torch.tensor(expected))
    assert preference.centering(chosen, rejected).tolist() == [6.25, 4.0]


@sabotaged_by(
    "foresight.ops.preference.kto",
    change("desirable", lambda d: ~d),
    swap("desirable_weight", "undesirable_weight"),
    change("reference_point", lambda z: 0.0),
)
def test_kto_is_equation_8():
    """λ_y − v(x, y), from the numbers of a pocket calculator."""
    ratio, desirable = torch.tensor([3.0, 3.0, -1.0, -1.0]), torch.tensor([True, False, True, False])
    found = preference.kto(ratio, 0.5, desirable, 0.2, desirable_weight=1.5, undesirable_weight=2.0)
    values = [1.5 * _sigma(0.2 * 2.5), 2.0 * _sigma(-0.2 * 2.5), 1.5 * _sigma(-0.2 * 1.5), 2.0 * _sigma(0.2 * 1.5)]
    expected = [weight - value for weight, value in zip([1.5, 2.0, 1.5, 2.0], values, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected))


@sabotaged_by("foresight.ops.preference.odds_ratio", swap("chosen", "rejected"), scaled(2.0))
@sabotaged_by("foresight.ops.preference._log_odds", lambda f: lambda logprob: logprob)
def test_the_odds_ratio_and_its_gradient_are_the_papers():
    """Eq. 7, and eq. 8 to 10: δ = 1 / (1 + odds_c / odds_r) times ∇P_c / (P_c (1 - P_c)) less the same of the other."""
    for p, q in ((0.5, 0.25), (0.1, 0.9), (0.3, 0.3)):
        chosen, rejected = (torch.tensor([math.log(x)], dtype=torch.float64, requires_grad=True) for x in (p, q))
        loss = preference.odds_ratio(chosen, rejected)
        odds = [x / (1 - x) for x in (p, q)]
        assert math.isclose(loss.item(), -math.log(_sigma(math.log(odds[0] / odds[1]))), rel_tol=1e-9)
        grads = torch.autograd.grad(loss.sum(), (chosen, rejected))
        delta = 1 / (1 + odds[0] / odds[1])
        assert math.isclose(grads[0].item(), -delta / (1 - p), rel_tol=1e-9)
        assert math.isclose(grads[1].item(), delta / (1 - q), rel_tol=1e-9)


@sabotaged_by("foresight.ops.preference._log_odds", lambda f: lambda x: x - torch.log1p(-torch.exp(x)))
def test_an_answer_that_is_certain_has_finite_odds():
    sure = torch.zeros(2, requires_grad=True)
    loss = preference.odds_ratio(sure, torch.tensor([0.0, -1.0])).sum()
    loss.backward()
    assert loss.isfinite() and sure.grad.isfinite().all()


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
