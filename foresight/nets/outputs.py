"""Outputs of heads: distributions (or points) with sampling, scoring and a loss.

All have the same interface: `sample(generator)`, `mode()`, `mean()`, `logp(x)`, `entropy()`, `kl(other)` and
`loss(target)`. Scores are `[...]`: summed over the dims of one action, no trailing singleton.
They replace `torch.distributions`, whose checks and broadcasting cost more than a small network.
`sample` is reparameterized (differentiable) for continuous distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from foresight.nets.precision import compiled
from foresight.ops import transforms

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Output(Protocol):
    """The interface of all outputs."""

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A sample."""

    def mode(self) -> Tensor:
        """The likeliest value: the greedy action of a policy."""

    def mean(self) -> Tensor:
        """The expected value."""

    def logp(self, x: Tensor) -> Tensor:
        """Log-probability (or density) of `x`, `[...]`."""

    def entropy(self) -> Tensor:
        """Entropy in nats, `[...]`."""

    def kl(self, other: Any) -> Tensor:
        """KL(self ‖ other), `[...]`."""

    def loss(self, target: Tensor) -> Tensor:
        """The loss for predicting `target`, `[...]`."""


class Categorical:
    """One of A choices, from `logits` `[..., A]`.

    `mask` (bool, `[..., A]` or broadcast) is true where a choice is allowed: the others get probability 0,
    and their logits exactly no gradient (Huang & Ontañón 2022, arXiv 2006.14171).
    """

    __slots__ = ("_logps", "logits")

    def __init__(self, logits: Tensor, mask: Tensor | None = None) -> None:
        # The lowest finite float, not -inf: p·log p must be 0 and not NaN where p = 0.
        self.logits = logits if mask is None else logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        self._logps: Tensor | None = None

    @property
    def logps(self) -> Tensor:
        """Log-probabilities of all choices, `[..., A]`."""
        if self._logps is None:
            self._logps = torch.log_softmax(self.logits, -1)
        return self._logps

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A choice, int64 `[...]`: argmax of logits + Gumbel noise, where -log(exponential) is Gumbel."""
        noise = torch.empty_like(self.logits).exponential_(generator=generator).log_()
        return (self.logits - noise).argmax(-1)

    def mode(self) -> Tensor:
        """The likeliest choice, int64 `[...]`."""
        return self.logits.argmax(-1)

    def mean(self) -> Tensor:
        """Probabilities `[..., A]`: the mean of the one-hot choice."""
        return self.logps.exp()

    def logp(self, x: Tensor) -> Tensor:
        """Log-probability of the choices `x` (int64 `[...]`)."""
        return self.logps.gather(-1, x.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """-Σ p log p."""
        return -(self.logps.exp() * self.logps).sum(-1)

    def kl(self, other: Categorical) -> Tensor:
        """Σ p (log p - log q)."""
        return (self.logps.exp() * (self.logps - other.logps)).sum(-1)

    def loss(self, target: Tensor) -> Tensor:
        """Cross-entropy with the choices `target`."""
        return -self.logp(target)

    def tempered(self, temperature: float) -> Categorical:
        """In proportion to p^(1/temperature): flatter above 1, sharper below 1."""
        return Categorical(self.logps / temperature)


class OneHots:
    """G independent categoricals of C classes as one-hot vectors, from log-probabilities `logps` `[..., G, C]`.

    Samples are `[..., G C]`: the one-hot vectors, one after the other. Scores are summed over G. Source: the discrete
    latents of DreamerV2, Hafner et al. 2021 (arXiv:2010.02193), §2.
    """

    __slots__ = ("logps",)

    def __init__(self, logps: Tensor) -> None:
        self.logps = logps

    @classmethod
    def mixed(cls, logits: Tensor, uniform: float) -> OneHots:
        """Softmax of `logits` mixed with a share `uniform` of the uniform distribution, so that no KL is infinite."""
        if not uniform:
            return cls(logits.log_softmax(-1))
        return cls(((1 - uniform) * logits.softmax(-1) + uniform / logits.shape[-1]).log())

    def straight_through(self, draws: Tensor | None) -> Tensor:
        """The sample `[..., G C]` at uniform `draws` `[..., G]`, with the gradient of the probabilities; else the mode.

        It is the first class up to which the probabilities sum to more than the draw.
        """
        probs = self.logps.exp()
        if draws is None:
            index = probs.argmax(-1)
        else:
            index = (_cumulative(probs.detach())[..., :-1] <= draws.unsqueeze(-1)).sum(-1)
        hard = F.one_hot(index, self.logps.shape[-1]).to(probs.dtype)
        return (hard + (probs - probs.detach())).flatten(-2)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A sample `[..., G C]`, with the gradient of the probabilities."""
        return self.straight_through(torch.rand(self.logps.shape[:-1], generator=generator, device=self.logps.device))

    def mode(self) -> Tensor:
        """The likeliest vectors, `[..., G C]`."""
        return F.one_hot(self.logps.argmax(-1), self.logps.shape[-1]).to(self.logps.dtype).flatten(-2)

    def mean(self) -> Tensor:
        """Probabilities `[..., G C]`."""
        return self.logps.exp().flatten(-2)

    def logp(self, x: Tensor) -> Tensor:
        """Log-probability of the vectors `x` `[..., G C]`."""
        return (x.unflatten(-1, self.logps.shape[-2:]) * self.logps).sum((-2, -1))

    def entropy(self) -> Tensor:
        """Sum of the entropies."""
        return -(self.logps.exp() * self.logps).sum((-2, -1))

    def detach(self) -> OneHots:
        """The same without gradient."""
        return OneHots(self.logps.detach())

    def kl(self, other: OneHots) -> Tensor:
        """Sum of the divergences."""
        return (self.logps.exp() * (self.logps - other.logps)).sum((-2, -1))

    def loss(self, target: Tensor) -> Tensor:
        """Cross-entropy with the vectors `target`."""
        return -self.logp(target)


