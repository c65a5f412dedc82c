"""Speculative sampling: a cheap distribution drafts, an expensive one verifies; samples follow the expensive one.

Draft x ~ q and accept it with probability min(1, p(x) / q(x)); else draw from the residual (p - q)⁺ / Σ (p - q)⁺.
The token is distributed as p for any q (Leviathan et al. 2023, arXiv:2211.17192, appendix A.1; Chen et al. 2023,
arXiv:2302.01318, theorem 1). Greedy decoding is the case of one-hot distributions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """softmax(z / τ); one-hot at the argmax (the first of equals) where τ is 0.

    Shapes: logits z `[..., V]` of any float type; returns `[..., V]`, float32 or wider.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0.0:
        return torch.zeros_like(wide).scatter_(-1, wide.argmax(-1, keepdim=True), 1.0)
    return (wide if temperature == 1.0 else wide / temperature).softmax(-1)


def accepted(target: Tensor, draft: Tensor, tokens: Tensor, uniform: Tensor) -> Tensor:
    """How many drafted tokens are accepted: all before the first with u ≥ p(x) / q(x).

    Shapes: target p and draft q `[..., n, V]`, tokens x `[..., n]`, each drawn from its q, and uniform u `[..., n]` in
    [0, 1); returns `[...]` int64, from 0 to n. Source: Leviathan et al. 2023, algorithm 1.
    """
    p, q = (x.gather(-1, tokens[..., None])[..., 0] for x in (target, draft))
    return (uniform * q < p).long().cumprod(-1).sum(-1)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """The distribution to draw from after a rejection: (p - q)⁺ / Σ (p - q)⁺.

    Shapes: target p and draft q `[..., V]`, with sums of 1, or of 0 for a q without a draft; returns `[..., V]`.
    Source: Leviathan et al. 2023, §2.3. Becomes p itself when q is 0, as after the last accepted draft, and when the
    two are equal (then only rounding can reject).
    """
    rest = (target - draft).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, target)
