"""Gradient accumulation for token batches that do not fit into memory: split, sum the gradients, step once.

The loss weights are computed from the whole minibatch before the split (`ops.aggregate`), so the losses of the
micro-batches sum to that of the minibatch, and the gradient does not depend on the split.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from foresight import distributed
from foresight.data.text import TokenBatch, common_prefix
from foresight.errors import UserError, unknown
from foresight.nets.language.model import LanguageModel
from foresight.ops import kl, schedules
from foresight.ops.advantage import differs
from foresight.ops.diagnostics import mean
from foresight.ops.policy import CORRECTIONS
from foresight.training.options import Correction, Tuning

Sums = dict[str, Tensor]


class Plan(Protocol):
    """The fields of a Config that gradient steps use."""

    @property
    def steps(self) -> int:
        """Updates in all."""

    @property
    def learning_rate(self) -> float:
        """Before warmup and annealing."""

    @property
    def tuning(self) -> Tuning:
        """How the model is tuned."""


class SamplingPlan(Plan, Protocol):
    """`Plan`, for a policy that is trained on its own samples."""

    @property
    def temperature(self) -> float:
        """Of sampling and of the trained policy."""


class Trained(Protocol):
    """The fields of a State with an optimizer that the functions here use."""

    optimizer: torch.optim.Optimizer
    step: int

    @property
    def config(self) -> Plan:
        """The algorithm's Config."""


class TrainedPolicy(Trained, Protocol):
    """A `Trained` State whose policy is trained on its own samples."""

    policy: LanguageModel
    generator: torch.Generator

    @property
    def config(self) -> SamplingPlan:
        """The algorithm's Config."""


class Minibatches(Protocol):
    """The sizes of an update in a Config."""

    @property
    def prompts(self) -> int:
        """Prompts per update."""

    @property
    def minibatches(self) -> int:
        """Gradient steps per epoch."""


Learner = TypeVar("Learner", bound=TrainedPolicy)


def split(batch: TokenBatch, groups: Tensor, tokens: int) -> list[Tensor]:
    """Split groups into parts of about `tokens` distinct tokens: whole groups with their prompts, longest first.

    The prefix that all prompts share counts once in each part.
    """
    prompts = batch.prompts()
    shared = common_prefix([prompts[group] for group in groups.tolist()]) if len(groups) else 0
    sizes = batch.distinct() + batch.prompt_length - shared
    parts: list[list[int]] = []
    space = 0
    for group in groups[sizes[groups].argsort(dim=0, descending=True, stable=True)].tolist():
        if not parts or space < int(sizes[group]):
            parts.append([])
            space = tokens - shared
        parts[-1].append(group)
        space -= int(sizes[group])
    return [torch.tensor(part) for part in parts]


@torch.no_grad()
def gather(function: Callable[[TokenBatch], Tensor], batch: TokenBatch, tokens: int) -> Tensor:
    """`function`, `[P, G, T]`, of a whole batch, computed part by part. No gradient."""
    whole = torch.zeros(batch.completion.shape)
    for part in split(batch, torch.arange(len(batch.length)), tokens):
        result = function(batch.select(part)).cpu()
        whole[part, :, : result.shape[-1]] = result.to(whole)
    return whole


def penalized(
    rewards: Tensor, reference: LanguageModel, batch: TokenBatch, coef: float, temperature: float, tokens: int
) -> tuple[Tensor, Tensor]:
    """Rewards `[P, G]` minus `coef` · Σ_t k1, and that sum: a KL penalty in the reward, of the policy that sampled.

    The baseline of the advantage then includes the penalty. `tokens` bounds a micro-batch.
    """
    logprob = gather(lambda few: reference.logprob(few, temperature)[0], batch, tokens)
    distance = (kl.k1(batch.logprob, logprob) * batch.mask).sum(-1)
    return rewards - coef * distance, distance


