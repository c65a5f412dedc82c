"""Transforms: squashing, two-hot encoding, bins, and running statistics for scaling."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def symlog(x: Tensor) -> Tensor:
    """sign(x) · ln(|x| + 1): the identity near 0, a logarithm far out. Any shape.

    Source: DreamerV3, Hafner et al. 2023 (arXiv:2301.04104), "Robust predictions". Inverse: `symexp`.
    """
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """sign(x) · (e^|x| - 1), the inverse of `symlog`. Any shape."""
    return x.sign() * x.abs().expm1()


def signed_hyperbolic(x: Tensor, eps: float = 1e-3) -> Tensor:
    """h(x) = sign(x) (√(|x| + 1) - 1) + ε x: a square root far out, still invertible. Any shape.

    Source: Pohlen et al. 2018 (arXiv:1805.11593), §3.2; used by R2D2 and MuZero (appendix F, ε = 0.001).
    Inverse: `signed_parabolic`.
    """
    size = x.abs()
    return x / ((size + 1).sqrt() + 1) + eps * x  # |x| / (√(|x|+1) + 1) = √(|x|+1) - 1, without cancellation


def signed_parabolic(x: Tensor, eps: float = 1e-3) -> Tensor:
    """h⁻¹(x) = sign(x) (((√(1 + 4ε(|x| + 1 + ε)) - 1) / 2ε)² - 1), the inverse of `signed_hyperbolic`. Any shape."""
    size = x.abs() + 1 + eps
    root = 2 * size / ((1 + 4 * eps * size).sqrt() + 1)  # (√(1+4εs) - 1) / 2ε, without cancellation
    return x.sign() * (root.square() - 1)


def symexp_bins(count: int = 255, limit: float = 20.0) -> Tensor:
    """`count` bins from -symexp(`limit`) to symexp(`limit`), evenly spaced under `symlog`, symmetric: `[count]`.

    Source: DreamerV3 (arXiv:2301.04104), eq. 9.
    """
    nearest = 0 if count % 2 else -limit / (count - 1)  # an even count has no bin at 0
    half = symexp(torch.linspace(-limit, nearest, (count + 1) // 2))
    return torch.cat([half, -half.flip(-1)[1 if count % 2 else 0 :]])


def two_hot_neighbors(x: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
    """`(index, weight)`: the bin below x (int64), and the weight of the bin above it, for `two_hot`.

    Shapes: x `[...]`, bins `[K]` strictly increasing, K ≥ 2; returns two `[...]`.
    """
    x = x.clamp(bins[0], bins[-1])
    above = torch.searchsorted(bins, x.contiguous()).clamp(1, len(bins) - 1)
    low, high = bins[above - 1], bins[above]
    return above - 1, (x - low) / (high - low)


def two_hot(x: Tensor, bins: Tensor) -> Tensor:
    """Weights on the two bins around x, with mean x.

    Shapes: x `[...]`, bins `[K]` strictly increasing, K ≥ 2; returns `[..., K]`. Outside the bins x is
    clamped to the nearest one. Source: MuZero (arXiv:1911.08265), appendix F; DreamerV3 (arXiv:2301.04104).

    Becomes one-hot when x is on a bin.
    """
    index, weight = (y.unsqueeze(-1) for y in two_hot_neighbors(x, bins))
    code = torch.zeros(*x.shape, len(bins), dtype=bins.dtype, device=bins.device)
    return code.scatter(-1, index, 1 - weight).scatter(-1, index + 1, weight)


def two_hot_decode(probs: Tensor, bins: Tensor) -> Tensor:
    """The mean of the bins under `probs`, the inverse of `two_hot` inside the bins.

    Shapes: probs `[..., K]`, bins `[K]`; returns `[...]`. Each bin is added to its mirror image first, so that
    uniform probabilities over symmetric bins give exactly 0 even where the outer bins are huge: a new head
    predicts 0 (as in DreamerV3's code).
    """
    terms = probs * bins
    return 0.5 * (terms + terms.flip(-1)).sum(-1)


def percentile_scale(x: Tensor, previous: Tensor | None = None, rate: float = 0.01, q: float = 0.05) -> Tensor:
    """A running estimate of the range of x: the exponential average of its (1 - q) minus its q quantile.

        S' = (1 - rate) · S + rate · (Per(x, 1 - q) - Per(x, q))

    Shapes: x any shape, previous a scalar or None (the first estimate is the range of x itself); returns a
    scalar without gradient. Divide advantages by S.clamp(min=1), so that small returns are not scaled up.
    Source: DreamerV3 (arXiv:2301.04104), "Actor learning".
    """
    flat = x.detach().flatten().float()
    spread = torch.quantile(flat, 1 - q) - torch.quantile(flat, q)
    return spread if previous is None else previous + rate * (spread - previous)


class Moments(NamedTuple):
    """Number of rows, their mean and (biased) variance: `n` a scalar, `mean`, `var` `[...]`."""

    n: Tensor
    mean: Tensor
    var: Tensor


def moments(x: Tensor) -> Moments:
    """The moments of the rows of x `[N, ...]`: its mean and variance are `[...]`, in float64."""
    x = x.detach().double()
    mean = x.mean(0)
    return Moments(torch.tensor(float(len(x)), dtype=x.dtype, device=x.device), mean, (x - mean).square().mean(0))


def merge_moments(a: Moments, b: Moments) -> Moments:
    """The moments of the union of two sets of rows.

        n = n_a + n_b,  δ = μ_b - μ_a
        μ = μ_a + δ n_b / n,  σ² = (n_a σ_a² + n_b σ_b² + δ² n_a n_b / n) / n

    Source: Chan, Golub, LeVeque 1979, eq. 2.1. Becomes Welford's update when b is a single row, and b itself
    when a is empty.
    """
    n = a.n + b.n
    shift = b.mean - a.mean
    share = b.n / n
    mean = a.mean + shift * share
    var = a.var * (1 - share) + b.var * share + shift.square() * share * (1 - share)
    return Moments(n, mean, var)


def random_shift(images: Tensor, pad: int, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to `pad` pixels in both directions, its edges repeated outside.

    Shapes: images `[N, C, H, W]`; the result is the same. Source: DrQ, Kostrikov et al. 2020 (arXiv:2004.13649), §3.1.

    Becomes the identity when `pad` is 0.
    """
    count, _, height, width = images.shape
    shift = torch.randint(-pad, pad + 1, (2, count, 1), generator=generator, device=images.device)
    rows = (torch.arange(height, device=images.device) + shift[0]).clamp(0, height - 1).unsqueeze(2)
    columns = (torch.arange(width, device=images.device) + shift[1]).clamp(0, width - 1).unsqueeze(1)
    index = torch.arange(count, device=images.device).view(-1, 1, 1)
    return images[index, :, rows, columns].movedim(-1, 1)


def to_bins(x: Tensor, low: Tensor | float, high: Tensor | float, edges: Tensor | int = 256) -> Tensor:
    """The bin of each number, int64 `[...]` from 0 to `edges` - 2; numbers outside the range are in the outer bins.

    256 edges make 255 bins with 255 centers. Source: RT-1 (arXiv:2212.06817), §5, with the count of OpenVLA
    (arXiv:2406.09246), whose 256 tokens have 255 centers.
    """
    count = edges - 1
    # clamped first: int64 overflows
    return ((x - low) / (high - low) * count).floor().clamp(min=0).clamp(max=count - 1).long()


def from_bins(tokens: Tensor, low: Tensor | float, high: Tensor | float, edges: Tensor | int = 256) -> Tensor:
    """The centers of the bins `tokens`: the inverse of `to_bins`, which returns the same tokens for them."""
    return low + (tokens + 0.5) / (edges - 1) * (high - low)
