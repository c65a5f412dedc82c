"""PPO for RLHF: InstructGPT, Ouyang et al. 2022 (arXiv:2203.02155), section 3.5; Ziegler et al. 2019, arXiv:1909.08593.

A token is a step and an answer is an episode; in a conversation the model's own tokens of all turns are its steps. The
reward is the score of a reward model (or any grader) for the whole answer, given at its last token, minus a KL penalty
to a frozen reference at every token:

    r_t = −β (log π_old(o_t) − log π_ref(o_t)) + [t is the last] · score(q, o)
    L(θ) = −1/N Σ_t min(ρ_t A_t, clip(ρ_t, 1-ε, 1+ε) A_t) − c H(π_θ)        A: GAE over the tokens
    L(φ) = 1/N Σ_t ½ max( (V_φ − G_t)², (V_old + clip(V_φ − V_old, ±ε_v) − G_t)² )        G = A + V_old

Four models: actor, critic, reference and, if `reward_model` names one, the reward model. An update has several epochs
over shuffled minibatches of whole answers. Kept: all of it. Left out: the mix with pretraining gradients (PPO-ptx), and
the adaptive β of Ziegler et al.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresight.data.text import TokenBatch
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language import pretrained
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.scorer import Scorer
from foresight.ops import kl, schedules
from foresight.ops.advantage import normalize
from foresight.ops.aggregate import per_token
from foresight.ops.diagnostics import explained_variance, mean, rollout_sums
from foresight.ops.policy import clipped_surrogate, ratio
from foresight.ops.returns import gae
from foresight.ops.value import clipped_loss
from foresight.planning.generation.rollout import TextRollout, answer, check_lengths, complete, sample
from foresight.training import language
from foresight.training.microbatch import check_minibatches, finite, gather, split, step
from foresight.training.options import Tuning

KIND = "text"
UNIT = "updates"
METRICS = ("reward", "grade", "kl", "value_loss", "entropy")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of PPO for RLHF. An update is one rollout and all its gradient steps."""

    model: str = "smollm2"
    """Actor and reference: "smollm2" (packaged), a Hugging Face folder, or a hub id."""
    reward_model: str = ""
    """A folder that `reward_model` exported. Empty: the grader of the task is the reward."""
    critic: str = ""
    """The critic's initial model (paper: the reward model). Empty: the actor's model with a head of zeros."""
    steps: int = 60
    """Total updates."""
    seed: int = 0
    """Seeds prompts, sampling and minibatches."""
    prompts: int = 64
    """Prompts per update (paper: 512)."""
    group: int = 1
    """Completions per prompt (paper: 1)."""
    max_new_tokens: int = 16
    """Maximum tokens per completion."""
    mask_truncated: bool = False
    """Whether truncated completions are left out of both losses."""
    temperature: float = 1.0
    """Temperature of sampling, and of actor and reference in the losses."""
    learning_rate: float = 1e-5
    """AdamW of the actor (paper: 9.65e-6 for 1.3B parameters, warmup 10)."""
    value_learning_rate: float = 2e-5
    """AdamW of the critic (paper: 9e-6)."""
    epochs: int = 1
    """Passes over each rollout (paper: 1)."""
    minibatches: int = 4
    """Gradient steps per pass (paper: 8)."""
    clip_ratio: float = 0.2
    """ε of the clipped ratio (paper: 0.2)."""
    clip_value: float = 0.2
    """ε_v: how far a value may move per update (paper: 0.2)."""
    gamma: float = 1.0
    """Discount between tokens (paper: 1)."""
    gae_lambda: float = 0.95
    """λ of GAE (paper: 0.95)."""
    critic_lambda: float | None = None
    """λ of the critic's targets, if it is another one: 1 is unbiased (VC-PPO, arXiv:2503.01491)."""
    critic_warmup: int = 0
    """First updates that train the critic only (value pretraining of VC-PPO). The actor's `lr_warmup` begins after."""
    normalize_reward: bool = False
    """Whether scores are normalized to mean 0 and standard deviation 1 over the rollout."""
    clip_reward: float | None = None
    """Bound of the absolute score, after normalization."""
    kl_coef: float = 0.02
    """β: weight of the KL penalty, in reward per nat (paper: 0.02)."""
    entropy_coef: float = 0.0
    """c: weight of the entropy bonus (paper: none)."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the score of a truncated completion (TRL: 1)."""
    whiten: bool = True
    """Whether the advantages of a rollout are normalized to mean 0 and standard deviation 1."""
    tuning: Tuning = Tuning(micro_tokens=1024)
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes while PPO runs, the frozen reference, and the reward model."""

    config: Config
    policy: LanguageModel
    critic: Scorer
    reference: LanguageModel
    reward_model: Scorer | None
    optimizer: torch.optim.Optimizer
    critic_optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0


def build(config: Config, spaces: None = None, device: torch.device | str = "cpu") -> State:
    """Load the four models and make the optimizers."""
    check_minibatches(config)
    policy, optimizer, generator = language.build(config, device)
    critic = language.scorer(config, device, config.critic or config.model, std=0.0)
    reward_model = None
    if config.reward_model:
        reward_model = pretrained.load_scorer(config.reward_model, device, config.tuning.precision, trained=True)
        reward_model.requires_grad_(False)
        if reward_model.of_steps:
            raise UserError(
                f"{config.reward_model} was trained on steps, and rlhf_ppo scores whole answers: give the export of a "
                "run of reward_model on pairs (columns chosen and rejected)."
            )
    for scorer, name in ((critic, config.critic), (reward_model, config.reward_model)):
        if scorer is not None and scorer.trunk.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
            raise UserError(f"{name} and {config.model} have different tokenizers: both need the same one.")
    critic_optimizer = language.adamw(critic, config.value_learning_rate, config.tuning)
    return State(config, policy, critic, language.frozen(policy), reward_model, optimizer, critic_optimizer, generator)


act = answer


def assess(state: State, held_out: Sequence[Example]) -> tuple[str, list[float]]:
    """The reward model's scores of greedy answers: the evaluation of a task without a grader."""
    config, values = state.config, list[float]()
    if state.reward_model is None:
        raise UserError(
            "rlhf_ppo has no reward: give --reward-model FOLDER, a reward function (--env-options "
            "reward=rewards.py:score), or another --task."
        )
    for i in range(0, len(held_out), config.prompts):
        batch = complete(state.policy, held_out[i : i + config.prompts], 1, config.max_new_tokens, 0.0)
        values += state.reward_model.scores(batch).flatten().tolist()
    return "score of the reward model", values


