"""RLOO: "Back to Basics", Ahmadian et al. 2024 (arXiv:2402.14740), section 3; Kool et al. 2019.

REINFORCE over whole answers; the baseline of each answer is the mean reward of the *other* answers to its prompt:

    ∇J(θ) = E[ 1/G Σ_i A_i ∇ log π_θ(o_i | q) ]        A_i = R_i − 1/(G−1) Σ_{j≠i} R_j
    R_i = r_i − β Σ_t (log π_old(o_it) − log π_ref(o_it))

The baseline does not depend on the answer it is subtracted from, so the gradient is unbiased. An answer is one action:
its log-probability is the sum over its tokens, and nothing is clipped. The KL is in the reward (as k1, which is
unbiased there) and off by default. Its π_old is what sampled the answer: π_θ itself, as one rollout has one step. Where
a server or another precision samples, the penalty is that of the sampler, near KL(π_θ ‖ π_ref) but not unbiased for it,
also with an importance correction. Kept: all of it.

Compared with `grpo.py`: no ratio and no clip (`reinforce`), the advantage is `leave_one_out`, tokens are summed
(`per_budget`), and the KL is in the reward.
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
from foresight.ops.advantage import leave_one_out
from foresight.ops.aggregate import per_budget
from foresight.ops.diagnostics import rollout_sums
from foresight.ops.policy import importance_weight, ratio, reinforce
from foresight.planning.generation.rollout import answer, check_group, sample
from foresight.training import language
from foresight.training.microbatch import check_correction, learn, penalized
from foresight.training.options import Correction, Tuning

KIND = "text"
UNIT = "updates"
METRICS = ("reward", "length", "entropy", "equal_reward_groups")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of RLOO. Defaults are for a small model on a short task; the paper's are in parentheses."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder, or a hub id."""
    steps: int = 60
    """Total updates."""
    seed: int = 0
    """Seeds prompts and sampling."""
    prompts: int = 8
    """Prompts per update."""
    group: int = 8
    """Completions per prompt, G (paper: 2 or 4)."""
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
    """AdamW (paper: 1e-6)."""
    kl_coef: float = 0.0
    """β of the KL in the reward. Above 0, a frozen copy of the initial policy is kept."""
    correction: Correction = Correction()
    """How tokens of another sampler are weighted (`training.options`)."""
    tuning: Tuning = Tuning()
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes while RLOO runs."""

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
    check_correction(config.correction)
    policy, optimizer, generator = language.build(config, device)
    reference = language.frozen(policy) if config.kl_coef > 0 else None
    return State(config, policy, reference, optimizer, generator)


act = answer


def loss(
    state: State, batch: TokenBatch, advantage: Tensor, weights: Tensor, old: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The objective over a micro-batch: advantage `[P, G]`, weights and old `[P, G, T]` (old None: on-policy).

    Returns the loss, the log-probabilities `[P, G, T]` and sums over its tokens for the metrics.
    """
    config, correction = state.config, state.config.correction
    logprob, entropy = state.policy.logprob(batch, config.temperature)
    terms = reinforce(logprob, advantage[..., None].expand_as(logprob))
    weight = importance_weight(logprob, batch.logprob, correction.importance_correction, correction.importance_cap)
    rho = ratio(logprob.detach(), batch.logprob.to(logprob))
    sums = rollout_sums(rho, logprob, batch.logprob, entropy, batch.mask, 0.2)
    return (weights * weight * terms).sum(), logprob, sums


def update(state: State, batch: TokenBatch, rewards: Tensor) -> dict[str, float]:
    """The gradient steps on one rollout. Rewards `[P, G]`, NaN where unscorable."""
    config = state.config
    metrics: dict[str, float] = {}
    of_task = rewards
    if state.reference is not None:
        rewards, distance = penalized(
            rewards, state.reference, batch, config.kl_coef, config.temperature, config.tuning.micro_tokens
        )
        metrics["kl"] = distance.sum().item() / batch.mask.sum().item()
    advantage = leave_one_out(rewards)
    scored = batch.scored(rewards, config.mask_truncated)

    def weights(mask: Tensor) -> Tensor:  # a sum over tokens, a mean over completions
        return per_budget(mask, max(1, int(mask.any(-1).sum())))

    return metrics | learn(state, loss, batch, of_task, advantage, scored, weights)


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
