"""GRPO: DeepSeekMath, Shao et al. 2024 (arXiv:2402.03300), section 4.1.

For each prompt q sample a group of G completions o_1..o_G from the policy, grade them, and maximize (eq. 3)

    J(θ) = E[ 1/G Σ_i 1/|o_i| Σ_t  min(ρ_it A_i, clip(ρ_it, 1-ε, 1+ε) A_i) − β k3(π_θ, π_ref) ]
    ρ_it = π_θ(o_it | q, o_i<t) / π_old(o_it | q, o_i<t)        A_i = (r_i − mean(r)) / std(r)

There is no critic: the mean reward of the group is the baseline. Kept: outcome supervision, the clipped token-level
ratio, the k3 penalty with a frozen reference (off by default, as is usual now; as a loss its gradient is that of
KL(π_ref ‖ π), while that of k2 is the gradient of KL(π ‖ π_ref)). Left out: process supervision, and the outer loop
that retrains the reward model. Added: other scales of the rewards, an upper clip of its own, an entropy bonus, and a
penalty in the reward.

Three optimizations do not change the result: tokens shared by completions are computed once (`nets.language.model`),
groups of equal rewards have no gradient and are skipped, and the forward pass of the first gradient step gives π_old.
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
from foresight.errors import UserError, unknown
from foresight.nets.language.model import LanguageModel
from foresight.ops import kl
from foresight.ops.advantage import SCALES, scaled
from foresight.ops.aggregate import per_sequence
from foresight.ops.diagnostics import rollout_sums
from foresight.ops.policy import clipped_surrogate, importance_weight, ratio
from foresight.planning.generation.rollout import answer, check_group, sample
from foresight.training import language
from foresight.training.microbatch import check_correction, check_minibatches, learn, penalized
from foresight.training.options import Correction, Tuning

KIND = "text"
UNIT = "updates"
METRICS = ("reward", "length", "entropy", "equal_reward_groups")
STALE = True  # the ratio is that to the policy that sampled: `--staleness` may be given


@dataclass(frozen=True)
class Config:
    """Hyperparameters of GRPO. Defaults are for a small model on a short task; the paper's are in parentheses."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder, or a hub id."""
    steps: int = 60
    """Total updates."""
    seed: int = 0
    """Seeds prompts and sampling."""
    prompts: int = 8
    """Prompts per update (paper: 16)."""
    group: int = 8
    """Completions per prompt, G (paper: 64)."""
    prompt_sampling: str = "uniform"
    """"uniform", by "learnability" (questions answered rightly half of the time are the likeliest), or "hardest" (of 16
    times as many, those whose greedy answer has the lowest reward)."""
    max_new_tokens: int = 16
    """Maximum tokens per completion (paper: 1024)."""
    mask_truncated: bool = False
    """Whether truncated completions are left out of the loss; they stay in their group's baseline."""
    temperature: float = 1.0
    """Temperature of sampling and of the trained policy."""
    learning_rate: float = 1e-5
    """AdamW (paper: 1e-6 for 7B parameters)."""
    epochs: int = 1
    """Passes over each rollout, μ (paper: 1)."""
    minibatches: int = 1
    """Gradient steps per epoch (paper: 1), each on a subset of the groups. π_old is the policy before the first."""
    clip_ratio: float = 0.2
    """ε of the clipped ratio."""
    clip_high: float | None = None
    """ε above 1, if it is another one than below (DAPO: 0.28)."""
    clip_most: float | None = None
    """δ ≥ 1 + ε, the most that a ratio weighs where the advantage is negative (INTELLECT-2: 4); None: no limit."""
    scale: str = "group"
    """Rewards are divided by the standard deviation of the "group", of the "batch" (REINFORCE++), by the "mean" of the
    group (MaxRL, for rewards of at least 0), or by "none"."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus (paper: none)."""
    kl_coef: float = 0.0
    """β of the KL penalty (paper: 0.04). Above 0, a frozen copy of the initial policy is kept."""
    kl_estimator: str = "k3"
    """The function of `ops.kl`: k3 (paper) or k2 in the loss, or k1 in the reward. With k1 take scale "batch" or
    "none": a group of equal rewards has no other deviation than that of the penalty, and dividing by it cancels β."""
    correction: Correction = Correction()
    """How tokens of another sampler are weighted (`training.options`)."""
    tuning: Tuning = Tuning()
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes while GRPO runs."""

    config: Config
    policy: LanguageModel
    reference: LanguageModel | None
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0
    counts: Counts | None = None  # right and wrong completions of each training example, for `learnability`


def build(config: Config, spaces: None = None, device: torch.device | str = "cpu") -> State:
    """Load the policy, freeze a reference if there is a penalty, and make the optimizer."""
    check_group(config.group)
    check_sampling(config.prompt_sampling)
    check_minibatches(config)
    check_correction(config.correction)
    choices(config)
    policy, optimizer, generator = language.build(config, device)
    reference = language.frozen(policy) if config.kl_coef > 0 else None
    return State(config, policy, reference, optimizer, generator)


def choices(config: Config) -> None:
    """Raise UserError for an unknown scale or estimator, and for a `clip_most` inside the clip range."""
    upper = 1 + (config.clip_ratio if config.clip_high is None else config.clip_high)
    if config.clip_most is not None and config.clip_most < upper:
        raise UserError(
            f"clip_most is {config.clip_most:g}, but ratios are clipped above {upper:g} anyway. Set --clip-most to at "
            f"least {upper:g} (INTELLECT-2: 4)."
        )
    if config.scale not in SCALES:
        raise unknown("scale", config.scale, SCALES)
    if config.kl_estimator not in kl.ESTIMATORS:
        raise unknown("kl_estimator", config.kl_estimator, kl.ESTIMATORS)
    if config.kl_coef > 0 and config.kl_estimator == "k1" and config.scale == "mean":
        raise UserError(
            "--kl-estimator k1 makes rewards negative, and --scale mean needs rewards of at least 0: set "
            "--kl-estimator k2 or k3, or --scale none."
        )


act = answer


def loss(
    state: State, batch: TokenBatch, advantage: Tensor, weights: Tensor, old: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Equation 3 over a micro-batch: advantage `[P, G]`, weights and old `[P, G, T]` (old None: on-policy).

    Returns the loss, the log-probabilities `[P, G, T]` and sums over its tokens for the metrics.
    """
    config, correction = state.config, state.config.correction
    logprob, entropy = state.policy.logprob(batch, config.temperature)
    before = logprob if old is None else old
    rho = ratio(logprob, before)
    advantage = advantage[..., None].expand_as(rho)
    terms = clipped_surrogate(rho, advantage, config.clip_ratio, config.clip_high, config.clip_most)
    terms = terms * importance_weight(
        before, batch.logprob, correction.importance_correction, correction.importance_cap
    )
    sums = rollout_sums(rho, logprob, batch.logprob, entropy, batch.mask, config.clip_ratio, config.clip_high)
    if config.entropy_coef:
        terms = terms - config.entropy_coef * entropy
    if state.reference is not None and config.kl_estimator != "k1":
        with torch.no_grad():
            reference = state.reference.logprob(batch, config.temperature)[0]
        penalty = kl.penalty(logprob, reference, config.kl_estimator)
        terms = terms + config.kl_coef * penalty
        sums["kl"] = (penalty.detach() * batch.mask.to(penalty.device)).sum()
    return (weights * terms).sum(), logprob, sums


def update(state: State, batch: TokenBatch, rewards: Tensor) -> dict[str, float]:
    """The gradient steps on one rollout. Rewards `[P, G]`, NaN where unscorable."""
    config, in_reward = state.config, state.config.kl_estimator == "k1"
    metrics: dict[str, float] = {}
    of_task = rewards
    if state.reference is not None and in_reward:
        rewards, distance = penalized(
            rewards, state.reference, batch, config.kl_coef, config.temperature, config.tuning.micro_tokens
        )
        metrics["kl"] = distance.sum().item() / batch.mask.sum().item()
    advantage = scaled(rewards, config.scale)
    scored = batch.scored(rewards, config.mask_truncated)
    weights = per_sequence
    in_loss = state.reference is not None and not in_reward
    flat_too = in_loss or config.entropy_coef != 0  # they have a gradient where rewards are equal
    return metrics | learn(
        state, loss, batch, of_task, advantage, scored, weights, config.epochs, config.minibatches, flat_too
    )


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
