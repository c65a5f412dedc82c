"""GSPO: Group Sequence Policy Optimization, Zheng et al. 2025 (arXiv:2507.18071), equations 5 to 7.

The reward is for a whole answer, so the whole answer has one importance ratio, normalized by length:

    J(θ) = E[ 1/G Σ_i min(s_i A_i, clip(s_i, 1-ε_low, 1+ε_high) A_i) ]        A_i = (r_i − mean(r)) / std(r)
    s_i = ( π_θ(o_i | q) / π_old(o_i | q) )^(1/|o_i|) = exp( 1/|o_i| Σ_t log ρ_it )

Because s_i averages over tokens, it stays near 1, and the clip range is about a thousand times narrower than GRPO's.
With one gradient step per rollout, s_i is 1 and the gradient is that of GRPO. Left out: the token-level variant,
section 4.3.

Compared with `grpo.py`, two of five slots differ: the ratio (`sequence_ratio`) and the clip, which is asymmetric.
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
from foresight.ops.aggregate import per_sequence
from foresight.ops.diagnostics import rollout_sums
from foresight.ops.policy import clipped_surrogate, importance_weight, sequence_ratio
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
    """Hyperparameters of GSPO. Defaults are for a small model on a short task; the paper's are in parentheses."""

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
    """Gradient steps per epoch (paper: 4), each on a subset of the groups. π_old is the policy before the first."""
    clip_low: float = 3e-4
    """ε_low of the clipped sequence ratio (paper: 3e-4)."""
    clip_high: float = 4e-4
    """ε_high of the clipped sequence ratio (paper: 4e-4)."""
    correction: Correction = Correction()
    """How tokens of another sampler are weighted (`training.options`)."""
    tuning: Tuning = Tuning()
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes while GSPO runs."""

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
    mask = batch.mask.to(logprob.device)
    flat = (x.flatten(0, 1) for x in (logprob, before, mask))
    rho = sequence_ratio(*flat).view_as(logprob)  # the same for every token of a completion
    terms = clipped_surrogate(rho, advantage[..., None].expand_as(rho), config.clip_low, config.clip_high)
    terms = terms * importance_weight(
        before, batch.logprob, correction.importance_correction, correction.importance_cap
    )
    sums = rollout_sums(rho, logprob, batch.logprob, entropy, mask, config.clip_low, config.clip_high)
    return (weights * terms).sum(), logprob, sums


def update(state: State, batch: TokenBatch, rewards: Tensor) -> dict[str, float]:
    """The gradient steps on one rollout. Rewards `[P, G]`, NaN where unscorable."""
    config = state.config
    advantage = group_scaled(rewards)
    scored = batch.scored(rewards, config.mask_truncated)
    weights = per_sequence
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
