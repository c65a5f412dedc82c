"""How the rows of a loss become one number: weights `[..., T]`, so that loss = (weights · rows).sum().

Make the weights once, from the mask of the *whole* batch, and split them together with it: then the sum of
the micro-batches' losses, and of their gradients, does not depend on the split. (Averaging averages does:
the mistake that token-mean losses under gradient accumulation are known for.) Where not even the masks are
in one place, pass the global denominator.

For sequences of equal length `per_token` and `per_sequence` are the same, and `per_budget` is, up to a
constant. They differ in what a token of a long completion weighs: as much as any other, less, or as much
as in any other batch.
"""

from __future__ import annotations

from torch import Tensor


def per_token(mask: Tensor, tokens: Tensor | float | None = None) -> Tensor:
    """The mean over all real rows: every row weighs 1 / Σ mask.

    Shapes: mask `[..., T]`; returns `[..., T]`. `tokens`: the global number of real rows, if the mask is only a
    part of the batch. All 0 (not NaN) if there are none. Source: DAPO, Yu et al. 2025 (arXiv:2503.14476), eq. 12.
    """
    real = _real(mask)
    return real / (real.sum().clamp(min=1) if tokens is None else tokens)


def per_sequence(mask: Tensor, sequences: Tensor | float | None = None) -> Tensor:
    """The mean over sequences of each one's mean: a row of sequence i weighs 1 / (N · L_i).

    Shapes: mask `[..., T]`; returns `[..., T]`. `sequences`: the global N, if the mask is only a part of the
    batch, or if left-out sequences are to count; by default the number of sequences with a real row.
    Source: GRPO, Shao et al. 2024 (arXiv:2402.03300), eq. 3.
    """
    real = _real(mask)
    lengths = real.sum(-1, keepdim=True)
    count = (lengths > 0).sum().clamp(min=1) if sequences is None else sequences
    return real / (lengths.clamp(min=1) * count)


def per_budget(mask: Tensor, budget: float) -> Tensor:
    """The sum over all real rows divided by a constant, so that neither length nor batch rescales a row.

    Shapes: mask `[..., T]`; returns `[..., T]`. `budget`: usually sequences in the whole batch × the most tokens
    that one may have. Source: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), §3.2 and appendix A.

    Raises ValueError if the budget is not positive.
    """
    if not budget > 0:
        raise ValueError(f"The budget must be positive, but it is {budget}.")
    return _real(mask) / budget


def _real(mask: Tensor) -> Tensor:
    return mask if mask.is_floating_point() else mask.float()
