"""Outputs against torch.distributions, exact integrals and many draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import distributions as D

from foresight.nets.outputs import Categorical, MultiCategorical, Normal, Scalar, TanhNormal, TwoHot
from tests.sabotage import drop, flip_sign, returns, sabotaged_by, scaled

MASK = torch.tensor([True, False, True, True])


def _logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@sabotaged_by("foresight.nets.outputs.Categorical.logp", flip_sign)
@sabotaged_by("foresight.nets.outputs.Categorical.entropy", scaled(0.5))
@sabotaged_by("foresight.nets.outputs.Categorical.kl", flip_sign)
def test_categorical_is_torchs():
    logits, other, x = _logits(5, 3, 4), _logits(5, 3, 4), torch.randint(0, 4, (5, 3))
    ours, theirs = Categorical(logits), D.Categorical(logits=logits)
    torch.testing.assert_close(ours.logp(x), theirs.log_prob(x))
    torch.testing.assert_close(ours.loss(x), -theirs.log_prob(x))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(ours.mean(), theirs.probs)
    torch.testing.assert_close(ours.kl(Categorical(other)), D.kl_divergence(theirs, D.Categorical(logits=other)))
    assert torch.equal(ours.mode(), logits.argmax(-1))


@sabotaged_by("foresight.nets.outputs.Categorical.__init__", drop("mask"))
def test_a_masked_choice_has_no_probability_no_draw_and_no_gradient():
    logits = _logits(200, 4).requires_grad_()
    output = Categorical(logits, MASK)
    only = D.Categorical(logits=logits[:, MASK])
    torch.testing.assert_close(output.entropy(), only.entropy())
    torch.testing.assert_close(output.logp(torch.full((200,), 2)), only.log_prob(torch.ones(200)))
    assert not (output.sample(torch.Generator().manual_seed(0)) == 1).any()
    assert not (output.mode() == 1).any()
    assert (output.mean()[:, 1] == 0).all()
    (output.entropy() + output.logp(torch.zeros(200, dtype=torch.int64))).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert (logits.grad[:, 1] == 0).all() and (logits.grad[:, 0] != 0).all()


def test_categorical_draws_have_their_probabilities():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    draws = Categorical(logits.expand(100_000, 4)).sample(torch.Generator().manual_seed(0))
    share = draws.bincount(minlength=4) / 100_000
    assert (share - logits.softmax(-1)).abs().max() < 0.006  # 4 standard errors


def test_equal_generators_draw_equally():
    for output in (Categorical(_logits(9, 4)), Normal(_logits(9, 4), torch.ones(4)), Scalar(_logits(9))):
        first, again, other = (output.sample(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(first, again) and not torch.equal(first, other)


@sabotaged_by("foresight.nets.outputs._total", scaled(2.0))
def test_multi_categorical_is_the_sum_of_its_parts():
    logits, x = _logits(6, 5), torch.stack([torch.randint(0, 2, (6,)), torch.randint(0, 3, (6,))], -1)
    ours = MultiCategorical(logits, [2, 3])
    parts = [D.Categorical(logits=logits[:, :2]), D.Categorical(logits=logits[:, 2:])]
    torch.testing.assert_close(ours.logp(x), parts[0].log_prob(x[:, 0]) + parts[1].log_prob(x[:, 1]))
    torch.testing.assert_close(ours.entropy(), parts[0].entropy() + parts[1].entropy())
    assert ours.sample().shape == ours.mode().shape == (6, 2)
    masked = MultiCategorical(logits, [2, 3], torch.tensor([True, False, True, True, False]))
    assert (masked.sample()[:, 0] == 0).all() and (masked.mode()[:, 1] < 2).all()


@sabotaged_by("foresight.nets.outputs.Normal.logp", flip_sign)
@sabotaged_by("foresight.nets.outputs.Normal.entropy", scaled(2.0))
@sabotaged_by("foresight.nets.outputs.Normal.kl", scaled(2.0))
@pytest.mark.parametrize("shape", [(3,), (4, 3)])
def test_normal_is_torchs(shape):
    mean, std = _logits(4, 3), _logits(*shape).exp()
    ours, theirs = Normal(mean, std), D.Independent(D.Normal(mean, std), 1)
    x = _logits(4, 3)
    torch.testing.assert_close(ours.logp(x), theirs.log_prob(x))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    q_mean, q_std = _logits(4, 3), _logits(3).exp()
    other = D.Independent(D.Normal(q_mean, q_std), 1)
    torch.testing.assert_close(ours.kl(Normal(q_mean, q_std)), D.kl_divergence(theirs, other))


def test_normal_draws_are_reparameterised():
    mean = torch.zeros(50_000, 2, requires_grad=True)
    x = Normal(mean, torch.tensor([1.0, 3.0])).sample(torch.Generator().manual_seed(0))
    assert (x.std(0) - torch.tensor([1.0, 3.0])).abs().max() < 0.05
    x.sum().backward()
    assert mean.grad is not None and (mean.grad == 1).all()


@sabotaged_by("foresight.nets.outputs._log_slope", scaled(0.5))
def test_tanh_normal_integrates_to_one():
    output = TanhNormal(torch.tensor([0.7], dtype=torch.float64), torch.tensor([0.9], dtype=torch.float64))
    x = torch.linspace(-1, 1, 200_001, dtype=torch.float64)[1:-1]
    density = output.logp(x.unsqueeze(-1)).exp()
    assert torch.trapezoid(density, x).item() == pytest.approx(1, abs=1e-4)
    assert torch.trapezoid(density * x, x).item() == pytest.approx(output.mean().item(), abs=1e-4)
    entropy = torch.trapezoid(-density * density.log(), x).item()
    assert entropy == pytest.approx(output.entropy().item(), abs=2e-3)


@sabotaged_by("foresight.nets.outputs._log_slope", flip_sign)
def test_tanh_normal_is_torchs_and_stays_finite():
    mean, std = _logits(4, 3), _logits(4, 3).exp()
    ours = TanhNormal(mean, std)
    theirs = D.Independent(D.TransformedDistribution(D.Normal(mean, std), [D.TanhTransform()]), 1)
    x = torch.rand(4, 3, dtype=torch.float64) * 1.9 - 0.95
    torch.testing.assert_close(ours.logp(x), theirs.log_prob(x))
    y, logp = ours.sample_logp(torch.Generator().manual_seed(0))
    torch.testing.assert_close(logp, theirs.log_prob(y))
    far = TanhNormal(torch.tensor([40.0]), torch.tensor([1.0]))
    y, logp = far.sample_logp()
    assert y.item() == 1 and math.isfinite(logp.item()) and math.isfinite(far.logp(y).item())
    assert math.isfinite(far.entropy().item())


def test_scalar_is_a_normal_of_variance_one():
    value, x = _logits(5), _logits(5)
    ours, theirs = Scalar(value), D.Normal(value, 1.0)
    torch.testing.assert_close(ours.logp(x), theirs.log_prob(x))
    torch.testing.assert_close(ours.entropy(), theirs.entropy().to(value.dtype))
    torch.testing.assert_close(ours.kl(Scalar(x)), D.kl_divergence(theirs, D.Normal(x, 1.0)))
    torch.testing.assert_close(ours.loss(x), 0.5 * (x - value) ** 2)
    assert torch.equal(ours.mean(), value) and torch.equal(ours.mode(), value)


@sabotaged_by("foresight.ops.transforms.two_hot_neighbors", returns(lambda weight: 1 - weight))
def test_two_hot_predicts_what_it_is_fitted_to():
    bins = torch.linspace(-2, 2, 9)
    logits = torch.zeros(1, 9, requires_grad=True)
    assert TwoHot(logits, bins).mean().item() == 0  # exactly: symmetric bins, equal probabilities
    target = torch.tensor([0.8])
    optimizer = torch.optim.Adam([logits], lr=0.3)
    for _ in range(300):
        optimizer.zero_grad()
        TwoHot(logits, bins).loss(target).sum().backward()
        optimizer.step()
    fitted = TwoHot(logits.detach(), bins)
    assert fitted.mean().item() == pytest.approx(0.8, abs=0.02)
    assert fitted.mode().item() in (0.5, 1.0)
    assert fitted.sample().item() in bins.tolist()
    p = np.array([0.4, 0.6])  # 0.8 lies between the bins 0.5 and 1.0
    assert fitted.loss(target).item() == pytest.approx(-(p * np.log(p)).sum(), abs=0.02)
