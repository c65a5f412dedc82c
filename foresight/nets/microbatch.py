"""Gradient steps on token batches that do not fit into memory at once: split, sum the gradients, step once.

The weights of the loss are made from the whole batch before it is split (`ops.aggregate`), so the sum over the
parts is the loss of the whole, and its gradient does not depend on how it was split.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from foresight.data.text import TokenBatch
from foresight.nets.language import LanguageModel

Sums = dict[str, Tensor]


def split(batch: TokenBatch, groups: Tensor, tokens: int) -> list[Tensor]:
    """Split groups into parts of about `tokens` distinct completion tokens: whole groups, the longest together."""
    sizes = batch.distinct()
    parts: list[list[int]] = []
    room = 0
    for group in groups[sizes[groups].argsort(dim=0, descending=True, stable=True)].tolist():
        if not parts or room < int(sizes[group]):
            parts.append([])
            room = tokens
        parts[-1].append(group)
        room -= int(sizes[group])
    return [torch.tensor(part) for part in parts]


@torch.no_grad()
def gather(function: Callable[[TokenBatch], Tensor], batch: TokenBatch, tokens: int) -> Tensor:
    """`function` of every part of a batch, `[P, G, T]` each, put together again. No gradient."""
    whole = torch.zeros(batch.completion.shape)
    for part in split(batch, torch.arange(len(batch.length)), tokens):
        result = function(batch.select(part)).cpu()
        whole[part, :, : result.shape[-1]] = result.to(whole)
    return whole


def step(
    optimizer: torch.optim.Optimizer,
    pieces: Iterable[Callable[[], tuple[Tensor, Sums]]],
    learning_rate: float,
    max_grad_norm: float,
    count: float = 1.0,
) -> dict[str, float]:
    """One gradient step down the sum of the losses of `pieces`. A loss that is not finite leaves the weights alone.

    A piece computes its share of the loss and sums for the metrics, which are returned divided by `count`.
    """
    total, sums = 0.0, dict[str, float]()
    for piece in pieces:
        value, numbers = piece()
        value.backward()
        total += value.item()
        for key, number in numbers.items():
            sums[key] = sums.get(key, 0.0) + number.item() / count
    parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm).item()
    metrics = {"loss": total, "grad_norm": norm, "learning_rate": learning_rate}
    if not (math.isfinite(total) and math.isfinite(norm)):
        optimizer.zero_grad()
        return metrics
    for settings in optimizer.param_groups:
        settings["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # kept: what is as large as the model is not allocated twice
    return metrics | sums


def learn(
    policy: LanguageModel,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[TokenBatch, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Sums]],
    batch: TokenBatch,
    advantage: Tensor,
    weights: Tensor,
    groups: Tensor,
    learning_rate: float,
    max_grad_norm: float,
    micro_tokens: int,
    epochs: int = 1,
) -> dict[str, float]:
    """`epochs` gradient steps on those groups of a rollout that teach something, the first of which is its own π_old.

    `loss(batch, advantage, weights, old)` of a part returns its share of the loss, its log-probabilities `[P, G, T]`
    and sums over tokens for the metrics; `old` is what it returned for this part in the first pass (None there).
    Shapes: advantage `[P, G]` or `[P, G, T]`, weights `[P, G, T]`, groups `[P]` bool: true where a group teaches.
    """
    parts = split(batch, groups.nonzero()[:, 0], micro_tokens)
    old: list[Tensor | None] = [None] * len(parts)
    tokens = sum(int(batch.length[part].sum()) for part in parts)
    metrics: dict[str, float] = {}

    def piece(i: int) -> tuple[Tensor, Sums]:
        few = batch.select(parts[i])
        gain, weight = (_rows(x, parts[i], few).to(policy.device) for x in (advantage, weights))
        value, logprob, sums = loss(few, gain, weight, old[i])
        old[i] = logprob.detach() if old[i] is None else old[i]
        return value, sums

    for _ in range(epochs if parts else 0):
        with policy.precision():  # around all parts, so that the weights are rounded once
            pieces = (functools.partial(piece, i) for i in range(len(parts)))
            metrics |= step(optimizer, pieces, learning_rate, max_grad_norm, tokens)
        if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
            break
    return metrics


def _rows(whole: Tensor, part: Tensor, few: TokenBatch) -> Tensor:
    """The rows of `[P, G]` or `[P, G, T]` that belong to a part, as wide as its completions."""
    return whole[part] if whole.dim() == 2 else whole[part][..., : few.completion.shape[-1]]
