"""Log-probabilities of tokens, where the vocabulary is so wide that no second `[N, V]` tensor is affordable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 64  # worked on at a time


def token_logprob(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log softmax(z / τ)[token] and, without gradient, the entropy of softmax(z / τ).

        ∂ log p(token) / ∂z = (onehot(token) - p) / τ

    Shapes: logits z `[N, V]` of any float type, tokens `[N]`; returns `[N]` and `[N]`, float32 or wider. A logit of
    -inf rules a token out. Computed in slices of rows; the backward pass keeps the logits alone, in their own type.
    """
    return _TokenLogprob.apply(logits, tokens, temperature)


def _wide(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        totals, chosen, entropies = [], [], []
        for rows, picked in zip(logits.split(ROWS), tokens.split(ROWS), strict=True):
            scaled = _wide(rows, temperature)
            highest = scaled.amax(-1, keepdim=True)
            weights = (scaled - highest).exp_()
            mass = weights.sum(-1)
            total = highest[:, 0] + mass.log()
            chosen.append(scaled.gather(-1, picked[:, None])[:, 0] - total)
            # H = log Z - E[z]; a token that is ruled out weighs 0, which -inf must not turn into NaN.
            finite = scaled.clamp(min=torch.finfo(scaled.dtype).min)
            entropies.append(total - weights.mul_(finite).sum(-1) / mass)
            totals.append(total)
        ctx.save_for_backward(logits, tokens, torch.cat(totals))
        ctx.temperature = temperature
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(chosen), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens, totals = ctx.saved_tensors
        result, outer = torch.empty_like(logits), outer / ctx.temperature
        parts = (x.split(ROWS) for x in (result, logits, tokens, totals, outer))
        for into, rows, picked, total, weight in zip(*parts, strict=True):
            grad = (_wide(rows, ctx.temperature) - total[:, None]).exp_().mul_(-weight[:, None])
            grad.scatter_add_(-1, picked[:, None], weight[:, None])
            into.copy_(grad)
        return result, None, None
