"""Sampling a token from logits: temperature, top-k and nucleus, by inverting the cumulative distribution."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

NUCLEUS = 512  # tokens in which the nucleus is searched first
AT_ONCE = 1 << 20  # weights processed at once on a CPU: they stay in its cache from one pass to the next
BLOCK = 128  # weights that are summed before the search within a block


def choose(
    logits: Tensor, uniform: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution. Logits `[B, V]`, uniform `[B]` in [0, 1).

    Temperature 0 is greedy. Of softmax(z / temperature) the `top_k` likeliest tokens are kept (0: all), and of those
    the fewest whose probabilities sum to `top_p` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751). Returns
    tokens `[B]` and their log-probabilities `[B]` under the distribution sampled from (greedy: under the model's own).
    """
    if temperature == 0.0:
        scaled = logits.float()
        token = scaled.argmax(-1, keepdim=True)
        return token[:, 0], scaled.log_softmax(-1).gather(-1, token)[:, 0]
    scaled = logits if temperature == 1.0 else logits.float() / temperature
    if top_k or top_p < 1:
        kept, index = _truncated(scaled.float(), top_k, top_p)
        place, logprob = _drawn(kept, uniform)
        return index.gather(-1, place[:, None])[:, 0], logprob
    rows = max(1, AT_ONCE // scaled.shape[-1]) if scaled.device.type == "cpu" else len(scaled)
    drawn = [_drawn(*part) for part in zip(scaled.split(rows), uniform.split(rows), strict=True)]
    place, logprob = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    return place, logprob


def _drawn(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """An index sampled from softmax(logits `[B, N]`) and its log-probability, `[B]` each, in float32."""
    weights = (logits - logits.amax(-1, keepdim=True).float()).exp_()
    place, total = invert(weights, uniform)
    return place, (weights.gather(-1, place[:, None])[:, 0] / total).log()


def _truncated(scaled: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The kept logits, likeliest first and -inf beyond the nucleus, and their tokens: `[B, K]` each."""
    vocabulary = scaled.shape[-1]
    for width in (min(top_k or NUCLEUS, vocabulary), vocabulary):
        kept, index = scaled.topk(width)
        whole = (kept if top_k else scaled).logsumexp(-1, keepdim=True)
        share = (kept - whole).exp().cumsum(-1)
        if top_k or bool((share[:, -1] >= top_p).all()):
            break
    before = functional.pad(share[:, :-1], (1, 0))
    return kept.masked_fill((before >= top_p) & (top_p < 1), -torch.inf), index


def invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative sum of weights `[B, N]` exceeds `uniform` · total, and the total: `[B]` each.

    First over sums of blocks, then within a block: one pass over the weights. Never a weight of 0.
    """
    beyond = -weights.shape[-1] % BLOCK
    blocks = (functional.pad(weights, (0, beyond)) if beyond else weights).view(len(weights), -1, BLOCK)
    sums = blocks.sum(-1).cumsum(-1)
    target = uniform.to(sums)[:, None] * sums[:, -1:]
    block = _first(sums, target)
    passed = functional.pad(sums, (1, 0)).gather(-1, block)
    within = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1)
    return (block * BLOCK + _first(within, target - passed))[:, 0], sums[:, -1]


def _first(sums: Tensor, target: Tensor) -> Tensor:
    """Where increasing sums `[B, N]` first exceed the target `[B, 1]`, clamped against rounding: `[B, 1]`."""
    below_all = torch.nextafter(sums[:, -1:], torch.zeros_like(target))
    return torch.searchsorted(sums, target.clamp(min=0).minimum(below_all), right=True)
