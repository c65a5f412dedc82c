"""Dr. GRPO: "Understanding R1-Zero-Like Training", Liu et al. 2025 (arXiv:2503.20783), section 3.

GRPO without the two divisions that bias its gradient. Maximize

    J(θ) = E[ 1/G Σ_i Σ_t  min(ρ_it A_i, clip(ρ_it, 1-ε, 1+ε) A_i) ]        A_i = r_i − mean(r)

With 1/|o_i|, a long wrong answer is penalized less per token; with 1/std(r), a prompt that is solved nearly always or
nearly never has more weight. The sum over tokens is divided by a constant, the number of completions of the batch times
`max_new_tokens`, which changes only the scale. Kept: all of section 3.2. Left out: nothing; the paper has no KL term.

Compared with `grpo.py`, two of five slots differ: the advantage (`group_centered`) and the aggregation (`per_budget`).
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
from foresight.ops.advantage import group_centered
from foresight.ops.aggregate import per_budget
from foresight.ops.diagnostics import rollout_sums
from foresight.ops.policy import clipped_surrogate, importance_weight, ratio
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
    """Hyperparameters of Dr. GRPO. Defaults are for a small model on a short task; the paper's are in parentheses."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder, or a hub id."""
    steps: int = 60
    """Total updates."""
    seed: int = 0
    """Seeds prompts and sampling."""
    prompts: int = 8
    """Prompts per update (paper: 128)."""
    group: int = 8
    """Completions per prompt, G (paper: 8)."""
    prompt_sampling: str = "uniform"
    """"uniform", by "learnability" (questions answered rightly half of the time are the likeliest), or "hardest" (of 16
    times as many, those whose greedy answer has the lowest reward)."""
    max_new_tokens: int = 16
    """Maximum tokens per completion (paper: 3000)."""
    mask_truncated: bool = False
    """Whether truncated completions are left out of the loss; they stay in their group's baseline."""
    temperature: float = 1.0
    """Temperature of sampling and of the trained policy."""
    learning_rate: float = 1e-5
    """AdamW (paper: 1e-6 for 7B parameters)."""
    epochs: int = 1
    """Passes over each rollout (paper: 1)."""
    minibatches: int = 1
    """Gradient steps per epoch, each on a subset of the groups. π_old is the policy before the first."""
    clip_ratio: float = 0.2
    """ε of the clipped ratio."""
    correction: Correction = Correction()
    """How tokens of another sampler are weighted (`training.options`)."""
    tuning: Tuning = Tuning()
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes while Dr. GRPO runs."""

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
    terms = clipped_surrogate(rho, advantage[..., None].expand_as(rho), config.clip_ratio)
    terms = terms * importance_weight(
        before, batch.logprob, correction.importance_correction, correction.importance_cap
    )
    sums = rollout_sums(rho, logprob, batch.logprob, entropy, batch.mask, config.clip_ratio)
    return (weights * terms).sum(), logprob, sums


def update(state: State, batch: TokenBatch, rewards: Tensor) -> dict[str, float]:
    """The gradient steps on one rollout. Rewards `[P, G]`, NaN where unscorable."""
    config = state.config
    advantage = group_centered(rewards)
    scored = batch.scored(rewards, config.mask_truncated)

    def weights(mask: Tensor) -> Tensor:
        return per_budget(mask, mask[..., 0].numel() * config.max_new_tokens)

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
