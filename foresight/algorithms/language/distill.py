"""Distillation: Hinton et al. 2015 (arXiv:1503.02531); GKD, Agarwal et al. 2023 (arXiv:2306.13649).

A student π_θ is trained to match a teacher π_T. The variants differ in which model samples the answers, and in whether
the divergence is sampled or full:

    on-policy              −E_{o~π_θ} Σ_t A_t log π_θ(o_t),  A_t = −(log π_θ(o_t) − log π_T(o_t))    sampled reverse KL
    on-policy, soft        E_{o~π_θ} Σ_t KL( π_θ(·|o_<t) ‖ π_T(·|o_<t) )                              full reverse KL
    off-policy, soft       E_{o~π_T} Σ_t KL( π_T(·|o_<t) ‖ π_θ(·|o_<t) )                              soft targets
    off-policy             −E_{o~π_T} Σ_t log π_θ(o_t)                                                 hard labels

On-policy, the student is corrected on its own states; the teacher's log-probability is a reward for every token, with
discount 0: each token has only its own reward. Off-policy without soft targets is sequence-level distillation (Kim &
Rush 2016, arXiv:1606.07947). Kept: these four. Left out: mixtures of them, and the skewed divergences of GKD.
"""

from __future__ import annotations

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
from foresight.ops import kl
from foresight.ops.aggregate import per_token
from foresight.ops.policy import reinforce
from foresight.planning.generation.rollout import answer, check_lengths, complete, sample_groups
from foresight.training import language
from foresight.training.microbatch import descend, gather
from foresight.training.options import Tuning

KIND = "text"
UNIT = "updates"
METRICS = ("reward", "teacher_kl", "entropy", "length")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of distillation."""

    model: str = "smollm2"
    """The student: "smollm2" (packaged), a Hugging Face folder, or a hub id."""
    teacher: str = ""
    """The teacher, with the student's tokenizer: a folder (such as RUN/export) or a hub id."""
    on_policy: bool = True
    """Whether the student samples the answers; otherwise the teacher does."""
    soft: bool = False
    """Whether the divergence is over the whole vocabulary; otherwise it is estimated from the sampled token."""
    steps: int = 60
    """Total updates."""
    seed: int = 0
    """Seeds prompts and sampling."""
    prompts: int = 16
    """Prompts per update."""
    group: int = 2
    """Completions per prompt."""
    max_new_tokens: int = 16
    """Maximum tokens per completion."""
    temperature: float = 1.0
    """Temperature of sampling, and of both models in the divergence."""
    learning_rate: float = 1e-5
    """AdamW."""
    tuning: Tuning = Tuning()
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes during distillation, and the teacher, which does not."""

    config: Config
    policy: LanguageModel
    teacher: LanguageModel
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0


def build(config: Config, spaces: None = None, device: torch.device | str = "cpu") -> State:
    """Load student and teacher and make the optimizer. The student ends an answer also where the teacher does.

    Raises UserError if they have different vocabularies, or off-policy if they write prompts differently.
    """
    if not config.teacher:
        raise UserError("distill needs a teacher: --teacher FOLDER, such as the export/ of a run of grpo.")
    policy, optimizer, generator = language.build(config, device)
    teacher = pretrained.load(config.teacher, device, config.tuning.precision).requires_grad_(False)
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UserError(
            f"The teacher {config.teacher} and {config.model} have different tokenizers: both need the same one."
        )
    asked = "question"
    same = teacher.tokenizer.chat_template == policy.tokenizer.chat_template
    if not config.on_policy and not (same and teacher.encode(asked) == policy.encode(asked)):
        raise UserError(
            f"The teacher {config.teacher} and {config.model} write prompts differently (another chat template, or a "
            "token at the beginning), and without on_policy the student would be trained on prompts as the teacher's: "
            "choose a teacher with the same ones, or on_policy."
        )
    if others := set(teacher.stop_ids) - set(policy.stop_ids):  # a chat model often ends otherwise than its base
        policy.stop_ids = sorted(others.union(policy.stop_ids))
        policy.module.generation_config.eos_token_id = list(policy.stop_ids)
    return State(config, policy, teacher, optimizer, generator)


def check_context(state: State, task: TextTask) -> None:
    """Raise UserError if one of the two models cannot read what the other one may write."""
    check_lengths(state.teacher, task, state.config, "teacher")
    writer, reader = state.policy.context, state.teacher.context
    if not state.config.on_policy:
        writer, reader = reader, writer
    if task.episode is not None and reader < writer:
        raise UserError(
            f"A conversation of '{task.name}' may have {writer} tokens, and the "
            f"{'teacher' if state.config.on_policy else 'student'} has a context of {reader}: choose a model with a "
            "context that is as long."
        )


act = answer


def assess(state: State, held_out: Sequence[Example]) -> tuple[str, list[float]]:
    """log π_θ − log π_T per token, in nats, over the student's answers: the evaluation without a grader.

    At temperature 1, whatever that of training is: a higher one would bring the two closer by itself.
    """
    config, values = state.config, list[float]()
    generator = torch.Generator(state.generator.device).manual_seed(config.seed)
    for i in range(0, len(held_out), config.prompts):
        few = held_out[i : i + config.prompts]
        batch = complete(state.policy, few, 1, config.max_new_tokens, 1.0, generator)
        values += (_distance(state, state.teacher, batch, 1.0).sum(-1) / batch.length.clamp(min=1)).flatten().tolist()
    return "reverse KL per token", values


def _distance(state: State, model: LanguageModel, batch: TokenBatch, temperature: float) -> Tensor:
    """k1 between the model that sampled each token and `model`, `[P, G, T]`; 0 on padding."""
    logprob = gather(lambda few: model.logprob(few, temperature)[0], batch, state.config.tuning.micro_tokens)
    return kl.k1(batch.logprob, logprob) * batch.mask


def sampled_loss(
    state: State, batch: TokenBatch, advantage: Tensor, weights: Tensor, old: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss on sampled tokens. Advantage `[P, G, T]`: log π_T − log π_θ if the student sampled them, else 1."""
    logprob, entropy = state.policy.logprob(batch, state.config.temperature)
    terms = reinforce(logprob, advantage)
    return (weights * terms).sum(), logprob, {"entropy": entropy.detach().sum()}


