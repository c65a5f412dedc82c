"""Small functions of learned models: masks of an unroll, gradients, scaling of latents, consistency."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x, with its gradient times `factor`. Any shape. Source: MuZero (arXiv:1911.08265), appendix G."""
    return x * factor + x.detach() * (1 - factor)


def straight_through(x: Tensor) -> Tensor:
    """One-hot of the argmax of x `[..., C]`, with the gradient of x (Bengio et al. 2013, arXiv:1308.3432)."""
    hard = functional.one_hot(x.argmax(-1), x.shape[-1]).to(x.dtype)
    return hard + (x - x.detach())


def unit_interval(x: Tensor, eps: float = 1e-5) -> Tensor:
    """x `[..., D]` scaled to [0, 1] by the minimum and maximum of its D elements.

    Source: MuZero (arXiv:1911.08265), appendix G: latents have the same range as the actions.
    """
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return (x - low) / (high - low + eps)


def unroll_masks(discount: Tensor, cut: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`(alive, over)`: masks over the steps of a segment. Shapes: all `[B, T]`.

    - `alive` is 1 where the step still belongs to the episode of step 0;
    - `over` is 1 where that episode has already terminated (discount 0): an absorbing state, whose value and rewards
      are 0. After a time limit neither is 1: the continuation is unknown.
    A lost life, which has discount 0 but no cut, is such a termination too. A step with `mask` 0 (its action was
    ignored) is neither, and the steps after it are unknown.
    """
    real = torch.ones_like(cut) if mask is None else mask
    end = torch.maximum(torch.maximum(cut, 1 - real), (discount == 0).to(cut.dtype))
    first = end * (end.cumsum(1) == 1)  # 1 at the step that ends the episode
    alive = (functional.pad(end.cumsum(1)[:, :-1], (1, 0)) == 0).to(cut.dtype) * real
    over = functional.pad((first * real * (discount == 0)).cumsum(1)[:, :-1], (1, 0))
    return alive, over.to(cut.dtype)


def cross_entropy(logits: Tensor, weights: Tensor) -> Tensor:
    """-Σ_a π(a) ln p(a) of the search policy π, where p = softmax(logits).

    Shapes: both `[..., A]`; returns `[...]`. Source: MuZero (arXiv:1911.08265), eq. 1.
    """
    return -(weights * logits.log_softmax(-1)).sum(-1)


def negative_cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """-cos(prediction, target) over the last dim, no gradient into the target: `[..., D]` to `[...]`.

    Source: SimSiam (arXiv:2011.10566), eq. 2; EfficientZero (arXiv:2111.00210), §4.1.
    """
    return -functional.cosine_similarity(prediction, target.detach(), dim=-1)


class Divergent(Protocol):
    """A distribution with `kl` and a way to stop its gradient."""

    def kl(self, other: Any) -> Tensor:
        """KL(self ‖ other)."""

    def detach(self) -> Any:
        """The same without gradient."""


def balanced_kl(posterior: Divergent, prior: Divergent, free_nats: float) -> tuple[Tensor, Tensor]:
    """KL balancing: `(dynamics, representation)`, each with a gradient into one of the two, none below `free_nats`.

        dynamics = max(free, KL[sg(q) ‖ p]),  representation = max(free, KL[q ‖ sg(p)])

    Shapes: distributions of `[...]`, returns two `[...]`. Source: DreamerV3 (arXiv:2301.04104), eq. 5.
    """
    dynamics = posterior.detach().kl(prior).clamp(min=free_nats)
    return dynamics, posterior.kl(prior.detach()).clamp(min=free_nats)


def shrunk_horizon(age: Tensor, total: float, n: int, share: float = 0.3) -> Tensor:
    """Off-policy correction: how many of n steps a transition of this `age` (in updates) uses before it bootstraps.

        clip(n - ⌊age / (share · total)⌋, 1, n)

    Shapes: age any; returns int64 of that shape. Source: EfficientZero (arXiv:2111.00210), §4.3 and its code.
    """
    return (n - (age / (share * total)).floor()).clamp(1, n).long()


def value_prefix(reward: Tensor, alive: Tensor, horizon: int) -> Tensor:
    """Undiscounted sums of rewards since the last multiple of `horizon` steps: EfficientZero's value prefix.

    Shapes: reward, alive `[B, K]`; returns `[B, K]`; step k sums steps (k - k mod horizon) to k. Rewards of
    steps that are not alive are 0. Source: EfficientZero (arXiv:2111.00210), §4.2.
    """
    parts = (reward * alive).split(horizon, 1)
    return torch.cat([part.cumsum(1) for part in parts], 1)


def sigreg(z: Tensor, slices: int, generator: torch.Generator, knots: int = 17, t_max: float = 3.0) -> Tensor:
    """The distance of the distribution of N embeddings from an isotropic normal, by the test of Epps and Pulley.

    N ∫ |φ(t) - e^(-t²/2)|² e^(-t²/2) dt, where φ is the empirical characteristic function of the embeddings projected
    on a random unit vector; the mean over `slices` such vectors. The integral from -t_max to t_max is by the trapezoid
    rule with `knots` on its positive half. It is about 1.05 for standard normal embeddings, whatever N; 0.402 N if all
    are zero, as after a collapse.

    Shapes: z `[..., N, D]`; returns `[...]`. In float32 whatever the dtype of z: cosines of sums are small differences.
    Source: SIGReg of LeJEPA (arXiv:2511.08544), used by LeWorldModel (arXiv:2603.19312).
    """
    z = z.float()
    vectors = torch.randn(z.shape[-1], slices, generator=generator, device=z.device)
    t = torch.linspace(0, t_max, knots, device=z.device)
    weight = torch.full_like(t, 2 * t_max / (knots - 1)) * (-t.square() / 2).exp()  # twice: the integrand is even
    weight[[0, -1]] /= 2
    angles = (z @ functional.normalize(vectors, dim=0)).unsqueeze(-1) * t  # [..., N, M, knots]
    error = (angles.cos().mean(-3) - (-t.square() / 2).exp()).square() + angles.sin().mean(-3).square()
    return z.shape[-2] * (error @ weight).mean(-1)


def redundancy(x: Tensor, y: Tensor, off_diagonal: float = 5e-4, eps: float = 1e-6) -> Tensor:
    """How far features x are from saying the same as y, each without repeating another: Barlow Twins.

        Σ_i (1 - C_ii)² + off_diagonal Σ_{i≠j} C_ij²,  C_ij the correlation of x_i and y_j over the N rows

    Shapes: x, y `[..., D]`, N the product of the leading dims; returns a scalar. Features whose variance is far below
    `eps` count as uncorrelated. Source: Zbontar et al. 2021 (arXiv:2103.03230), eq. 1 and 2; `off_diagonal` is that of
    R2-Dreamer's code.
    """
    x, y = ((z - z.mean(0)) * (z.var(0, correction=0) + eps).rsqrt() for z in (x.flatten(0, -2), y.flatten(0, -2)))
    correlation = x.T @ y / len(x)
    own = correlation.diagonal()
    return (1 - own).square().sum() + off_diagonal * (correlation.square().sum() - own.square().sum())


@torch.no_grad()
def effective_rank(z: Tensor) -> Tensor:
    """exp(H(p)) of the shares p of the singular values of the centered embeddings z `[N, D]`: a scalar in [1, D].

    D if they vary equally in all directions, 1 if in only one. Source: Roy & Vetterli 2007 (EUSIPCO), definition 1.
    """
    values = torch.linalg.svdvals(z.float() - z.float().mean(0))
    share = values / values.sum().clamp_min(1e-30)
    entropy: Tensor = torch.special.entr(share).sum()
    return entropy.exp()
