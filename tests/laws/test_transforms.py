"""What must hold for transforms and statistics, whatever the numbers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from foresight.ops import transforms
from tests.sabotage import change, flip_sign, sabotaged_by, scaled

TRANSFORMS = "foresight.ops.transforms."
SEEDS = st.integers(0, 2**31)


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@sabotaged_by(TRANSFORMS + "symlog", flip_sign, change("x", torch.abs))
@sabotaged_by(TRANSFORMS + "symexp", flip_sign, scaled(1.01))
@sabotaged_by(TRANSFORMS + "signed_hyperbolic", flip_sign, change("x", torch.abs))
@sabotaged_by(TRANSFORMS + "signed_parabolic", flip_sign, scaled(1.01), change("eps", lambda e: 2 * e))
@given(SEEDS, st.sampled_from([1e-3, 1.0, 1e4]))
def test_squashing_has_an_inverse_a_sign_and_an_order(seed: int, scale: float) -> None:
    x = (scale * randn(seed, 50)).sort().values
    pairs = (
        (transforms.symlog, transforms.symexp),
        (transforms.signed_hyperbolic, transforms.signed_parabolic),
    )
    for squash, inverse in pairs:
        y = squash(x)
        torch.testing.assert_close(inverse(y), x, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(squash(-x), -y, rtol=0, atol=0)
        assert (y.diff() > 0).all() and (y.abs() <= 1.001 * x.abs()).all()


@sabotaged_by(TRANSFORMS + "signed_parabolic", scaled(1.01))
@sabotaged_by(TRANSFORMS + "symexp", scaled(1.01))
def test_squashing_is_accurate_in_float32() -> None:
    x = torch.tensor([1e-4, 0.1, 3.0, 299.0, 1e4])
    torch.testing.assert_close(transforms.signed_parabolic(transforms.signed_hyperbolic(x)), x, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(transforms.symexp(transforms.symlog(x)), x, rtol=1e-5, atol=1e-6)


@sabotaged_by(TRANSFORMS + "two_hot", change("x", lambda x: x + 0.01), change("bins", lambda b: b + 0.01), scaled(0.9))
@sabotaged_by(TRANSFORMS + "two_hot_decode", flip_sign, scaled(1.1))
@given(SEEDS, st.integers(2, 20))
def test_two_hot_is_a_distribution_whose_mean_is_the_number(seed: int, count: int) -> None:
    bins = (0.01 + randn(seed, count).abs()).cumsum(0) - 3
    x = bins[0] + (bins[-1] - bins[0]) * torch.rand(3, 7, generator=torch.Generator().manual_seed(seed)).double()
    code = transforms.two_hot(x, bins)
    assert code.shape == (3, 7, count)
    assert (code >= 0).all() and ((code > 0).sum(-1) <= 2).all()
    torch.testing.assert_close(code.sum(-1), torch.ones(3, 7).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(transforms.two_hot_decode(code, bins), x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(transforms.two_hot(bins, bins), torch.eye(count).double(), rtol=0, atol=1e-9)
    used = (code > 0).double()
    gap = (used * torch.arange(count)).amax(-1) - torch.where(code > 0, torch.arange(count), count).amin(-1)
    assert (gap <= 1).all()  # the two are neighbors


@sabotaged_by(TRANSFORMS + "merge_moments", scaled(1.1), change("b", lambda b: b._replace(var=0 * b.var)))
@sabotaged_by(TRANSFORMS + "moments", change("x", lambda x: x[:1].repeat_interleave(len(x), 0)))
@given(SEEDS, st.lists(st.integers(1, 5), min_size=2, max_size=5))
def test_moments_do_not_depend_on_how_the_rows_came(seed: int, sizes: list[int]) -> None:
    x = 100 + randn(seed, sum(sizes), 3)
    total = transforms.Moments(torch.tensor(0.0), torch.zeros(3).double(), torch.ones(3).double())  # nothing seen yet
    for part in x.split(sizes):
        total = transforms.merge_moments(total, transforms.moments(part))
    assert total.n == len(x)
    torch.testing.assert_close(total.mean, x.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total.var, x.var(0, correction=0), rtol=1e-9, atol=1e-12)