def _cumulative(probs: Tensor) -> Tensor:
    """`cumsum` over the last dim; on a GPU, whose scans of short rows are slow, a product with ones in a triangle."""
    if probs.is_cpu:
        return probs.cumsum(-1)
    with torch.autocast(probs.device.type, enabled=False):
        return probs @ probs.new_ones(probs.shape[-1], probs.shape[-1]).triu()


def one_hots(logits: Tensor, groups: int, uniform: float, generator: torch.Generator | None) -> Tensor:
    """A sample `[N, G C]` of `OneHots.mixed` of flat logits `[N, G C]`; one loop on a CPU if nothing has a gradient."""
    if not compiled(logits) or torch.is_grad_enabled():
        return OneHots.mixed(logits.unflatten(-1, (groups, -1)), uniform).sample(generator)
    from foresight.ops.fused import latent as fused_latent  # late: numba is slow to import

    found, draws = torch.empty_like(logits), torch.rand(len(logits), groups, generator=generator)
    fused_latent.one_hots(logits, draws, groups, uniform, found)
    return found


class MultiCategorical:
    """Independent choices, one of `sizes[i]` each; `logits` `[..., Σ sizes]`. Scores are summed (PPO detail 37)."""

    __slots__ = ("parts",)

    def __init__(self, logits: Tensor, sizes: Sequence[int], mask: Tensor | None = None) -> None:
        masks = [None] * len(sizes) if mask is None else mask.split(list(sizes), -1)
        self.parts = [Categorical(part, m) for part, m in zip(logits.split(list(sizes), -1), masks, strict=True)]

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Choices, int64 `[..., len(sizes)]`."""
        return torch.stack([part.sample(generator) for part in self.parts], -1)

    def mode(self) -> Tensor:
        """The likeliest choices, int64 `[..., len(sizes)]`."""
        return torch.stack([part.mode() for part in self.parts], -1)

    def mean(self) -> Tensor:
        """Probabilities of all choices, one after the other, `[..., Σ sizes]`."""
        return torch.cat([part.mean() for part in self.parts], -1)

    def logp(self, x: Tensor) -> Tensor:
        """Log-probability of the choices `x` (int64 `[..., len(sizes)]`)."""
        return _total([part.logp(x[..., i]) for i, part in enumerate(self.parts)])

    def entropy(self) -> Tensor:
        """Sum of the entropies."""
        return _total([part.entropy() for part in self.parts])

    def kl(self, other: MultiCategorical) -> Tensor:
        """Sum of the divergences."""
        return _total([p.kl(q) for p, q in zip(self.parts, other.parts, strict=True)])

    def loss(self, target: Tensor) -> Tensor:
        """Cross-entropy with the choices `target`."""
        return -self.logp(target)


class Normal:
    """Independent normals over the last dim; `mean` `[..., D]`, `std` the same or `[D]`.

    `features` `[..., F]` are those that state-dependent noise is linear in, see `heads.StateDependentHead`.
    """

    __slots__ = ("features", "location", "std")

    def __init__(self, mean: Tensor, std: Tensor, features: Tensor | None = None) -> None:
        self.location, self.std, self.features = mean, std, features

    def perturbed(self, weights: Tensor) -> Tensor:
        """The mean plus the noise that `weights` `[..., F, D]` make of the features, `[..., D]`."""
        assert self.features is not None
        return self.location + (self.features.unsqueeze(-2) @ weights).squeeze(-2)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A sample `[..., D]`."""
        return self.location + self.std * _noise(self.location, generator)

    def mode(self) -> Tensor:
        """The mean."""
        return self.location

    def mean(self) -> Tensor:
        """The mean."""
        return self.location

    def logp(self, x: Tensor) -> Tensor:
        """Log-density of `x` `[..., D]`."""
        constant = (self.std.log() + HALF_LOG_2PI).sum(-1)
        return ((x - self.location) / self.std).square().sum(-1) * -0.5 - constant

    def entropy(self) -> Tensor:
        """Σ log std + ½ log 2πe."""
        return (self.std.log() + (HALF_LOG_2PI + 0.5)).sum(-1).expand(self.location.shape[:-1])

    def kl(self, other: Normal) -> Tensor:
        """Closed form, summed over dims."""
        ratio = (self.std / other.std).square()
        gap = ((self.location - other.location) / other.std).square()
        return 0.5 * (ratio + gap - 1 - ratio.log()).sum(-1)

    def loss(self, target: Tensor) -> Tensor:
        """Negative log-density of `target`."""
        return -self.logp(target)


