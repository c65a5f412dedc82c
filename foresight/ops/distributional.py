"""The Bellman equation for whole distributions of the return: projection on fixed atoms, and quantile regression."""

from __future__ import annotations

import torch
from torch import Tensor


def project(probs: Tensor, atoms: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
    """The distribution of reward + discount · Z, projected on the atoms of Z: each mass goes to its two neighbors.

        m_i = Σ_j [1 - |clip(r + γ z_j) - z_i| / Δz]₀¹ · p_j

    Shapes: probs `[..., K]`, atoms `[K]` evenly spaced and increasing, reward and discount `[...]`; returns
    `[..., K]`, with the same sum as `probs`. Mass outside the atoms goes to the outermost one.
    Source: Bellemare et al. 2017 (arXiv:1707.06887), eq. 7.

    Becomes `transforms.two_hot` of the reward when discount is 0.
    """
    low, high, last = atoms[0], atoms[-1], len(atoms) - 1
    moved = (reward.unsqueeze(-1) + discount.unsqueeze(-1) * atoms).clamp(low, high)
    position = ((moved - low) * (last / (high - low))).clamp(0, last)
    below = position.floor().clamp(max=last - 1)
    share = position - below  # of the upper neighbor
    index = below.long()
    out = torch.zeros_like(probs).scatter_add(-1, index, probs * (1 - share))
    return out.scatter_add(-1, index + 1, probs * share)


def quantile_huber_loss(quantiles: Tensor, target: Tensor, kappa: float = 1.0) -> Tensor:
    """The loss whose minimum has `quantiles` at the quantiles (i + ½) / K of the target's distribution.

        Σ_i mean_j |τ_i - 1{u_ij < 0}| · huber_κ(u_ij) / κ,  u_ij = target_j - quantile_i,  τ_i = (i + ½) / K

    Shapes: quantiles `[..., K]`, target `[..., J]` (samples or quantiles; data, no gradient); returns `[...]`.
    Source: Dabney et al. 2018 (arXiv:1710.10044), eq. 10 and algorithm 1.
    """
    count = quantiles.shape[-1]
    levels = (torch.arange(count, dtype=quantiles.dtype, device=quantiles.device) + 0.5) / count
    error = target.detach().unsqueeze(-2) - quantiles.unsqueeze(-1)  # [..., K, J]
    size = error.abs()
    huber = torch.where(size <= kappa, 0.5 * error.square(), kappa * (size - 0.5 * kappa)) / kappa
    return ((levels.unsqueeze(-1) - (error < 0).to(huber.dtype)).abs() * huber).mean(-1).sum(-1)
