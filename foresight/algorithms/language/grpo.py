"""GRPO: DeepSeekMath, Shao et al. 2024 (arXiv:2402.03300), section 4.1.

For each prompt q sample a group of G completions o_1..o_G from the policy, grade them, and maximise (eq. 3)

    J(θ) = E[ 1/G Σ_i 1/|o_i| Σ_t  min(ρ_it A_i, clip(ρ_it, 1-ε, 1+ε) A_i) − β k3(π_θ, π_ref) ]
    ρ_it = π_θ(o_it | q, o_i<t) / π_old(o_it | q, o_i<t)        A_i = (r_i − mean(r)) / std(r)

No critic: the group is the baseline. Kept: outcome supervision, the clipped token-level ratio, the k3
penalty with a frozen reference (off by default, as is usual now; as a loss its gradient is that of
KL(π_ref ‖ π), while `ops.kl.k2` has that of KL(π ‖ π_ref)). Left out: process supervision, and the outer
loop that retrains the reward model.

What makes it fast changes no number: tokens that rows share are computed once (`nets.language`), groups of
equal rewards have no gradient and are skipped, and the first pass of an update is its own π_old.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foresight.data.text import TokenBatch
from foresight.envs.text import TextTask
from foresight.errors import UserError
from foresight.nets import pretrained
from foresight.nets.language import LanguageModel
from foresight.nets.microbatch import learn
from foresight.ops import kl, schedules
from foresight.ops.advantage import group_scaled
from foresight.ops.aggregate import per_sequence
from foresight.ops.diagnostics import rollout_sums
from foresight.ops.policy import clipped_surrogate, ratio
from foresight.planning.rollout import answer, roll

WORLD = "text"
UNIT = "updates"
METRICS = ("reward", "length", "entropy", "equal_reward_groups")


@dataclass(frozen=True)
class Config:
    """Numbers of GRPO. Defaults are for a small model on a short task; the paper's are beside them."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder, or a hub id."""
    steps: int = 60
    """Updates in all."""
    seed: int = 0
    """Of prompts and sampling."""
    prompts: int = 8
    """Prompts an update (paper: 16)."""
    group: int = 8
    """Completions a prompt, G (paper: 64)."""
    max_new_tokens: int = 16
    """Tokens a completion may have (paper: 1024)."""
    temperature: float = 1.0
    """Of sampling, and of the policy whose gradient is taken."""
    learning_rate: float = 1e-5
    """Of AdamW (paper: 1e-6 for 7B parameters)."""
    warmup: int = 0
    """Updates over which the learning rate rises."""
    anneal: bool = False
    """Whether the learning rate then falls linearly to 0."""
    epochs: int = 1
    """Gradient steps on each batch, μ (paper: 1)."""
    clip_ratio: float = 0.2
    """ε of the clipped ratio."""
    kl_coef: float = 0.0
    """β of the k3 penalty (paper: 0.04). Above 0, a frozen copy of the first policy is kept."""
    weight_decay: float = 0.0
    """Of AdamW."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm."""
    precision: str = "auto"
    """Of matrix products, over float32 weights: "auto", "float32" or "bfloat16"."""
    micro_tokens: int = 256
    """Distinct completion tokens in memory at once: less is slower and smaller, and changes no gradient."""


@dataclass
class State:
    """Everything that changes while GRPO runs."""

    config: Config
    policy: LanguageModel
    reference: LanguageModel | None
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0


def build(config: Config, spaces: Any = None, device: torch.device | str = "cpu") -> State:
    """Load the policy, freeze a reference if there is a penalty, and make the optimiser."""
    if config.group < 2:
        raise UserError(f"group is {config.group}: GRPO compares the completions of a prompt, so it needs at least 2.")
    policy = pretrained.load(config.model, device, config.precision)
    reference = copy.deepcopy(policy).requires_grad_(False) if config.kl_coef > 0 else None
    # Fused: one pass over memory that makes no temporaries, which is most of what an update costs here.
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    return State(config, policy, reference, optimizer, torch.Generator().manual_seed(config.seed))


def act(state: State, obs: Sequence[Any], carry: None = None, explore: bool = False) -> tuple[list[str], dict, None]:
    """Answer prompts (strings, conversations or Examples) with one completion each."""
    config, generator = state.config, state.generator if explore else None
    return answer(state.policy, obs, config.max_new_tokens, config.temperature if explore else 0.0, generator)


def loss(
    state: State, batch: TokenBatch, advantage: Tensor, weights: Tensor, old: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Equation 3 over part of a batch: advantage `[P, G]`, weights and old `[P, G, T]` (old None: on-policy).

    Returns the loss, the log-probabilities `[P, G, T]` and sums over the part for the metrics.
    """
    config = state.config
    logprob, entropy = state.policy.logprob(batch, config.temperature)
    rho = ratio(logprob, logprob if old is None else old)
    terms = clipped_surrogate(rho, advantage[..., None].expand_as(rho), config.clip_ratio)
    mask = batch.mask.to(rho.device)
    sums = rollout_sums(rho, logprob, batch.logprob, entropy, mask, config.clip_ratio)
    if state.reference is not None:
        with torch.no_grad():
            reference = state.reference.logprob(batch, config.temperature)[0]
        penalty = kl.k3(logprob, reference)
        terms = terms + config.kl_coef * penalty
        sums["kl"] = (penalty.detach() * mask).sum()
    return (weights * terms).sum(), logprob, sums


def update(state: State, batch: TokenBatch, rewards: Tensor) -> dict[str, float]:
    """One rollout's gradient steps. Rewards `[P, G]`, NaN where unscorable."""
    config = state.config
    advantage = group_scaled(rewards)
    scored = batch.mask & ~rewards.isnan()[..., None]
    weights = per_sequence(scored.flatten(0, 1)).view_as(scored)  # of the whole batch, before it is split
    flat = (advantage == 0).all(1)
    learns = torch.ones_like(flat) if state.reference is not None else ~flat
    rate = schedules.planned(config.learning_rate, state.step, config.steps, config.warmup, config.anneal)
    metrics = {"equal_reward_groups": flat.float().mean().item(), "unscorable": rewards.isnan().float().mean().item()}
    return metrics | learn(
        state.policy, state.optimizer, functools.partial(loss, state), batch, advantage, weights, learns,
        rate, config.max_grad_norm, config.micro_tokens, config.epochs,
    )  # fmt: skip


def export(state: State, directory: str | Path) -> Path:
    """Write the policy as a Hugging Face folder that `transformers` loads by itself."""
    return pretrained.save_folder(state.policy.module, state.policy.tokenizer, directory)


def train(
    config: Config, env: TextTask, state: State | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, dict[str, Any], State]]:
    """Sample groups, grade them, update; yields after every update."""
    state = build(config, env.spaces, device) if state is None else state
    while state.step < config.steps:
        rollout = roll(
            state.policy, env, config.prompts, config.group, config.max_new_tokens, config.temperature, state.generator
        )
        metrics = {**rollout.metrics(), **update(state, rollout.batch, rollout.rewards)}
        state.step += 1
        yield state.step, metrics, state
