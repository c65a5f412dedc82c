"""DAPO: Decoupled Clip and Dynamic Sampling Policy Optimization, Yu et al. 2025 (arXiv:2503.14476), section 3.

    J(θ) = E[ 1/Σ_i |o_i|  Σ_i Σ_t  min(ρ_it A_i, clip(ρ_it, 1-ε_low, 1+ε_high) A_i) ]    A_i = (r_i − mean(r)) / std(r)
    subject to  0 < |{correct o_i}| < G

All of its parts:
- clip higher (eq. 10): ε_high > ε_low, so that unlikely tokens can become likely;
- dynamic sampling (eq. 11): groups of equal rewards are replaced by newly sampled ones until the batch is full or
  `max_batches` were sampled; then the update uses the groups it has, and `filled` is the filled share of the batch;
- token-level loss (eq. 12): every token of the batch has the same weight;
- overlong filtering (section 3.4): a truncated completion counts in its group's baseline, but not in the loss;
- soft overlong punishment (eq. 13): in the last `overlong_buffer` tokens before the limit the reward falls to −1; the
  limit of a conversation is that of each of its turns, so its longest turn counts;
- no KL term (section 2.3).

Left out: nothing. The authors' code does not filter overlong answers, as the punishment has a similar effect; here both
are options.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresight.data.text import TokenBatch
from foresight.envs.text.curriculum import Counts, check_sampling
from foresight.envs.text.task import TextTask
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.ops.advantage import differs, group_scaled, overlong
from foresight.ops.aggregate import per_token
from foresight.ops.diagnostics import rollout_sums
from foresight.ops.policy import clipped_surrogate, importance_weight, ratio
from foresight.planning.generation.rollout import answer, check_group, sample_until
from foresight.training import language
from foresight.training.microbatch import check_correction, check_minibatches, learn
from foresight.training.options import Correction, Tuning

KIND = "text"
UNIT = "updates"
METRICS = ("reward", "length", "entropy", "equal_reward_groups")
STALE = True  # the ratio is that to the policy that sampled: `--staleness` may be given


@dataclass(frozen=True)
class Config:
    """Hyperparameters of DAPO. Defaults are for a small model on a short task; the paper's are in parentheses."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder, or a hub id."""
    steps: int = 60
    """Total updates."""
    seed: int = 0
    """Seeds prompts and sampling."""
    prompts: int = 8
    """Prompts per update (paper: 512)."""
    group: int = 8
    """Completions per prompt, G (paper: 16)."""
    prompt_sampling: str = "uniform"
    """"uniform", by "learnability" (questions answered rightly half of the time are the likeliest), or "hardest" (of 16
    times as many, those whose greedy answer has the lowest reward)."""
    max_new_tokens: int = 16
    """Maximum tokens per completion (paper: 20480)."""
    temperature: float = 1.0
    """Temperature of sampling and of the trained policy."""
    learning_rate: float = 1e-5
    """AdamW (paper: 1e-6 for 32B parameters, warmup of 20 rollouts)."""
    epochs: int = 1
    """Passes over each rollout (paper: 1); with one pass and one gradient step every ratio is 1."""
    minibatches: int = 1
    """Gradient steps per epoch (paper: 16), each on a subset of the groups. π_old is the policy before the first."""
    clip_low: float = 0.2
    """ε_low of the clipped ratio (paper: 0.2)."""
    clip_high: float = 0.28
    """ε_high of the clipped ratio (paper: 0.28)."""
    max_batches: int = 10
    """Maximum batches of prompts sampled per update (authors' code: 10). 1: no dynamic sampling."""
    overlong_filter: bool = True
    """Whether truncated completions are left out of the loss."""
    overlong_buffer: int = 4
    """Tokens before the limit over which the punishment grows (paper: 4096 of 20480)."""
    overlong_penalty: float = 1.0
    """The full punishment, in units of reward (paper: 1). 0: none."""
    correction: Correction = Correction()
    """How tokens of another sampler are weighted (`training.options`)."""
    tuning: Tuning = Tuning()
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes while DAPO runs."""

    config: Config
    policy: LanguageModel
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0
    counts: Counts | None = None  # right and wrong completions of each training example, for `learnability`


def build(config: Config, spaces: None = None, device: torch.device | str = "cpu") -> State:
    """Load the policy and make the optimizer."""
    check_group(config.group)
    check_sampling(config.prompt_sampling)
    check_minibatches(config)
    check_correction(config.correction)
    if config.overlong_penalty > 0 and not 0 < config.overlong_buffer <= config.max_new_tokens:
        raise UserError(
            f"overlong_buffer must be from 1 to max_new_tokens ({config.max_new_tokens}), not {config.overlong_buffer}."
        )
    return State(config, *language.build(config, device))


act = answer


def loss(
    state: State, batch: TokenBatch, advantage: Tensor, weights: Tensor, old: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The objective over a micro-batch: advantage `[P, G]`, weights and old `[P, G, T]` (old None: on-policy).

    Returns the loss, the log-probabilities `[P, G, T]` and sums over its tokens for the metrics.
    """
    config, correction = state.config, state.config.correction
    logprob, entropy = state.policy.logprob(batch, config.temperature)
    before = logprob if old is None else old
    rho = ratio(logprob, before)
    terms = clipped_surrogate(rho, advantage[..., None].expand_as(rho), config.clip_low, config.clip_high)
    terms = terms * importance_weight(
        before, batch.logprob, correction.importance_correction, correction.importance_cap
    )
    sums = rollout_sums(rho, logprob, batch.logprob, entropy, batch.mask, config.clip_low, config.clip_high)
    return (weights * terms).sum(), logprob, sums


def update(state: State, batch: TokenBatch, rewards: Tensor) -> dict[str, float]:
    """The gradient steps on one rollout. Rewards `[P, G]`, NaN where unscorable."""
    config = state.config
    if config.overlong_penalty > 0:
        limit, length = config.max_new_tokens, batch.longest_turn()
        rewards = rewards + config.overlong_penalty * overlong(length, limit, config.overlong_buffer)
    advantage = group_scaled(rewards)
    scored = batch.scored(rewards, config.overlong_filter)
    weights = per_token
    return learn(state, loss, batch, rewards, advantage, scored, weights, config.epochs, config.minibatches)


export = language.export


def train(
    config: Config, env: TextTask, state: State | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, dict[str, Any], State]]:
    """Sample groups until enough have unequal rewards, then update; yields after every update."""
    state = build(config, env.spaces, device) if state is None else state
    while state.step < config.steps:
        rollout, sampled = sample_until(differs, state, env)
        metrics = {**rollout.metrics(), **update(state, rollout.batch, rollout.rewards), **sampled}
        state.step += 1
        yield state.step, metrics, state
