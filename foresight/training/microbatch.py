"""Gradient steps on token batches that do not fit into memory at once: split, sum the gradients, step once.

The weights of the loss are made from a whole minibatch before it is split (`ops.aggregate`), so the sum over the
parts is the loss of the whole, and its gradient does not depend on how it was split.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from foresight import distributed
from foresight.data.text import TokenBatch, common_prefix
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.ops import schedules
from foresight.ops.diagnostics import mean

Sums = dict[str, Tensor]


def split(batch: TokenBatch, groups: Tensor, tokens: int) -> list[Tensor]:
    """Split groups into parts of about `tokens` distinct tokens: whole groups with their prompts, the longest together.

    What all prompts begin with is in each part, once.
    """
    prompts = batch.prompts()
    stem = common_prefix([prompts[group] for group in groups.tolist()]) if len(groups) else 0
    sizes = batch.distinct() + batch.prompt_length - stem
    parts: list[list[int]] = []
    room = 0
    for group in groups[sizes[groups].argsort(dim=0, descending=True, stable=True)].tolist():
        if not parts or room < int(sizes[group]):
            parts.append([])
            room = tokens - stem
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
    for piece in distributed.share(pieces):
        value, numbers = piece()
        distributed.backward(value)
        total += value.item()
        for key, number in numbers.items():
            sums[key] = sums.get(key, 0.0) + number.item() / count
    total, sums = distributed.all_reduce({"": total}).pop(""), distributed.all_reduce(sums)
    parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
    norm = distributed.full(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)).item()
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
    """One gradient step of the State's optimizer on a whole batch, at the rate that its Config plans.

    `loss(part, few)`, of the indices of a part and the batch of these, returns its share of the loss and sums for the
    metrics, which are divided by `count`. `model` is the one that computes.
    """
    parts = split(batch, torch.arange(len(batch.length)), state.config.tuning.micro_tokens)
    with model.precision():  # around all parts, so that the weights are rounded once
        pieces = (functools.partial(loss, part, batch.select(part)) for part in parts)
        return step(state.optimizer, pieces, _rate(state), state.config.tuning.max_grad_norm, count)


GroupLoss = Callable[[Any, TokenBatch, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Sums]]
Weigh = Callable[[Tensor], Tensor]


def learn(
    state: Any,
    loss: GroupLoss,
    batch: TokenBatch,
    rewards: Tensor,
    advantage: Tensor,
    scored: Tensor,
    weigh: Weigh,
    epochs: int = 1,
    minibatches: int = 1,
    flat_too: bool = False,
) -> dict[str, float]:
    """`descend` on those groups of a rollout that have a gradient, and how many had none. Rewards `[P, G]`.

    A group is left out if none of its tokens is scored, and flat if all its advantages are 0; `flat_too` learns
    from the flat ones as well, for losses with a term that has no advantage in it.
    """
    left_out = ~scored.any(2).any(1)
    flat = (advantage == 0).all(1) & ~left_out
    metrics = {
        "equal_reward_groups": flat.float().mean().item(),
        "left_out_groups": left_out.float().mean().item(),
        "unscorable": rewards.isnan().float().mean().item(),
    }
    teaches = ~left_out if flat_too else ~(flat | left_out)
    return metrics | descend(state, loss, batch, advantage, scored, weigh, teaches, epochs, minibatches)


def descend(
    state: Any,
    loss: GroupLoss,
    batch: TokenBatch,
    advantage: Tensor,
    scored: Tensor,
    weigh: Weigh,
    groups: Tensor | None = None,
    epochs: int = 1,
    minibatches: int = 1,
) -> dict[str, float]:
    """`epochs` passes of a State's policy over groups of a rollout, in `minibatches` gradient steps each.

    `loss(state, batch, advantage, weights, old)` of a part returns its share of the loss, its log-probabilities
    `[P, G, T]` and sums over tokens for the metrics. `old` is π_old's of this part, those of the policy before the
    first step; None in that step itself, which is its own. Shapes: advantage `[P, G]` or `[P, G, T]`, scored
    `[P, G, T]` (what `weigh` makes the weights of), groups `[P]` bool: the ones to learn from (None: all). Returns the
    metrics of the last pass, the mean of its steps.
    """
    chosen = torch.ones(len(batch.length), dtype=torch.bool) if groups is None else groups
    steps, weights = plan(state, batch, scored, weigh, chosen, minibatches)
    old: dict[tuple[int, int], Tensor] = {}
    metrics: dict[str, float] = {}

    def piece(i: int, j: int) -> tuple[Tensor, Sums]:
        part, known = steps[i][j], old.get((i, j))
        few = batch.select(part)
        gain, weight = (rows(x, part, few).to(state.policy.device) for x in (advantage, weights))
        value, logprob, sums = loss(state, few, gain, weight, known)
        old[i, j] = logprob.detach() if known is None else known
        return value, sums

    def recall(i: int, j: int) -> tuple[Tensor, Sums]:
        old[i, j] = state.policy.logprob(batch.select(steps[i][j]), state.config.temperature)[0]
        return torch.zeros(()), {}

    before_the_first(state, steps, recall)
    for _ in range(epochs if steps else 0):
        done = []
        for i, parts in enumerate(steps):
            tokens = sum(int(batch.length[part].sum()) for part in parts)
            with state.policy.precision():  # around all parts, so that the weights are rounded once
                pieces = (functools.partial(piece, i, j) for j in range(len(parts)))
                done.append(step(state.optimizer, pieces, _rate(state), state.config.tuning.max_grad_norm, tokens))
            if not math.isfinite(done[-1]["loss"] + done[-1]["grad_norm"]):
                return metrics | done[-1]
        metrics = mean(done)
    return metrics


def plan(
    state: Any, batch: TokenBatch, scored: Tensor, weigh: Weigh, groups: Tensor, count: int
) -> tuple[list[list[Tensor]], Tensor]:
    """Shuffle a rollout into `count` minibatches of whole groups: the parts of each, and the weights `[P, G, T]`.

    A token weighs what `weigh` makes of `scored` `[P, G, T]` in its own minibatch, before that is split. Only `groups`
    `[P]` have parts, and minibatches without one are left out: a step on a gradient of 0 would still go where the last
    ones went. They are the same in all passes over the rollout, as in TRL. One minibatch draws nothing.
    """
    total = len(batch.length)
    order = torch.randperm(total, generator=state.generator) if count > 1 else torch.arange(total)
    steps, weights = [], torch.zeros(scored.shape)
    for some in order.tensor_split(count):
        if groups[some].any():
            weights[some] = weigh(scored[some])
            steps.append(split(batch, some[groups[some]], state.config.tuning.micro_tokens))
    return steps, weights


def before_the_first(state: Any, steps: list[list[Tensor]], recall: Callable[[int, int], tuple[Tensor, Sums]]) -> None:
    """Run `recall(i, j)` of each part of the later steps without gradient: what they need of the policy as it was."""
    with torch.no_grad(), state.policy.precision():
        for i, parts in enumerate(steps[1:], 1):
            for piece in distributed.share(functools.partial(recall, i, j) for j in range(len(parts))):
                piece()


def check_minibatches(config: Any) -> None:
    """Raises UserError if a Config's `minibatches` are none, or more than its prompts can be shared among."""
    if not 1 <= config.minibatches <= config.prompts:
        raise UserError(f"minibatches is {config.minibatches}: it must be from 1 to prompts ({config.prompts}).")


def rows(whole: Tensor, part: Tensor, few: TokenBatch) -> Tensor:
    """The rows of `[P, G]` or `[P, G, T]` that belong to a part, as wide as its completions."""
    return whole[part] if whole.dim() == 2 else whole[part][..., : few.completion.shape[-1]]


def _rate(state: Any) -> float:
    config, tuning = state.config, state.config.tuning
    return schedules.planned(config.learning_rate, state.step, config.steps, tuning.lr_warmup, tuning.anneal_lr)
