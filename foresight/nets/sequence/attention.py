"""Softmax attention, whose weights can be recorded and whose links can be cut.

    weights = softmax(q·k / √d),   output = weights · v

Every attention of this package but ACT's (torch's layers) calls `attend`, or `softmax` if its scores have more terms.
Usually `attend` is torch's fused kernel, which never forms the weights. Within `recorded` it is written out, so
that these networks can be looked at:

>>> with recorded() as weights:
...     network(x)
>>> weights[0]  # of the first layer, [B, heads, T, S]

`recorded` also removes links (`KnockOut`), to see what they are for: a large weight alone does not show that the output
depends on it (Jain and Wallace 2019, arXiv:1902.10186). A removed link has the score -inf, as in Geva et al. 2023
(arXiv:2304.14767, §4): the other weights of its row grow. A row without links is 0, so a head that loses all of them
adds nothing, as in Michel et al. 2019 (arXiv:1905.10650, §2.3).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foresight.errors import UserError


class KnockOut(NamedTuple):
    """Links to remove: those of a layer's `head` from `query` to `key`; None is all of them. All count from 0."""

    layer: int
    head: int | None = None
    query: int | None = None
    key: int | None = None


class Recording(NamedTuple):
    """The weights of the layers called so far, and what to remove from the next ones."""

    weights: list[Tensor]
    knock_outs: Sequence[KnockOut]


_RECORDING: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextlib.contextmanager
def recorded(knock_outs: Sequence[KnockOut] = ()) -> Iterator[list[Tensor]]:
    """The weights `[..., heads, T, S]` of every attention called within, in order, without gradient.

    Layer i of a `KnockOut` is the i-th attention called. Raises UserError within, for a head, query or key that the
    layer does not have.
    """
    weights: list[Tensor] = []
    token = _RECORDING.set(Recording(weights, tuple(knock_outs)))
    try:
        yield weights
    finally:
        _RECORDING.reset(token)


def is_recording() -> bool:
    """Whether weights are recorded, so that fused kernels cannot be used. Not inside torch.compile."""
    return not torch.compiler.is_compiling() and _RECORDING.get() is not None


def dropout(x: Tensor, rate: float) -> Tensor:
    """Zeros in a share `rate` in [0, 1) of `x`, the rest scaled so that the mean stays (Srivastava et al. 2014).

    On a CPU the share is rounded to 1/65536: four choices for each number of torch's generator are three times as fast
    as `F.dropout`, which there is a tenth of the training of a small transformer.
    """
    if not rate:
        return x
    if not x.is_cpu:
        return F.dropout(x, rate)
    count, dropped = x.numel(), round(rate * 65_536)
    drawn = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count]
    kept = (drawn >= dropped - 32_768).view(x.shape)
    return x * kept.to(x.dtype).mul_(65_536 / (65_536 - dropped))


def softmax(scores: Tensor) -> Tensor:
    """The weights of scores `[..., heads, T, S]`, of which -inf are not visible: rows sum to 1."""
    recording = _RECORDING.get()
    if recording is None:
        return scores.softmax(-1)
    removed = [one for one in recording.knock_outs if one.layer == len(recording.weights)]
    if removed:
        scores = scores.clone()
        for one in removed:
            _check(one, scores.shape)
            scores[(..., *(slice(None) if i is None else i for i in one[1:]))] = -math.inf
    weights = scores.softmax(-1)
    if removed:
        weights = weights.nan_to_num(0.0)  # rows that have lost every link
    recording.weights.append(weights.detach())
    return weights


def attend_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    rate: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention written out, which also returns its weights.

    query `[B, heads, T, head_dim]`; key, value `[B, kv_heads, S, head_dim]`; allowed (None: all) bool, broadcastable
    to `[B, heads, T, S]`; scale (None: 1 / √head_dim) multiplies the products. Returns `[B, heads, T, head_dim]` and
    the weights `[B, heads, T, S]` float32, whose rows sum to 1; a share `rate` of them is dropped afterwards.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    weights = softmax(scores)
    kept = weights if not rate else dropout(weights, rate)
    return kept.to(value.dtype) @ value, weights


def attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, rate: float = 0.0) -> Tensor:
    """As `attend_eager`, fast and without the weights; allowed None means causal if T > 1."""
    (batch, heads, steps, width), shared = query.shape, key.shape[1]
    causal = allowed is None and steps > 1
    if is_recording() or (rate and query.is_cpu):  # no kernel for a CPU has dropout: torch writes it out too
        if causal:
            allowed = torch.ones(steps, steps, dtype=torch.bool, device=query.device).tril()
        return attend_eager(query, key, value, allowed, rate)[0]
    if steps == 1 and heads != shared:
        # Heads that share keys are passed to the kernel as steps: four times faster in bfloat16 on a CPU.
        query = query.reshape(batch, shared, heads // shared, width)
        return F.scaled_dot_product_attention(query, key, value, allowed, rate).reshape(batch, heads, 1, width)
    return F.scaled_dot_product_attention(
        query, key, value, allowed, rate, is_causal=causal, enable_gqa=bool(heads != shared)
    )


def _check(one: KnockOut, shape: Sequence[int]) -> None:
    for name, index, count in zip(("head", "query", "key"), one[1:], shape[-3:], strict=True):
        if index is not None and not 0 <= index < count:
            raise UserError(
                f"Layer {one.layer} has no {name} {index} to knock out: it has {count}. Count from 0 to {count - 1}."
            )
