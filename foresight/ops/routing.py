"""Routing of tokens to experts, and load balancing. N tokens, E experts, K of them for each token."""

from __future__ import annotations

import torch
from torch import Tensor


def top_experts(affinity: Tensor, experts: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights: their affinities, normalized to a sum of 1.

    Shapes: affinity `[N, E]`, positive (a softmax or sigmoids), bias `[E]`; returns experts int64 and weights,
    `[N, K]` both, for K = `experts`. The bias affects the choice only: it has no gradient and is
    not in the weights. A single expert keeps its affinity as its weight (Switch, Fedus et al. 2021, arXiv:2101.03961,
    eq. 2): normalized to 1, it would give the router no gradient. Source: DeepSeek-V3, 2024
    (arXiv:2412.19437), eq. 13, 15 and 16; without the bias, Mixtral's (Jiang et al. 2024, arXiv:2401.04088, §2.1).
    """
    score = affinity.detach() if bias is None else affinity.detach() + bias
    chosen = score.topk(experts, -1).indices
    weights = affinity.gather(-1, chosen)
    return chosen, weights if experts == 1 else weights / weights.sum(-1, keepdim=True)


def load(chosen: Tensor, experts: int) -> Tensor:
    """The share of all choices per expert: `[N, K]` int64 to `[E]`, which sums to 1."""
    return torch.bincount(chosen.flatten(), minlength=experts) / max(chosen.numel(), 1)


def balance_loss(affinity: Tensor, chosen: Tensor) -> Tensor:
    """Switch's auxiliary loss: E Σ_e f_e P_e, f the load, without gradient, and P the mean affinity.

    Shapes: affinity `[N, E]`, rows of sum 1, chosen `[N, K]`; returns a scalar, 1 for an even load. Source: Fedus et
    al. 2021 (arXiv:2101.03961), eq. 4 to 6, for K = 1; with more experts per token the load is a share of all choices.
    """
    experts = affinity.shape[-1]
    return experts * (load(chosen, experts).to(affinity.dtype) * affinity.mean(0)).sum()


def balanced_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """The loss-free rule: b_e ← b_e + u · sign(mean load − load_e), so that idle experts are chosen more often.

    Shapes: bias, load `[E]`; returns `[E]`. Source: Wang et al. 2024 (arXiv:2408.15664), algorithm 1.
    """
    return bias + rate * (load.mean() - load).sign()