@dataclass(frozen=True)
class Targets:
    """The targets of a rollout, all `[P, G, T]` and without gradient; `mask` is true on tokens in the loss."""

    old: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor
    mask: Tensor


def prepare(state: State, batch: TokenBatch, rewards: Tensor) -> tuple[Targets, dict[str, float]]:
    """Compute rewards (score and KL penalty), GAE targets, and the KL of the actor to the reference."""
    config = state.config

    def logprob_of(model: LanguageModel) -> Tensor:
        return gather(lambda few: model.logprob(few, config.temperature)[0], batch, config.tuning.micro_tokens)

    old, reference = logprob_of(state.policy), logprob_of(state.reference)
    value = gather(state.critic.values, batch, config.tuning.micro_tokens)
    distance = kl.k1(old, reference) * batch.mask
    mask = batch.scored(rewards, config.mask_truncated)
    score = shaped(rewards, config.normalize_reward, config.clip_reward) - config.missing_eos_penalty * ~batch.stopped
    steps, last = batch.steps(), (batch.mask.sum(-1, keepdim=True) - 1).clamp(min=0)  # side by side, over all turns
    reward = (-config.kl_coef * distance).gather(-1, steps).scatter_add(-1, last, score[..., None])
    position, states = torch.arange(mask.shape[-1]), value.gather(-1, steps)
    discount, cut = config.gamma * (position < last).float(), (position >= last).float()
    next_value = torch.nn.functional.pad(states[..., 1:], (0, 1))
    r, d, c, v, n, m = (x.flatten(0, 1) for x in (reward, discount, cut, states, next_value, mask.gather(-1, steps)))
    advantage, target = gae(r, d, c, v, n, config.gae_lambda, m)
    if config.critic_lambda is not None:
        target = gae(r, d, c, v, n, config.critic_lambda, m)[1]
    if config.whiten:
        advantage = normalize(advantage, m)

    def back(x: Tensor) -> Tensor:
        return torch.zeros_like(old).scatter(-1, steps, x.view(mask.shape))

    targets = Targets(old, value, back(advantage), back(target), mask)
    return targets, {
        "kl": distance.sum().item() / batch.mask.sum().item(),
        "kl_sequence": distance.sum().item() / batch.length.numel(),
        "left_out_groups": (~mask.any((1, 2))).float().mean().item(),
        "unscorable": rewards.isnan().float().mean().item(),
        **({"explained_variance": explained_variance(value[mask], targets.target[mask]).item()} if mask.any() else {}),
    }


def shaped(rewards: Tensor, normalized: bool, bound: float | None) -> Tensor:
    """Scores `[P, G]`, 0 where unscorable: normalized over the scored ones, then clipped to ±`bound`, if wanted."""
    scored = ~rewards.isnan()
    score = rewards.nan_to_num()
    if normalized:
        score = normalize(score, scored)
    return score if bound is None else score.clamp(-bound, bound)


