"""KTO: Kahneman-Tversky Optimization, Ethayarajh et al. 2024 (arXiv:2402.01306), section 4.1, equation 8.

    L(θ) = E[ λ_y − v(x, y) ]      r(x, y) = log π_θ(y|x)/π_ref(y|x)
    v(x, y) = λ_D σ(β (r − z)) for a desirable answer, λ_U σ(β (z − r)) for an undesirable one
    z = max(0, 1/m Σ_i log π_θ(y_i+1|x_i)/π_ref(y_i+1|x_i))      without gradient

No pairs are needed: each answer is only labeled good or bad. Gains and losses are relative to a reference point z, an
estimate of KL(π_θ ‖ π_ref) from each prompt of a batch paired with the answer to the next prompt.

Kept: all of it, with z over the whole batch, even if the batch is split to save memory. Pairs (chosen, rejected) are
read as two answers each. Left out: other value functions. Dropout is never active.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresight.data import forms
from foresight.data.text import TokenBatch
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.ops import preference
from foresight.planning.generation.rollout import answer
from foresight.training import language
from foresight.training.corpus import Corpus, corpus, examples, last_answer, of_form
from foresight.training.microbatch import fit, gather
from foresight.training.options import Tuning

KIND = "text"
UNIT = "updates"
METRICS = ("loss", "accuracy", "desirable_reward", "undesirable_reward")
FORMS = ("labeled", "preference")  # forms of data


@dataclass(frozen=True)
class Config:
    """Hyperparameters of KTO."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder, or a hub id. It is also the reference."""
    data: str = ""
    """Labeled answers (prompt, completion, label) or preferences: JSONL, Parquet, a dataset. Empty: the task's rows."""
    steps: int = 100
    """Total updates."""
    seed: int = 0
    """Seeds the order of the training rows."""
    batch_size: int = 16
    """Answers per update. The reference point is a mean over them."""
    max_tokens: int = 1024
    """Rows with more tokens, prompt and completion together, are left out (and counted)."""
    beta: float = 0.1
    """β: how fast the value of a gain or a loss saturates (TRL: 0.1)."""
    desirable_weight: float = 1.0
    """λ_D: weight of desirable answers. λ_D n_D is 1 to 3/2 of λ_U n_U, n the number of rows (eq. 9; TRL: 1 to 4/3)."""
    undesirable_weight: float = 1.0
    """λ_U: weight of undesirable answers."""
    learning_rate: float = 1e-6
    """AdamW (TRL: no higher than this at β = 0.1)."""
    max_new_tokens: int = 64
    """Maximum tokens per completion, in evaluation."""
    tuning: Tuning = Tuning(anneal_lr=True)
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes during KTO, and the reference, which does not."""

    config: Config
    policy: LanguageModel
    reference: LanguageModel
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0


def build(config: Config, spaces: None = None, device: torch.device | str = "cpu") -> State:
    """Load the policy, freeze a copy of it, and make the optimizer."""
    for name in ("beta", "desirable_weight", "undesirable_weight"):
        if not getattr(config, name) > 0:
            raise UserError(f"{name} is {getattr(config, name):g}: it must be more than 0.")
    if config.batch_size < 2:
        raise UserError(
            f"batch_size must be at least 2, not {config.batch_size}: each prompt is also paired with the answer to "
            "another one."
        )
    policy, optimizer, generator = language.build(config, device)
    return State(config, policy, language.frozen(policy), optimizer, generator)


act = answer


def log_ratio(state: State, batch: TokenBatch) -> Tensor:
    """r: log π_θ/π_ref of each answer of a batch `[P, 1, T]`, `[P]`."""
    with torch.no_grad():
        reference = state.reference.logprob(batch)[0].sum(-1)
    return (state.policy.logprob(batch)[0].sum(-1) - reference)[:, 0]


def mismatched(state: State, batch: TokenBatch) -> Tensor:
    """r of each prompt of a batch with the answer to the next prompt, cut where it has no room, `[P]`. No gradient."""
    rolled = {name: getattr(batch, name).roll(-1, 0) for name in ("completion", "length", "logprob", "stopped")}
    room = min(state.config.max_tokens, state.policy.context) - batch.prompt_length
    rolled["length"] = torch.minimum(rolled["length"], room[:, None])

    def ratios(few: TokenBatch) -> Tensor:
        return state.policy.logprob(few)[0] - state.reference.logprob(few)[0]

    return gather(ratios, dataclasses.replace(batch, **rolled), state.config.tuning.micro_tokens).sum((1, 2))


def loss(
    state: State, batch: TokenBatch, desirable: Tensor, point: Tensor, count: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch `[P, 1, T]` (desirable `[P]` bool), divided by all `count` answers; metric sums."""
    config, ratio = state.config, log_ratio(state, batch)
    good, point = desirable.to(ratio.device), point.to(ratio.device)
    terms = preference.kto(ratio, point, good, config.beta, config.desirable_weight, config.undesirable_weight)
    margin = (ratio - point).detach() * torch.where(good, 1.0, -1.0)
    return terms.sum() / count, {
        "accuracy": (0.5 * (margin >= 0) + 0.5 * (margin > 0)).sum(),  # a tie, as at the start, scores one half
        "desirable_reward": config.beta * ratio.detach()[good].sum(),
        "undesirable_reward": config.beta * ratio.detach()[~good].sum(),
    }


