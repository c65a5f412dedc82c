"""Log-probabilities of tokens without a second `[N, V]` tensor, for large vocabularies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 64  # per slice
LOWEST = -1e4  # e^x is 0 below, and products with x are finite


def token_logprob(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log softmax(z / τ)[token] and the entropy H of softmax(z / τ).

        ∂ log p(token) / ∂z = (onehot(token) - p) / τ        ∂H / ∂z = -p (log p + H) / τ

    Shapes: logits z `[N, V]` of any float type, tokens `[N]`; returns `[N]` and `[N]`, float32 or wider. A logit of
    -inf gives probability 0. Computed in slices of rows; the backward pass keeps only the logits, in their own dtype.
    """
    found: tuple[Tensor, Tensor] = _TokenLogprob.apply(logits, tokens, temperature)  # type: ignore[no-untyped-call]  # torch's
    return found


def _wide(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        from foresight.ops.fused import tokens as fused  # late: numba is slow to import

        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        if fused.able(logits):
            logprob, entropy, total = fused.token_logprob(logits, tokens, temperature)
            ctx.save_for_backward(logits, tokens, total, entropy)
            return logprob, entropy
        totals, chosen, entropies = [], [], []
        for rows, picked in zip(logits.split(ROWS), tokens.split(ROWS), strict=True):
            scaled = _wide(rows, temperature)
            highest = scaled.amax(-1, keepdim=True)
            weights = (scaled - highest).exp_()
            mass = weights.sum(-1)
            total = highest[:, 0] + mass.log()
            chosen.append(scaled.gather(-1, picked[:, None])[:, 0] - total)
            # H = log Z - E[z]; a token at -inf has weight 0, and 0 · -inf would be NaN.
            finite = scaled.clamp(min=torch.finfo(scaled.dtype).min)
            entropies.append(total - weights.mul_(finite).sum(-1) / mass)
            totals.append(total)
        entropy = torch.cat(entropies)
        ctx.save_for_backward(logits, tokens, torch.cat(totals), entropy)
        return torch.cat(chosen), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor | None, outer_entropy: Tensor | None) -> tuple[Tensor | None, None, None]:
        if outer is None and outer_entropy is None:
            return None, None, None
        from foresight.ops.fused import tokens as fused  # late: numba is slow to import

        logits, tokens, totals, entropies = ctx.saved_tensors
        outer = torch.zeros_like(totals) if outer is None else outer / ctx.temperature
        if fused.able(logits):
            slope = torch.zeros_like(totals) if outer_entropy is None else outer_entropy / ctx.temperature
            found = fused.token_logprob_backward(logits, tokens, ctx.temperature, totals, entropies, outer, slope)
            return found, None, None
        result = torch.empty_like(logits)
        parts = (x.split(ROWS) for x in (result, logits, tokens, totals, outer, entropies))
        for i, (into, rows, picked, total, weight, entropy) in enumerate(zip(*parts, strict=True)):
            logp = _wide(rows, ctx.temperature) - total[:, None]
            pull = weight[:, None]
            if outer_entropy is not None:  # clamped: a token at -inf has weight 0, and 0 · -inf would be NaN
                slope = outer_entropy[i * ROWS : i * ROWS + len(rows), None] / ctx.temperature
                pull = pull + slope * (logp.clamp(min=LOWEST) + entropy[:, None])
            grad = logp.exp_().mul_(-pull)
            grad.scatter_add_(-1, picked[:, None], weight[:, None])
            into.copy_(grad)
        return result, None, None


def token_divergence(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p* ‖ p) of p = softmax(logits) from the soft targets p* = softmax(target), and their overlap Σ min(p, p*).

        ∂ KL / ∂z = p - p*                     no gradient flows into the target, nor from the overlap

    Shapes: logits z and target `[N, V]` of any float type; returns `[N]` and `[N]`, float32 or wider. Source: Hinton et
    al. 2015 (arXiv:1503.02531), eq. 1, less the constant entropy of the target. The overlap is the chance that a draft
    from p is accepted as a sample of p* (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.5). Computed in slices of
    rows; the backward pass keeps both logits in their own dtypes. Becomes `ops.kl.categorical` of (target, logits).
    """
    found: tuple[Tensor, Tensor] = _TokenDivergence.apply(logits, target)  # type: ignore[no-untyped-call]  # torch's
    return found


class _TokenDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        from foresight.ops.fused import tokens as fused  # late: numba is slow to import

        ctx.set_materialize_grads(False)
        if fused.able(logits) and fused.able(target):
            distance, overlap, total, wanted = fused.token_divergence(logits, target)
            ctx.save_for_backward(logits, target, total, wanted)
            ctx.mark_non_differentiable(overlap)
            return distance, overlap
        distances, overlaps = [], []
        for rows, wanted in zip(logits.split(ROWS), target.split(ROWS), strict=True):
            logp, target_logp = _wide(rows, 1.0).log_softmax(-1), _wide(wanted, 1.0).log_softmax(-1)
            lowest = torch.finfo(logp.dtype).min  # a token at -inf has weight 0, and 0 · -inf would be NaN
            mass = target_logp.exp()
            distances.append((mass * (target_logp.clamp(min=lowest) - logp.clamp(min=lowest))).sum(-1))
            overlaps.append(torch.minimum(mass, logp.exp()).sum(-1))
        ctx.save_for_backward(logits, target)
        overlap = torch.cat(overlaps)
        ctx.mark_non_differentiable(overlap)
        return torch.cat(distances), overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor | None, _: None) -> tuple[Tensor | None, None]:
        if outer is None:
            return None, None
        logits, target, *totals = ctx.saved_tensors
        if totals:
            from foresight.ops.fused import tokens as fused

            total, wanted = totals
            return fused.token_divergence_backward(logits, target, total, wanted, outer), None
        result = torch.empty_like(logits)
        parts = (x.split(ROWS) for x in (result, logits, target, outer))
        for into, rows, wanted, weight in zip(*parts, strict=True):
            difference = _wide(rows, 1.0).softmax(-1).sub_(_wide(wanted, 1.0).softmax(-1))
            into.copy_(difference.mul_(weight[:, None]))
        return result, None
