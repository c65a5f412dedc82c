"""Gradient steps on token batches that do not fit into memory at once: split, sum the gradients, step once.

The weights of the loss are made from the whole batch before it is split (`ops.aggregate`), so the sum over the
parts is the loss of the whole, and its gradient does not depend on how it was split.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from foresight.data.text import TokenBatch
from foresight.nets import sharded
from foresight.nets.language import LanguageModel
from foresight.ops import schedules

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
    for piece in sharded.share(pieces):
        value, numbers = piece()
        sharded.backward(value)
        total += value.item()
        for key, number in numbers.items():
            sums[key] = sums.get(key, 0.0) + number.item() / count
    total, sums = sharded.summed({"": total}).pop(""), sharded.summed(sums)
    parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
    norm = sharded.full(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)).item()
    metrics = {"loss": total, "grad_norm": norm, "learning_rate": learning_rate}
    if not (math.isfinite(total) and math.isfinite(norm)):
        optimizer.zero_grad()
        return metrics
    for settings in optimizer.param_groups:
        settings["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # kept: what is as large as the model is not allocated twice
    return metrics | sums


def fit(
    state: Any,
    model: LanguageModel,
    batch: TokenBatch,
    loss: Callable[[Tensor, TokenBatch], tuple[Tensor, Sums]],
    count: float,
) -> dict[str, float]:
    """One gradient step of the State's optimiser on a whole batch, at the rate that its Config plans.

    `loss(part, few)`, of the indices of a part and the batch of these, returns its share of the loss and sums for the
    metrics, which are divided by `count`. `model` is the one that computes.
    """
    parts = split(batch, torch.arange(len(batch.length)), state.config.micro_tokens)
    with model.precision():  # around all parts, so that the weights are rounded once
        pieces = (functools.partial(loss, part, batch.select(part)) for part in parts)
        return step(state.optimizer, pieces, _rate(state), state.config.max_grad_norm, count)


GroupLoss = Callable[[Any, TokenBatch, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Sums]]


def learn(
    state: Any,
    loss: GroupLoss,
    batch: TokenBatch,
    rewards: Tensor,
    advantage: Tensor,
    weights: Tensor,
    epochs: int = 1,
    flat_too: bool = False,
) -> dict[str, float]:
    """`descend` on those groups of a rollout that have a gradient, and how many had none. Rewards `[P, G]`.

    A group is left out if none of its tokens has a weight, and flat if all its advantages are 0; `flat_too` learns
    from the flat ones as well, for losses with a term that has no advantage in it.
    """
    left_out = (weights == 0).all(2).all(1)
    flat = (advantage == 0).all(1) & ~left_out
    metrics = {
        "equal_reward_groups": flat.float().mean().item(),
        "left_out_groups": left_out.float().mean().item(),
        "unscorable": rewards.isnan().float().mean().item(),
    }
    teaches = ~left_out if flat_too else ~(flat | left_out)
    return metrics | descend(state, loss, batch, advantage, weights, teaches, epochs)


def descend(
    state: Any,
    loss: GroupLoss,
    batch: TokenBatch,
    advantage: Tensor,
    weights: Tensor,
    groups: Tensor | None = None,
    epochs: int = 1,
) -> dict[str, float]:
    """`epochs` gradient steps of a State's policy on groups of a rollout, the first of which is its own π_old.

    `loss(state, batch, advantage, weights, old)` of a part returns its share of the loss, its log-probabilities
    `[P, G, T]` and sums over tokens for the metrics; `old` is what it returned for this part in the first pass (None
    there). Shapes: advantage `[P, G]` or `[P, G, T]`, weights `[P, G, T]` (of the whole batch, before it is split),
    groups `[P]` bool: the ones to learn from (None: all).
    """
    chosen = torch.arange(len(batch.length)) if groups is None else groups.nonzero()[:, 0]
    parts = split(batch, chosen, state.config.micro_tokens)
    old: list[Tensor | None] = [None] * len(parts)
    tokens = sum(int(batch.length[part].sum()) for part in parts)
    metrics: dict[str, float] = {}

    def piece(i: int) -> tuple[Tensor, Sums]:
        few = batch.select(parts[i])
        gain, weight = (rows(x, parts[i], few).to(state.policy.device) for x in (advantage, weights))
        value, logprob, sums = loss(state, few, gain, weight, old[i])
        old[i] = logprob.detach() if old[i] is None else old[i]
        return value, sums

    for _ in range(epochs if parts else 0):
        with state.policy.precision():  # around all parts, so that the weights are rounded once
            pieces = (functools.partial(piece, i) for i in range(len(parts)))
            metrics |= step(state.optimizer, pieces, _rate(state), state.config.max_grad_norm, tokens)
        if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
            break
    return metrics


def rows(whole: Tensor, part: Tensor, few: TokenBatch) -> Tensor:
    """The rows of `[P, G]` or `[P, G, T]` that belong to a part, as wide as its completions."""
    return whole[part] if whole.dim() == 2 else whole[part][..., : few.completion.shape[-1]]


def _rate(state: Any) -> float:
    config = state.config
    return schedules.planned(config.learning_rate, state.step, config.steps, config.warmup, config.anneal)
