"""Small functions of learned models, with numbers that can be checked by hand."""

from __future__ import annotations

import pytest
import torch

from foresight.nets.outputs import OneHots
from foresight.ops import latent
from tests.sabotage import change, drop, flip_sign, sabotaged_by, scaled, swap


@sabotaged_by("foresight.ops.latent.scale_gradient", change("factor", lambda f: 1.0))
def test_a_gradient_is_scaled_and_the_number_is_not() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = latent.scale_gradient(x, 0.5)
    assert torch.equal(y, x)
    (y * torch.tensor([3.0, 5.0])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.5, 2.5]


@sabotaged_by("foresight.ops.latent.unit_interval", scaled(2.0))
def test_latents_are_in_the_unit_interval() -> None:
    y = latent.unit_interval(torch.tensor([[2.0, 4.0, 3.0], [7.0, 7.0, 7.0]]), eps=0.0)
    assert y[0].tolist() == [0.0, 1.0, 0.5]
    assert latent.unit_interval(torch.full((2, 3), 7.0)).abs().max() == 0


@sabotaged_by("foresight.ops.latent.unroll_masks", swap("discount", "cut"), drop("mask"))
def test_rows_beyond_the_end_are_known_only_after_a_termination() -> None:
    cut = torch.tensor([[0, 0, 1, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 0.0]])
    discount = torch.ones(5, 5)
    discount[0, 2] = discount[1, 4] = 0  # row 0 terminates; row 1 first meets a time limit
    mask = torch.ones(5, 5)
    mask[3, 2], discount[3, 2], mask[4, 0], discount[4, 0] = 0, 0, 0, 0  # rows of which nothing is known
    alive, over = latent.unroll_masks(discount, cut, mask)
    assert alive.tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1] * 5, [1, 1, 0, 0, 0], [0] * 5]
    assert over.tolist() == [[0, 0, 0, 1, 1], [0] * 5, [0] * 5, [0] * 5, [0] * 5]


@sabotaged_by("foresight.ops.latent.unroll_masks", change("discount", torch.ones_like))
def test_a_lost_life_is_absorbing_and_a_turn_of_the_opponent_is_not() -> None:
    discount = torch.tensor([[1.0, 0.0, 1.0], [-1.0, -1.0, 0.0]])  # the game continues after the lost life
    alive, over = latent.unroll_masks(discount, torch.zeros(2, 3))
    assert alive.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert over.tolist() == [[0, 0, 1], [0, 0, 0]]


@sabotaged_by("foresight.ops.latent.negative_cosine", flip_sign, swap("prediction", "target"))
def test_consistency_is_a_cosine_and_holds_the_target_still() -> None:
    a, b = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.tensor([[1.0, 0.0]], requires_grad=True)
    loss = latent.negative_cosine(a, b)
    torch.testing.assert_close(loss, torch.tensor([-0.6]))
    loss.sum().backward()
    assert b.grad is None and a.grad is not None


@sabotaged_by("foresight.ops.latent.shrunk_horizon", change("share", lambda _: 1.0), change("n", lambda n: n + 1))
def test_old_rows_use_fewer_steps() -> None:
    age = torch.tensor([0, 29, 30, 60, 100, 1000])
    assert latent.shrunk_horizon(age, 100, 5).tolist() == [5, 5, 4, 3, 2, 1]


@sabotaged_by("foresight.ops.latent.value_prefix", change("horizon", lambda h: h + 1), change("alive", torch.ones_like))
def test_a_value_prefix_is_reset() -> None:
    reward = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    alive = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])
    assert latent.value_prefix(reward, alive, 2).tolist() == [[1.0, 3.0, 3.0, 7.0, 0.0]]


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _sigreg(z: torch.Tensor) -> float:
    return float(latent.sigreg(z, 512, torch.Generator().manual_seed(1)))


@sabotaged_by("foresight.ops.latent.sigreg", change("z", lambda z: 0.8 * z), change("t_max", lambda t: 2.0))
def test_sigreg_has_known_values() -> None:
    """Closed forms; for the normal: E|φ_N - φ|² = (1 - φ²) / N, so N cancels."""
    t = torch.linspace(-3, 3, 20_001, dtype=torch.float64)
    phi = (-t.square() / 2).exp()
    collapsed = float(torch.trapezoid((1 - phi).square() * phi, t))
    floor = float(torch.trapezoid((1 - phi.square()) * phi, t))
    assert collapsed == pytest.approx(0.402, abs=1e-3) and floor == pytest.approx(1.05, abs=0.01)
    for n in (64, 128, 512):
        assert _sigreg(torch.zeros(n, 8)) == pytest.approx(collapsed * n, rel=0.01)
    for n in (128, 512):
        normal = [_sigreg(_normal(n, 16, seed=seed)) for seed in range(20)]
        assert sum(normal) / len(normal) == pytest.approx(floor, rel=0.1)
    assert _sigreg(0.5 * _normal(128, 192)) == pytest.approx(20, rel=0.15)