def policy_loss(state: State, batch: TokenBatch, targets: Targets, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The actor's loss on a micro-batch, all `[P, G, T]`, and sums over its tokens for the metrics."""
    config = state.config
    logprob, entropy = state.policy.logprob(batch, config.temperature)
    rho = ratio(logprob, targets.old)
    terms = clipped_surrogate(rho, targets.advantage, config.clip_ratio) - config.entropy_coef * entropy
    sums = rollout_sums(rho, logprob, batch.logprob, entropy, batch.mask, config.clip_ratio)
    sums["approx_kl"] = kl.k3(targets.old, logprob.detach()).sum()  # both are 0 off the mask
    return (weights * terms).sum(), sums


def value_loss(state: State, batch: TokenBatch, targets: Targets, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss on a micro-batch, all `[P, G, T]`."""
    value = state.critic.values(batch)
    terms = clipped_loss(value, targets.value, targets.target, state.config.clip_value)
    return (weights * terms).sum(), {}


def update(state: State, batch: TokenBatch, rewards: Tensor) -> dict[str, float]:
    """The gradient steps on one rollout. Rewards `[P, G]`, NaN where unscorable."""
    config, device = state.config, state.policy.device
    targets, metrics = prepare(state, batch, rewards)
    annealed = schedules.warmup_linear(1.0, state.step, config.steps, anneal=config.tuning.anneal_lr)
    scale, actor_scale = (
        annealed * schedules.warmup(state.step - begun, config.tuning.lr_warmup) for begun in (0, config.critic_warmup)
    )
    passes: list[dict[str, float]] = []
    for _ in range(config.epochs):
        order = torch.randperm(len(batch.length), generator=state.generator)
        for groups in order.tensor_split(config.minibatches):
            mask = targets.mask[groups]
            if not mask.any():
                continue  # with a gradient of 0 the optimizer's momentum would still move the weights
            weights = torch.zeros(targets.mask.shape)
            weights[groups] = per_token(mask)  # of the minibatch, before it is split
            parts = split(batch, groups, config.tuning.micro_tokens)
            micro_batches = [_part(batch, targets, weights, part, device) for part in parts]
            with state.policy.precision():
                actor = dict[str, float]()
                if state.step >= config.critic_warmup:
                    actor = step(
                        state.optimizer,
                        (functools.partial(policy_loss, state, *one) for one in micro_batches),
                        config.learning_rate * actor_scale,
                        config.tuning.max_grad_norm,
                        int(batch.mask[groups].sum()),
                    )
                    if not finite(actor):
                        return metrics | actor
                critic = step(
                    state.critic_optimizer,
                    (functools.partial(value_loss, state, *one) for one in micro_batches),
                    config.value_learning_rate * scale,
                    config.tuning.max_grad_norm,
                )
            passes.append({**actor, "value_loss": critic["loss"], "critic_grad_norm": critic["grad_norm"]})
            if not finite(critic):
                return metrics | passes[-1]
    return metrics | mean(passes)


def _part(
    batch: TokenBatch, targets: Targets, weights: Tensor, part: Tensor, device: torch.device
) -> tuple[TokenBatch, Targets, Tensor]:
    few = batch.select(part)
    width = few.completion.shape[-1]
    chosen = {name: value[part][..., :width].to(device) for name, value in vars(targets).items()}
    return few, Targets(**chosen), weights[part][..., :width].to(device)


def score(state: State, rollout: TextRollout) -> Tensor:
    """The reward `[P, G]` of a rollout: from the reward model on its tokens, or from the grader."""
    if state.reward_model is None:
        return rollout.rewards
    steps = gather(state.reward_model.steps, rollout.batch, state.config.tuning.micro_tokens)
    return steps.gather(-1, rollout.batch.last()[..., None])[..., 0]


export = language.export


def train(
    config: Config, env: TextTask, state: State | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, dict[str, Any], State]]:
    """Sample, score, update; yields after every rollout. With a reward model, `grade` is the score of the grader."""
    state = build(config, env.spaces, device) if state is None else state
    graded = env.grader is not None
    env = env if graded or state.reward_model is None else env.ungraded()
    for scorer, name in ((state.critic, "critic"), (state.reward_model, "reward model")):
        if scorer is not None:
            check_lengths(scorer.trunk, env, config, name)
    while state.step < config.steps:
        rollout = sample(state, env)
        rewards, metrics = score(state, rollout), rollout.metrics()
        if state.reward_model is not None:
            metrics |= {"grade": metrics["reward"]} if graded else {}
            metrics["reward"] = rewards.mean().item()
        metrics |= update(state, rollout.batch, rewards)
        state.step += 1
        yield state.step, metrics, state