def soft_loss(
    state: State, batch: TokenBatch, advantage: Tensor, weights: Tensor, old: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss over the whole vocabulary: KL(π_θ ‖ π_T) on the student's answers, KL(π_T ‖ π_θ) on the teacher's."""
    config, mask = state.config, batch.mask.to(advantage.device)

    def logits_of(model: LanguageModel) -> Tensor:
        with model.precision():
            logits = model.logits(model.contexts(batch))
        return logits.float() / config.temperature

    with torch.no_grad():
        teacher = logits_of(state.teacher)
    student = logits_of(state.policy)
    size = min(student.shape[-1], teacher.shape[-1])  # the models may pad the same vocabulary differently
    student, teacher = student[..., :size], teacher[..., :size]
    terms = kl.categorical(student, teacher) if config.on_policy else kl.categorical(teacher, student)
    sums = {"divergence": terms.detach().sum(), "entropy": torch.special.entr(student.detach().softmax(-1)).sum()}
    return (weights[mask] * terms).sum(), advantage, sums


def update(state: State, batch: TokenBatch) -> dict[str, float]:
    """One gradient step on answers of the student, or of the teacher if off-policy."""
    config = state.config
    distance = _distance(state, state.teacher if config.on_policy else state.policy, batch, config.temperature)
    advantage = -distance if config.on_policy else batch.mask.float()
    name = "teacher_kl" if config.on_policy else "student_kl"
    metrics = {name: distance.sum().item() / batch.mask.sum().item()}
    return metrics | descend(state, soft_loss if config.soft else sampled_loss, batch, advantage, batch.mask, per_token)


export = language.export


def train(
    config: Config, env: TextTask, state: State | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, dict[str, Any], State]]:
    """Sample answers from the student (or the teacher), and train the student on them; yields after every update.

    The task needs only prompts: its grades are reported, not trained on.
    """
    state = build(config, env.spaces, device) if state is None else state
    check_context(state, env)
    writer = state.policy if config.on_policy else state.teacher
    graded = env.grader is not None
    env = env if graded else env.ungraded()
    while state.step < config.steps:
        sizes, progress = (config.prompts, config.group, config.max_new_tokens), state.step / config.steps
        rollout = sample_groups(writer, env, *sizes, config.temperature, state.generator, progress)
        metrics = {**rollout.metrics(), **update(state, rollout.batch)}
        state.step += 1
        yield state.step, metrics if graded else {k: v for k, v in metrics.items() if k != "reward"}, state