@sabotaged_by("foresight.ops.latent.sigreg", scaled(0.5))
def test_sigreg_is_the_statistic_of_each_slice() -> None:
    z = _normal(3, 7, 4).requires_grad_()
    found = latent.sigreg(z, 5, torch.Generator().manual_seed(3))
    vectors = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    vectors = vectors / vectors.norm(dim=0)
    t = torch.linspace(-3, 3, 33)
    phi = (-t.square() / 2).exp()
    for k in range(3):
        total = 0.0
        for m in range(5):
            h = z[k] @ vectors[:, m]
            empirical = torch.exp(1j * torch.outer(h, t)).mean(0)
            total = total + 7 * torch.trapezoid((empirical - phi).abs().square() * phi, t)
        torch.testing.assert_close(found[k], total / 5, atol=1e-5, rtol=1e-5)
    found.sum().backward()
    assert z.grad is not None and z.grad.abs().max() > 0
    assert latent.sigreg(z.detach().bfloat16(), 5, torch.Generator()).dtype == torch.float32


@sabotaged_by("foresight.ops.latent.effective_rank", scaled(1.1), change("z", lambda z: z + 1e3 * z[:1] * z))
def test_the_effective_rank_counts_directions() -> None:
    assert float(latent.effective_rank(torch.outer(torch.arange(9.0), torch.ones(3)))) == pytest.approx(1, abs=1e-3)
    sides = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    assert float(latent.effective_rank(sides)) == pytest.approx(2)
    stretched = sides * torch.tensor([3.0, 1.0]) + 5  # singular values 3 : 1
    assert float(latent.effective_rank(stretched)) == pytest.approx((0.75**-0.75) * (0.25**-0.25), rel=1e-5)


def _latents() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.randn(4, 3, 5, generator=generator) for _ in range(2))
    q[0] = p[0]  # no divergence: below the free nats
    return q.requires_grad_(), p.requires_grad_()


@sabotaged_by("foresight.ops.latent.balanced_kl", swap("posterior", "prior"), change("free_nats", lambda _: 0.0))
def test_balanced_divergences_have_the_gradients_of_their_terms_and_none_below_the_free_nats() -> None:
    """Of Σ_i q_i (log q_i - log p_i): q - p with respect to the logits of p, q_i (log q_i / p_i - KL) to those of q."""
    q, p = _latents()
    dynamics, representation = latent.balanced_kl(OneHots(q.log_softmax(-1)), OneHots(p.log_softmax(-1)), 1.0)
    ratio = q.log_softmax(-1) - p.log_softmax(-1)
    kl = (q.softmax(-1) * ratio).sum(-1, keepdim=True)
    above = (kl.sum(1, keepdim=True) > 1).float()
    assert above[0] == 0 and 0 < above.sum() < 4
    for term in (dynamics, representation):
        torch.testing.assert_close(term, kl.sum((1, 2)).clamp(min=1.0))
    by_prior = torch.autograd.grad(dynamics.sum(), (q, p), allow_unused=True)
    by_posterior = torch.autograd.grad(representation.sum(), (q, p), allow_unused=True)
    assert by_prior[0] is None and by_posterior[1] is None
    torch.testing.assert_close(by_prior[1], above * (p.softmax(-1) - q.softmax(-1)))
    torch.testing.assert_close(by_posterior[0], above * q.softmax(-1) * (ratio - kl))


@sabotaged_by("foresight.ops.latent.redundancy", change("off_diagonal", lambda x: 0.0))
@sabotaged_by("foresight.ops.latent.redundancy", change("y", lambda y: y.flip(-1)))
def test_redundancy_is_that_of_the_correlations() -> None:
    x = torch.randn(3, 40, 2, generator=torch.Generator().manual_seed(0))
    doubled = torch.cat([x[..., :1], 2 + 3 * x[..., :1]], -1)  # one feature twice, in other units
    found = latent.redundancy(doubled, doubled, off_diagonal=0.5)
    torch.testing.assert_close(found, torch.tensor(1.0), atol=1e-4, rtol=0)  # no distance, and twice 0.5 · 1²
    correlation = torch.corrcoef(torch.cat([x, x.flip(-1).square()], -1).flatten(0, 1).T)[:2, 2:]
    expected = (1 - correlation.diagonal()).square().sum() + 0.5 * (correlation[0, 1] ** 2 + correlation[1, 0] ** 2)
    torch.testing.assert_close(latent.redundancy(x, x.flip(-1).square(), off_diagonal=0.5), expected, atol=1e-4, rtol=0)


def test_constant_features_have_a_redundancy_and_a_gradient() -> None:
    x = torch.ones(6, 3, requires_grad=True)
    found = latent.redundancy(x, torch.ones(6, 3))
    found.backward()
    assert found == 3 and torch.isfinite(x.grad).all()