def step(
    optimizer: torch.optim.Optimizer,
    losses: Iterable[Callable[[], tuple[Tensor, Sums]]],
    learning_rate: float,
    max_grad_norm: float,
    count: float = 1.0,
) -> dict[str, float]:
    """One gradient step on the sum of `losses`, one per micro-batch. No step is taken if the loss is not finite.

    Each returns its share of the loss and sums for the metrics, which are returned divided by `count`.
    """
    total, sums = 0.0, dict[str, float]()
    for loss in distributed.share(losses):
        value, partial = loss()
        distributed.backward(value)
        total += value.item()
        for key, x in partial.items():
            sums[key] = sums.get(key, 0.0) + x.item() / count
    total, sums = distributed.all_reduce({"": total}).pop(""), distributed.all_reduce(sums)
    parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
    norm = distributed.full(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)).item()
    metrics = {"loss": total, "grad_norm": norm, "learning_rate": learning_rate}
    if not finite(metrics):
        optimizer.zero_grad()
        return metrics
    for settings in optimizer.param_groups:
        settings["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()  # the first micro-batch's gradients are then taken as they are, neither filled nor added to
    return metrics | sums


def finite(metrics: Mapping[str, float]) -> bool:
    """Whether `step` made a step. If not, no other step of the update may follow: the run ends with these weights."""
    return math.isfinite(metrics["loss"] + metrics["grad_norm"])


def fit(
    state: Trained,
    model: LanguageModel,
    batch: TokenBatch,
    loss: Callable[[Tensor, TokenBatch], tuple[Tensor, Sums]],
    count: float,
) -> dict[str, float]:
    """One gradient step of the State's optimizer on a whole batch, at the scheduled learning rate.

    `loss(part, few)` is called with the indices of a micro-batch and its TokenBatch; it returns its share of the loss
    and sums for the metrics, which are divided by `count`. `model` sets the precision.
    """
    parts = split(batch, torch.arange(len(batch.length)), state.config.tuning.micro_tokens)
    with model.precision():  # around all parts, so that the weights are cast once
        losses = (functools.partial(loss, part, batch.select(part)) for part in parts)
        return step(state.optimizer, losses, _rate(state), state.config.tuning.max_grad_norm, count)


GroupLoss = Callable[[Learner, TokenBatch, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Sums]]
Weigh = Callable[[Tensor], Tensor]


def learn(
    state: Learner,
    loss: GroupLoss[Learner],
    batch: TokenBatch,
    rewards: Tensor,
    advantage: Tensor,
    scored: Tensor,
    weigh: Weigh,
    epochs: int = 1,
    minibatches: int = 1,
    flat_too: bool = False,
) -> dict[str, float]:
    """`descend` on the groups of a rollout that have a gradient; adds the shares of those without.

    Rewards `[P, G]` are those of the task, before a penalty. A group is left out if none of its tokens is scored, and
    flat if all its advantages are 0; `flat_too` trains on the flat ones as well, for losses with a term without the
    advantage.
    """
    left_out = ~scored.any(2).any(1)
    flat = (advantage == 0).all(1) & ~left_out
    metrics = {
        "equal_reward_groups": (~differs(rewards) & ~left_out).float().mean().item(),
        "left_out_groups": left_out.float().mean().item(),
        "unscorable": rewards.isnan().float().mean().item(),
    }
    chosen = ~left_out if flat_too else ~(flat | left_out)
    return metrics | descend(state, loss, batch, advantage, scored, weigh, chosen, epochs, minibatches)


def descend(
    state: Learner,
    loss: GroupLoss[Learner],
    batch: TokenBatch,
    advantage: Tensor,
    scored: Tensor,
    weigh: Weigh,
    groups: Tensor | None = None,
    epochs: int = 1,
    minibatches: int = 1,
) -> dict[str, float]:
    """`epochs` passes of a State's policy over groups of a rollout, in `minibatches` gradient steps each.

    `loss(state, batch, advantage, weights, old)` of a micro-batch returns its share of the loss, its log-probabilities
    `[P, G, T]` and sums over tokens for the metrics. `old` are the log-probabilities under π_old, the policy before the
    first step; None in the first step, where they are those that the loss computes. In a stale batch π_old is what
    sampled: `old` are the stored log-probabilities (`behavior`), in all steps. Shapes: advantage `[P, G]` or
    `[P, G, T]`, scored `[P, G, T]` (from which `weigh` computes the weights), groups `[P]` bool: those to train on
    (None: all). Returns the metrics of the last pass, averaged over its steps.
    """
    chosen = torch.ones(len(batch.length), dtype=torch.bool) if groups is None else groups
    steps, weights = plan(state, batch, scored, weigh, chosen, minibatches)
    old: dict[tuple[int, int], Tensor] = {}
    metrics: dict[str, float] = {}

    def micro_loss(i: int, j: int) -> tuple[Tensor, Sums]:
        part, before = steps[i][j], old.get((i, j))
        few = batch.select(part)
        if before is None and batch.stale:
            before = old[i, j] = behavior(few, state.policy.device)
        advantages, weight = (rows(x, part, few).to(state.policy.device) for x in (advantage, weights))
        value, logprob, sums = loss(state, few, advantages, weight, before)
        old[i, j] = logprob.detach() if before is None else before
        return value, sums

    def record(i: int, j: int) -> tuple[Tensor, Sums]:
        old[i, j] = state.policy.logprob(batch.select(steps[i][j]), state.config.temperature)[0]
        return torch.zeros(()), {}

    if not batch.stale:
        record_old_policy(state, steps, record)
    for _ in range(epochs if steps else 0):
        results = []
        for i, parts in enumerate(steps):
            tokens = int(batch.mask[torch.cat(parts)].sum())
            with state.policy.precision():  # around all parts, so that the weights are cast once
                losses = (functools.partial(micro_loss, i, j) for j in range(len(parts)))
                results.append(step(state.optimizer, losses, _rate(state), state.config.tuning.max_grad_norm, tokens))
            if not finite(results[-1]):
                return metrics | results[-1]
        metrics = mean(results)
    return metrics


def behavior(batch: TokenBatch, device: torch.device) -> Tensor:
    """log π_old `[P, G, T]` of a batch that earlier weights sampled, as it was stored while sampling; 0 on padding.

    With it, the ratio corrects for the updates since: Espeholt et al. 2018 (arXiv:1802.01561) for actors that lag.
    """
    return batch.logprob.to(device).masked_fill(~batch.mask.to(device), 0)


def plan(
    state: TrainedPolicy, batch: TokenBatch, scored: Tensor, weigh: Weigh, groups: Tensor, count: int
) -> tuple[list[list[Tensor]], Tensor]:
    """Shuffle a rollout into `count` minibatches of whole groups: the parts of each, and the weights `[P, G, T]`.

    Weights are `weigh` of the `scored` tokens `[P, G, T]` of a whole minibatch. Only `groups` `[P]` have parts, and
    minibatches without any are left out: with a gradient of 0, momentum would still change the weights. The minibatches
    are the same in all passes over the rollout, as in TRL. With one minibatch no random number is drawn.
    """
    total = len(batch.length)
    order = torch.randperm(total, generator=state.generator) if count > 1 else torch.arange(total)
    steps, weights = [], torch.zeros(scored.shape)
    for some in order.tensor_split(count):
        if groups[some].any():
            weights[some] = weigh(scored[some])
            steps.append(split(batch, some[groups[some]], state.config.tuning.micro_tokens))
    return steps, weights


def record_old_policy(
    state: TrainedPolicy, steps: list[list[Tensor]], record: Callable[[int, int], tuple[Tensor, Sums]]
) -> None:
    """Run `record(i, j)` for each part of the later steps, without gradient, to record π_old before the first step."""
    with torch.no_grad(), state.policy.precision():
        for i, parts in enumerate(steps[1:], 1):
            for compute in distributed.share(functools.partial(record, i, j) for j in range(len(parts))):
                compute()


def check_minibatches(config: Minibatches) -> None:
    """Raises UserError unless a Config's `minibatches` is from 1 to its `prompts`."""
    if not 1 <= config.minibatches <= config.prompts:
        raise UserError(f"minibatches is {config.minibatches}: it must be from 1 to prompts ({config.prompts}).")


def check_correction(correction: Correction) -> None:
    """Raises UserError for an unknown kind of correction, or a cap below 1."""
    if correction.importance_correction not in CORRECTIONS:
        raise unknown("importance_correction", correction.importance_correction, CORRECTIONS)
    if not correction.importance_cap >= 1:
        raise UserError(
            f"importance_cap is {correction.importance_cap:g}: the weight of equal policies is 1; give more."
        )


def rows(whole: Tensor, part: Tensor, few: TokenBatch) -> Tensor:
    """The rows of a part of `[P, G]` or `[P, G, T]`, cut to the width of its completions."""
    return whole[part] if whole.dim() == 2 else whole[part][..., : few.completion.shape[-1]]


def _rate(state: Trained) -> float:
    config, tuning = state.config, state.config.tuning
    return schedules.warmup_linear(config.learning_rate, state.step, config.steps, tuning.lr_warmup, tuning.anneal_lr)