class TanhNormal:
    """`tanh(u)` with u independent normals: actions in (-1, 1) (SAC, arXiv 1812.05905, appendix C).

    log |d tanh(u)/du| is computed as 2(log 2 - u - softplus(-2u)), which stays exact where tanh saturates.
    """

    __slots__ = ("base",)
    EDGE = 1 - 2.0**-24  # the largest float32 below 1

    def __init__(self, mean: Tensor, std: Tensor, features: Tensor | None = None) -> None:
        self.base = Normal(mean, std, features)

    def perturbed(self, weights: Tensor) -> Tensor:
        """tanh of `Normal.perturbed`, `[..., D]`."""
        return self.base.perturbed(weights).tanh()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A sample `[..., D]`."""
        return self.base.sample(generator).tanh()

    def sample_logp(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """A sample and its log-density, from the same u: no inverse of tanh, so exact at the edges too."""
        mean, noise = self.base.location, _noise(self.base.location, generator)
        return _Squashed.apply(mean, self.base.std.expand_as(mean), noise)  # type: ignore[no-untyped-call]  # torch's

    def mode(self) -> Tensor:
        """tanh of the mean of u: the median, used as the mode in practice."""
        return self.base.location.tanh()

    def mean(self) -> Tensor:
        """E[tanh(u)], by Gauss-Hermite quadrature."""
        return self._expect(torch.tanh)

    def logp(self, x: Tensor) -> Tensor:
        """Log-density of `x` `[..., D]`; ±1 is clamped to the nearest float inside."""
        u = x.clamp(-self.EDGE, self.EDGE).atanh()
        return self.base.logp(u) - _log_slope(u).sum(-1)

    def entropy(self) -> Tensor:
        """Entropy of u plus E[log slope], by Gauss-Hermite quadrature."""
        return self.base.entropy() + self._expect(_log_slope).sum(-1)

    def kl(self, other: TanhNormal) -> Tensor:
        """The divergence of the normals: an invertible map does not change it."""
        return self.base.kl(other.base)

    def loss(self, target: Tensor) -> Tensor:
        """Negative log-density of `target`."""
        return -self.logp(target)

    def tempered(self, temperature: float) -> TanhNormal:
        """tanh(u) with the density of u in proportion to p(u)^(1/temperature): its variance times temperature."""
        return TanhNormal(self.base.location, self.base.std * math.sqrt(temperature))

    def _expect(self, function: Any, nodes: int = 32) -> Tensor:
        points, weights = (
            torch.as_tensor(v, dtype=self.base.location.dtype, device=self.base.location.device)
            for v in np.polynomial.hermite.hermgauss(nodes)
        )
        u = self.base.location.unsqueeze(-1) + math.sqrt(2) * self.base.std.unsqueeze(-1) * points
        return (function(u) * (weights / math.sqrt(math.pi))).sum(-1)


class Scalar:
    """A scalar `[...]`, the mean of a normal of variance 1: its `loss` is half the squared error."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """The value plus unit noise."""
        return self.value + _noise(self.value, generator)

    def mode(self) -> Tensor:
        """The value."""
        return self.value

    def mean(self) -> Tensor:
        """The value."""
        return self.value

    def logp(self, x: Tensor) -> Tensor:
        """Log-density of `x` under the normal of variance 1."""
        return -HALF_LOG_2PI - 0.5 * (x - self.value).square()

    def entropy(self) -> Tensor:
        """½ log 2πe, for any value."""
        return torch.full_like(self.value, HALF_LOG_2PI + 0.5)

    def kl(self, other: Scalar) -> Tensor:
        """½ (difference)²."""
        return 0.5 * (self.value - other.value).square()

    def loss(self, target: Tensor) -> Tensor:
        """½ (value - target)²."""
        return 0.5 * (self.value - target).square()


class TwoHot:
    """A scalar as a categorical over `bins` `[K]` (ascending), trained on the two bins around the target.

    Two-hot regression: MuZero (arXiv 1911.08265, appendix F), DreamerV3 (arXiv 2301.04104), where the bins
    are symexp-spaced. The prediction is the mean of the bins. Of wider `logits` `[..., >= K]` the first K count.
    """

    __slots__ = ("bins", "choice", "wide")

    def __init__(self, logits: Tensor, bins: Tensor) -> None:
        self.wide, self.choice, self.bins = logits, Categorical(logits[..., : len(bins)]), bins

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A sampled bin."""
        return self.bins[self.choice.sample(generator)]

    def mode(self) -> Tensor:
        """The likeliest bin."""
        return self.bins[self.choice.mode()]

    def mean(self) -> Tensor:
        """Σ p·bin, the halves summed separately so that symmetric bins with equal p give exactly 0."""
        if compiled(self.wide) and not (torch.is_grad_enabled() and self.wide.requires_grad):
            from foresight.ops.fused import latent as fused_latent  # late: numba is slow to import

            return fused_latent.two_hot_mean(self.wide, self.bins)
        terms = self.choice.mean() * self.bins
        half = terms.shape[-1] // 2
        middle = terms[..., half] if terms.shape[-1] % 2 else 0.0
        return (terms[..., :half] + terms[..., terms.shape[-1] - half :].flip(-1)).sum(-1) + middle

    def logp(self, x: Tensor) -> Tensor:
        """Σ two-hot(x)·log p: minus the cross-entropy with the two bins around `x`."""
        index, weight = transforms.two_hot_neighbors(x, self.bins)  # two gathers: K weights would mostly be 0
        pair = self.choice.logps.gather(-1, torch.stack([index, index + 1], -1))
        return torch.lerp(pair[..., 0], pair[..., 1], weight)

    def entropy(self) -> Tensor:
        """Entropy over the bins."""
        return self.choice.entropy()

    def kl(self, other: TwoHot) -> Tensor:
        """Divergence over the bins."""
        return self.choice.kl(other.choice)

    def loss(self, target: Tensor, *others: Tensor) -> Tensor:
        """Cross-entropy with the two bins around `target`; of several targets, the sum."""
        targets = (target, *others)
        if not compiled(self.wide):
            return _total([-self.logp(x) for x in targets])
        from foresight.ops.fused import latent as fused_latent  # late: numba is slow to import

        index, weight = transforms.two_hot_neighbors(torch.stack(targets, -1), self.bins)
        return fused_latent.two_hot_loss(self.wide, index, weight, len(self.bins))


