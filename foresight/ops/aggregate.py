"""How per-step losses are reduced to a scalar: weights `[..., T]`, so that loss = (weights · losses).sum().

Compute the weights once, from the mask of the *whole* batch, and split them together with it: then the sum of
the micro-batches' losses, and of their gradients, does not depend on the split. (An average of averages does
depend on it: the well-known bug of token-mean losses under gradient accumulation.) Where the masks are on several
processes, pass the global denominator.

For sequences of equal length `per_token` and `per_sequence` are the same, and `per_budget` is, up to a
constant. They differ in the weight of a token of a long completion: the same as any other token, less, or the
same in every batch.
"""

from __future__ import annotations

from torch import Tensor


def per_token(mask: Tensor, tokens: Tensor | float | None = None) -> Tensor:
    """The mean over all unmasked steps: each has weight 1 / Σ mask.

    Shapes: mask `[..., T]`; returns `[..., T]`. `tokens`: the global number of unmasked steps, if the mask is only
    a part of the batch. All 0 (not NaN) if there are none. Source: DAPO, Yu et al. 2025 (arXiv:2503.14476), eq. 12.
    """
    real = _real(mask)
    return real / (real.sum().clamp(min=1) if tokens is None else tokens)


def per_sequence(mask: Tensor, sequences: Tensor | float | None = None) -> Tensor:
    """The mean over sequences of the mean of each: a step of sequence i has weight 1 / (N · L_i).

    Shapes: mask `[..., T]`; returns `[..., T]`. `sequences`: the global N, if the mask is only a part of the
    batch, or if fully masked sequences count too; by default the number of sequences with an unmasked step.
    Source: GRPO, Shao et al. 2024 (arXiv:2402.03300), eq. 3.
    """
    real = _real(mask)
    lengths = real.sum(-1, keepdim=True)
    count = (lengths > 0).sum().clamp(min=1) if sequences is None else sequences
    return real / (lengths.clamp(min=1) * count)


def per_budget(mask: Tensor, budget: float) -> Tensor:
    """The sum over all unmasked steps divided by a constant: neither length nor batch rescales a step.

    Shapes: mask `[..., T]`; returns `[..., T]`. `budget`: usually sequences in the whole batch × the maximum
    length of one. Source: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), §3.2 and appendix A.

    Raises ValueError if the budget is not positive.
    """
    if not budget > 0:
        raise ValueError(f"The budget must be positive, not {budget}.")
    return _real(mask) / budget


def _real(mask: Tensor) -> Tensor:
    return mask if mask.is_floating_point() else mask.float()
