"""CISPO: MiniMax-M1, Chen et al. 2025 (arXiv:2506.13585), section 3.1, equations 4 and 5.

A clipped ratio drops the whole gradient of a token that became much more likely, often one of the rare tokens that
reasoning depends on. CISPO clips the *weight* instead, so that every token has a gradient:

    J(θ) = E[ 1/Σ_i |o_i|  Σ_i Σ_t  sg(min(ρ_it, 1+ε)) A_i log π_θ(o_it) ]        A_i = (r_i − mean(r)) / std(r)

where sg stops the gradient. As in the paper, the weight is clipped from above only. Left out: the filter of repetitive
completions, and AdamW's betas (0.9, 0.95) and eps 1e-15, which the paper chose for its precision.

Compared with `grpo.py`, two of five slots differ: the clip (`clipped_weight`) and the aggregation (`per_token`).
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
from foresight.nets.language.model import LanguageModel
from foresight.ops.advantage import group_scaled
from foresight.ops.aggregate import per_token
from foresight.ops.diagnostics import rollout_sums
from foresight.ops.policy import clipped_weight, importance_weight, ratio
from foresight.planning.generation.rollout import answer, check_group, sample
from foresight.training import language
from foresight.training.microbatch import check_correction, check_minibatches, learn
from foresight.training.options import Correction, Tuning

KIND = "text"
UNIT = "updates"
METRICS = ("reward", "length", "entropy", "equal_reward_groups")
STALE = True  # the ratio is that to the policy that sampled: `--staleness` may be given


@dataclass(frozen=True)
class Config:
    """Hyperparameters of CISPO. Defaults are for a small model on a short task; the paper's are in parentheses."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder, or a hub id."""
    steps: int = 60
    """Total updates."""
    seed: int = 0
    """Seeds prompts and sampling."""
    prompts: int = 8
    """Prompts per update."""
    group: int = 8
    """Completions per prompt, G."""
    prompt_sampling: str = "uniform"
    """"uniform", by "learnability" (questions answered rightly half of the time are the likeliest), or "hardest" (of 16
    times as many, those whose greedy answer has the lowest reward)."""
    max_new_tokens: int = 16
    """Maximum tokens per completion."""
    mask_truncated: bool = False
    """Whether truncated completions are left out of the loss; they stay in their group's baseline."""
    temperature: float = 1.0
    """Temperature of sampling and of the trained policy."""
    learning_rate: float = 1e-5
    """AdamW."""
    epochs: int = 1
    """Passes over each rollout (paper: 1); with one pass and one gradient step every ratio is 1."""
    minibatches: int = 1
    """Gradient steps per epoch (paper: 16), each on a subset of the groups. π_old is the policy before the first."""
    clip_high: float = 4.0
    """ε: the weight is at most 1 + ε (the paper gives no value; ScaleRL, arXiv:2510.13786, has 1 + ε = 5)."""
    correction: Correction = Correction()
    """How tokens of another sampler are weighted (`training.options`)."""
    tuning: Tuning = Tuning()
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes while CISPO runs."""

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
    terms = clipped_weight(logprob, rho, advantage[..., None].expand_as(rho), config.clip_high)
    terms = terms * importance_weight(
        before, batch.logprob, correction.importance_correction, correction.importance_cap
    )
    sums = rollout_sums(rho, logprob, batch.logprob, entropy, batch.mask, 1.0, config.clip_high)
    return (weights * terms).sum(), logprob, sums


def update(state: State, batch: TokenBatch, rewards: Tensor) -> dict[str, float]:
    """The gradient steps on one rollout. Rewards `[P, G]`, NaN where unscorable."""
    config = state.config
    advantage = group_scaled(rewards)
    scored = batch.scored(rewards, config.mask_truncated)
    weights = per_token
    return learn(state, loss, batch, rewards, advantage, scored, weights, config.epochs, config.minibatches)


export = language.export


def train(
    config: Config, env: TextTask, state: State | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, dict[str, Any], State]]:
    """Sample groups, grade them, update; yields after every update."""
    state = build(config, env.spaces, device) if state is None else state
    while state.step < config.steps:
        rollout = sample(state, env)
        metrics = {**rollout.metrics(), **update(state, rollout.batch, rollout.rewards)}
        state.step += 1
        yield state.step, metrics, state