def _noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.empty_like(like, requires_grad=False).normal_(generator=generator)


class _Squashed(torch.autograd.Function):
    """a = tanh(u), u = mean + std · noise, and log π(a), as one node; compiled on a CPU.

    As d log π(a) / du = 2 tanh(u) for a fixed u - mean, the backward pass is short:
    ∂u = (1 - a²) ∂a + 2 a ∂logp,  ∂mean = ∂u,  ∂std = noise · ∂u - ∂logp / std.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        if mean.is_cpu and mean.dtype == torch.float32:
            from foresight.ops.fused import soft  # late: numba is slow to import, and most outputs do not need it

            action, logp = soft.squash(mean, std, noise)
        else:
            u = mean + std * noise
            action = u.tanh()
            logp = -(0.5 * noise.square() + std.log() + HALF_LOG_2PI + _log_slope(u)).sum(-1)
        ctx.save_for_backward(action, std, noise)
        return action, logp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, action_grad: Tensor, logp_grad: Tensor) -> tuple[Tensor, Tensor, None]:
        action, std, noise = ctx.saved_tensors
        rows = logp_grad.unsqueeze(-1)
        into = (1 - action.square()).mul_(action_grad).add_(2 * action * rows)
        return into, noise * into - rows / std, None


def _log_slope(u: Tensor) -> Tensor:
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


def _total(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
