"""The multi-token heads of a language model as its critic: no group of answers, no critic network.

Not from one paper: its parts are from DeepSeek-V3 2024 (arXiv:2412.19437, §2.2: the heads), Sutton 1988 (the TD
target), Lillicrap et al. 2016 (arXiv:1509.02971: averaged target weights) and Schulman et al. 2017 (arXiv:1707.06347).
Head k of K (`nets.language.mtp`) gets the state s_t, the text before token t, from a trunk that is k - 1 tokens behind,
and predicts the next token and the value of the state:

    L = 1/N Σ_t [ −min(ρ_t A_t, clip(ρ_t, 1-ε, 1+ε) A_t) + λ₂/K Σ_k huber(vᵏ_t − yᵏ_t) + β/(K-1) Σ_k>1 KL(π ‖ pᵏ)_t ]
    yᵏ_t = r_t + γ v̄ᵏ_{t+1}            v̄: Polyak averages of the heads only, on the current trunk
    A_t: GAE over the tokens; the value is the mean of the K estimates

The reward r is the grader's, given at the last token. The Huber loss is quadratic up to an error of c and linear
beyond: the gradient of a value is clamped to ±c. Token prediction has soft targets, the policy's own distribution at
that state, and its gradient reaches neither the trunk nor the shared unembedding: with hard targets and a gradient to
the trunk the entropy collapses. The gradient of the values may also stop at the trunk (`detach_value`).

With one gradient step per rollout, the forward pass of that step also gives π_old and the baseline. So advantages are
not whitened, which would need an additional pass. Left out: a KL to a reference.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foresight.data.text import TokenBatch
from foresight.envs.text.task import TextTask
from foresight.errors import UserError
from foresight.nets.language import mtp, pretrained
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.mtp import MultiTokenHeads
from foresight.ops import schedules
from foresight.ops.aggregate import per_token
from foresight.ops.diagnostics import explained_variance, mean, rollout_sums
from foresight.ops.policy import clipped_surrogate, ratio
from foresight.ops.returns import discounted_return, gae, lambda_return
from foresight.ops.tokens import token_divergence, token_logprob
from foresight.ops.value import huber_loss
from foresight.planning.generation.rollout import answer, sample
from foresight.training import language
from foresight.training.microbatch import check_minibatches, finite, plan, record_old_policy, step
from foresight.training.optim import track
from foresight.training.options import Tuning

KIND = "text"
UNIT = "updates"
METRICS = ("reward", "length", "entropy", "explained_variance", "acceptance")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of the multi-token critic. No paper has all of them; each comment names its source."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder (its heads are used if it has any), or a hub id."""
    steps: int = 60
    """Total updates."""
    seed: int = 0
    """Seeds prompts, sampling and new heads."""
    prompts: int = 64
    """Prompts per update, each with one completion (as many completions as grpo's 8 × 8)."""
    max_new_tokens: int = 16
    """Maximum tokens per completion."""
    mask_truncated: bool = False
    """Whether truncated completions are left out of the loss."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the reward of a truncated completion (TRL: 1)."""
    temperature: float = 1.0
    """Temperature of sampling and of the trained policy."""
    predict_tokens: int = 3
    """K: prediction heads; 1: only a value head on the trunk (DeepSeek-V3: 2; MiniMax-M2: 4)."""
    learning_rate: float = 1e-5
    """AdamW of the trunk (as in grpo)."""
    head_learning_rate: float = 1e-3
    """AdamW of the heads, which are new and trained in full even with --lora (RLHF's pretrained critics: 1e-5)."""
    epochs: int = 1
    """Passes over each rollout."""
    minibatches: int = 1
    """Gradient steps per epoch, each on a subset of the answers. π_old is the policy before the first."""
    clip_ratio: float = 0.2
    """ε of the clipped ratio (PPO: 0.2)."""
    gamma: float = 1.0
    """Discount between tokens (RLHF: 1)."""
    gae_lambda: float = 0.95
    """λ of the advantage; 0 is the TD error (RLHF: 0.95)."""
    td_lambda: float = 0.0
    """λ of the value target: 0 is r + γ v̄, 1 the return (VAPO, arXiv:2504.05118: 1)."""
    tau: float = 0.1
    """Polyak step size of the averaged heads (DDPG: 0.001, with a hundred times as many steps)."""
    value_coef: float = 0.1
    """λ₂: weight of the value loss."""
    clip_value: float = 1.0
    """c, to which the gradient of a value is clamped, in units of reward (DQN: 1)."""
    detach_value: bool = False
    """Whether the gradient of the values stops at the trunk."""
    token_coef: float = 0.1
    """β: weight of the token prediction loss (DeepSeek-V3: 0.3, then 0.1)."""
    tuning: Tuning = Tuning(micro_tokens=1024)
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes during training."""

    config: Config
    policy: LanguageModel
    heads: MultiTokenHeads
    averaged: MultiTokenHeads
    optimizer: torch.optim.Optimizer
    head_optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0


def build(config: Config, spaces: None = None, device: torch.device | str = "cpu") -> State:
    """Load the policy, its heads or new ones, and make their averages and the optimizers."""
    if config.predict_tokens < 1:
        raise UserError(f"predict_tokens must be at least 1 (a value on the trunk), not {config.predict_tokens}.")
    check_minibatches(config)
    policy, optimizer, generator = language.build(config, device)
    heads = pretrained.load_heads(config.model, device)
    if heads is not None and len(heads) != config.predict_tokens:
        raise UserError(
            f"{config.model} has {len(heads)} heads, not {config.predict_tokens}: give --predict-tokens {len(heads)}."
        )
    if heads is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            heads = mtp.heads_for(policy, config.predict_tokens)
    averaged = copy.deepcopy(heads).requires_grad_(False)
    head_optimizer = language.adamw(heads, config.head_learning_rate, config.tuning)
    return State(config, policy, heads, averaged, optimizer, head_optimizer, generator)


act = answer


@dataclass(frozen=True)
class Targets:
    """Targets of a micro-batch, fixed before the first gradient step: old, advantage `[P, G, T]`, target
    `[K, P, G, T]`.

    `value` and `returns`, the baseline and the return from each token, `[P, G, T]`, are for the metrics.
    """

    old: Tensor
    advantage: Tensor
    target: Tensor
    value: Tensor
    returns: Tensor


def targets(
    config: Config,
    batch: TokenBatch,
    rewards: Tensor,
    old: Tensor,
    values: Tensor,
    averaged: Tensor,
    exist: Tensor,
) -> Targets:
    """The TD targets and advantages of answers `[P, G, T]` with `rewards` `[P, G]` (NaN: unscorable).

    values, averaged and exist are `[K, P, G, T]`: the values of the state before each token by the heads and by their
    averages, and whether the head exists there.
    """
    heads, shape, device = len(values), old.shape, old.device
    own, steps = batch.mask.to(device), batch.steps().to(device)  # side by side, over all turns
    last, position = (own.sum(-1, keepdim=True) - 1).clamp(min=0), torch.arange(shape[-1], device=device)
    final = rewards.to(device).nan_to_num()[..., None]
    reward = torch.where(position == last, final, 0.0)
    discount, cut = config.gamma * (position < last).float(), (position >= last).float()
    mask = batch.scored(rewards).to(device).gather(-1, steps)
    value = (values * exist).sum(0) / exist.sum(0).clamp(min=1)
    states, averaged = value.gather(-1, steps), averaged.gather(-1, steps.expand(heads, *shape))

    def following(x: Tensor) -> Tensor:
        return functional.pad(x[..., 1:], (0, 1))

    def rows(x: Tensor, count: int = 1) -> Tensor:
        return x.expand(count, *shape).reshape(-1, shape[-1])

    r, d, c = (rows(x) for x in (reward, discount, cut))
    advantage, _ = gae(r, d, c, rows(states), rows(following(states)), config.gae_lambda, rows(mask))
    returns = discounted_return(r, d, c, None, rows(mask))
    r, d, c = (rows(x, heads) for x in (reward, discount, cut))
    target = lambda_return(r, d, c, following(averaged).reshape(-1, shape[-1]), config.td_lambda, rows(mask, heads))

    def back(x: Tensor) -> Tensor:
        x = x.view(-1, *shape)
        return torch.zeros_like(x).scatter(-1, steps.expand(x.shape), x)

    return Targets(old, back(advantage)[0], back(target), value, back(returns)[0])


def loss(
    state: State, batch: TokenBatch, rewards: Tensor, weights: Tensor, fixed: Targets | None
) -> tuple[Tensor, Targets, dict[str, Tensor]]:
    """The loss of a micro-batch: rewards `[P, G]`, weights `[P, G, T]`, and its fixed targets (None: computed here).

    Returns the loss, the fixed targets, and sums over its tokens for the metrics.
    """
    config, policy, heads = state.config, state.policy, state.heads
    seen = mtp.view(policy, batch)
    logits = policy.logits(seen.hidden[seen.context])
    logprob, entropy = (seen.scatter(x) for x in token_logprob(logits, seen.tokens, config.temperature))
    detached = seen.hidden.detach()
    features, exist = heads(detached if config.detach_value else seen.hidden, seen.embedded, seen.parents)
    values, exist = seen.scatter(heads.values(features[:, seen.context])), seen.scatter(exist[:, seen.context])
    if fixed is None:
        with torch.no_grad():
            target_features, _ = state.averaged(detached, seen.embedded, seen.parents)
            averaged = seen.scatter(state.averaged.values(target_features[:, seen.context]))
            fixed = targets(config, batch, rewards, logprob.detach(), values.detach(), averaged, exist)
    rho = ratio(logprob, fixed.old)
    terms = {
        "policy": clipped_surrogate(rho, fixed.advantage, config.clip_ratio),
        "value": (huber_loss(values, fixed.target, config.clip_value) * exist).sum(0) / exist.sum(0).clamp(min=1),
    }
    sums = rollout_sums(rho, logprob, batch.logprob, entropy, seen.mask, config.clip_ratio)
    if len(heads) > 1:
        draft_features = features if config.detach_value else heads(detached, seen.embedded, seen.parents)[0]
        drafts = (mtp.logits(policy, draft_features[k, seen.context]) for k in range(1, len(heads)))
        found = [[seen.scatter(x) for x in token_divergence(draft, logits.detach())] for draft in drafts]
        distance, overlap = (torch.stack(x) * exist[1:] for x in zip(*found, strict=True))
        terms["token"] = distance.sum(0) / exist[1:].sum(0).clamp(min=1)
        sums["acceptance"] = (overlap.sum(0) / exist[1:].sum(0).clamp(min=1)).sum()
    sums |= {f"{name}_loss": (term.detach() * seen.mask).sum() for name, term in terms.items()}
    coefficients = {"policy": 1.0, "value": config.value_coef, "token": config.token_coef}
    return sum(((coefficients[n] * weights * t).sum() for n, t in terms.items()), torch.zeros(())), fixed, sums


def update(state: State, batch: TokenBatch, rewards: Tensor) -> dict[str, float]:
    """The gradient steps on one rollout, each with an update of the averages. Rewards `[P, G]`; NaN: unscorable."""
    config, device = state.config, state.policy.device
    rewards = rewards - config.missing_eos_penalty * ~batch.stopped
    scored = batch.scored(rewards, config.mask_truncated)
    steps, weights = plan(state, batch, scored, per_token, scored.any((1, 2)), config.minibatches)
    fixed: dict[tuple[int, int], Targets] = {}

    def micro_loss(i: int, j: int) -> tuple[Tensor, dict[str, Tensor]]:
        part = steps[i][j]
        few = batch.select(part)
        weight = weights[part][..., : few.completion.shape[-1]].to(device)
        value, fixed[i, j], sums = loss(state, few, rewards[part], weight, fixed.get((i, j)))
        return value, sums

    metrics = {
        "left_out_groups": (~scored.any((1, 2))).float().mean().item(),
        "unscorable": rewards.isnan().float().mean().item(),
    }
    tuning = config.tuning
    scale = schedules.warmup_linear(1.0, state.step, config.steps, tuning.lr_warmup, tuning.anneal_lr)
    record_old_policy(state, steps, micro_loss)
    for _ in range(config.epochs if steps else 0):
        results = []
        for i, parts in enumerate(steps):
            tokens = int(batch.mask[torch.cat(parts)].sum())
            with state.policy.precision():  # around all parts, so that the weights are cast once
                losses = (functools.partial(micro_loss, i, j) for j in range(len(parts)))
                results.append(
                    step(state.optimizer, losses, config.learning_rate * scale, tuning.max_grad_norm, tokens)
                )
            if not finite(results[-1]):
                state.head_optimizer.zero_grad()
                return metrics | results[-1]
            # The heads already have gradients; they are clipped separately, not together with the trunk's.
            head_step = step(state.head_optimizer, (), config.head_learning_rate * scale, tuning.max_grad_norm)
            results[-1]["head_grad_norm"] = head_step["grad_norm"]
            track(state.averaged, state.heads, config.tau)
        metrics |= mean(results)
    known = [(x.value, x.returns, batch.select(part).scored(rewards[part], config.mask_truncated))
             for (i, j), x in fixed.items() for part in (steps[i][j],)]  # fmt: skip
    if known:
        value, returns = (torch.cat([one[i][one[2].to(one[i].device)] for one in known]) for i in range(2))
        metrics["explained_variance"] = explained_variance(value, returns).item()
    return metrics


def export(state: State, directory: str | Path, merged: bool = True) -> Path:
    """Write the policy as `training.language.export` does, with its heads."""
    model, tokenizer = state.policy.module, state.policy.tokenizer
    return pretrained.save_folder(model, tokenizer, directory, merged, state.heads, state.config.model)


def train(
    config: Config, env: TextTask, state: State | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, dict[str, Any], State]]:
    """Sample one answer per prompt, grade, update; yields after every update."""
    state = build(config, env.spaces, device) if state is None else state
    while state.step < config.steps:
        rollout = sample(state, env)
        metrics = {**rollout.metrics(), **update(state, rollout.batch, rollout.rewards)}
        state.step += 1
        yield state.step, metrics, state