def update(state: State, batch: TokenBatch, rows: Sequence[Example]) -> dict[str, float]:
    """One gradient step on answers `[P, 1, T]`; `rows` are their examples, with the column `label`."""
    desirable = torch.tensor([bool(row.columns["label"]) for row in rows])
    point, count = mismatched(state, batch).mean().clamp(min=0), len(rows)
    metrics = fit(state, state.policy, batch, lambda part, few: loss(state, few, desirable[part], point, count), count)
    for name, some in (("desirable_reward", desirable), ("undesirable_reward", ~desirable)):
        if name in metrics:
            metrics[name] = metrics[name] * count / int(some.sum()) if some.any() else torch.nan
    return {**metrics, "reference_point": point.item()}


def assess(state: State, held_out: Sequence[Example]) -> tuple[str, list[float]]:
    """Whether each held-out answer is on the correct side of the reference point: the evaluation without a grader."""
    rows, ratios, others = _corpus(state, of_form(held_out, FORMS, "kto")), list[Tensor](), [torch.zeros(0)]
    for batch in rows.batches(state.config.batch_size):
        with torch.no_grad():
            ratios.append(log_ratio(state, batch).cpu())
    order = _apart(rows.prompts)
    for i in range(0, len(order), state.config.batch_size):
        some = order[i : i + state.config.batch_size]
        pairs = zip(some, [*some[1:], some[0]], strict=True)
        differ = torch.tensor([rows.prompts[a] != rows.prompts[b] for a, b in pairs])
        others.append(mismatched(state, rows.batch(some))[differ])
    point = torch.cat(others).mean().nan_to_num().clamp(min=0)  # a single prompt has no other's answer
    sign = torch.tensor([1.0 if row.columns["label"] else -1.0 for row in rows.examples])
    margin = sign * (torch.cat(ratios) - point)
    return "label accuracy", (0.5 * (margin >= 0) + 0.5 * (margin > 0)).tolist()


def _apart(prompts: Sequence[list[int]]) -> list[int]:
    """The rows in an order that repeats a prompt only after all others: the two answers of a pair are not neighbors."""
    seen = Counter[tuple[int, ...]]()
    rounds = list[int]()
    for prompt in map(tuple, prompts):
        rounds.append(seen[prompt])
        seen[prompt] += 1
    return sorted(range(len(prompts)), key=rounds.__getitem__)


def labeled(rows: Sequence[Example]) -> list[Example]:
    """The rows as labeled answers: each pair is split into a desirable (chosen) and an undesirable (rejected) one."""
    found: list[Example] = []
    for row in rows:
        if forms.form(row.columns) != "preference":
            found.append(row)
            continue
        for name, label in (("chosen", True), ("rejected", False)):
            columns = {**row.columns, "completion": row.columns[name], "label": label}
            columns |= {"messages": None, forms.REPLY: None}  # they would stand for the completion
            found.append(dataclasses.replace(row, columns=columns))
    return found


def _corpus(state: State, rows: Sequence[Example]) -> Corpus:
    return corpus(state.policy, labeled(rows), lambda row: [last_answer(row)], state.config.max_tokens)


export = language.export


def train(
    config: Config, env: TextTask, state: State | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, dict[str, Any], State]]:
    """Train on labeled answers, epoch after epoch; yields after every update."""
    state = build(config, env.spaces, device) if state is None else state
    rows = _corpus(state, examples(config.data, env, FORMS, "kto"))
    while state.step < config.steps:
        chosen = rows.draw(config.batch_size, state.step, config.seed)
        metrics = update(state, rows.batch(chosen), [rows.examples[i] for i in chosen])
        state.step += 1
        yield state.step, {**metrics, "left_out": float(rows.left_out)}, state
