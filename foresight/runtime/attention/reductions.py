"""What the attention weights of a network are reduced to, for a picture of tokens and layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rollout(layers: Sequence[Tensor]) -> list[Tensor]:
    """How much each token at each layer is made of each input: attention rollout.

    Ã_l = (A_l + I) / 2 with rows of sum 1, and R_l = Ã_l R_{l-1}, R_0 = I: the residual stream counts as much as the
    attention. `layers` are weights `[T, T]`, heads already combined; returns one `[T, T]` each, rows of sum 1.

    Source: Abnar and Zuidema 2020 (arXiv:2005.00928), §3.
    """
    found: list[Tensor] = []
    for weights in layers:
        mixed = (weights + torch.eye(len(weights), dtype=weights.dtype, device=weights.device)) / 2
        mixed = mixed / mixed.sum(-1, keepdim=True)
        found.append(mixed @ found[-1] if found else mixed)
    return found


def received(weights: Tensor) -> Tensor:
    """The mean weight that each key gets, `[..., S]`, over the queries of `[..., T, S]` that see it."""
    return weights.sum(-2) / (weights > 0).sum(-2).clamp(min=1)


def without_first(weights: Tensor) -> Tensor:
    """Weights `[..., T, S]` without the first key, rows of sum 1 again: 0 where a query sees nothing else.

    Trained decoders leave most of their attention at the first token, which then hides the rest of a picture (Xiao et
    al. 2023, arXiv:2309.17453, call it an attention sink).
    """
    rest = torch.cat([torch.zeros_like(weights[..., :1]), weights[..., 1:]], -1)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, 0.0)
