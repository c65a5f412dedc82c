"""ORPO: Odds Ratio Preference Optimization, Hong et al. 2024 (arXiv:2403.07691), section 4, equations 3 to 7.

    L(θ) = E[ −log P(y_c|x) − λ log σ( log odds(y_c|x)/odds(y_r|x) ) ]
    log P(y|x) = 1/|y| Σ_t log π_θ(y_t | x, y_<t)      odds(y|x) = P(y|x) / (1 − P(y|x))

SFT and preference learning in one loss, without a reference: the first term is that of SFT on the chosen answers, the
second raises their odds relative to the rejected answers, which SFT alone would also make more likely.

Kept: all of it. Both terms use only the tokens of the answers, as means per answer (TRL's first term also includes the
prompt's tokens, and is a mean over all tokens of a batch). The prompt is computed once for both answers.
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
from foresight.nets.language.model import LanguageModel
from foresight.ops import preference
from foresight.planning.generation.rollout import answer
from foresight.training import language
from foresight.training.corpus import Corpus, corpus, examples, of_form
from foresight.training.microbatch import fit
from foresight.training.options import Tuning

KIND = "text"
UNIT = "updates"
METRICS = ("loss", "accuracy", "chosen_logprob", "rejected_logprob")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of ORPO."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder, or a hub id. It need not be fine-tuned first."""
    data: str = ""
    """Preferences (JSONL, Parquet, a dataset): prompt, chosen, rejected. Empty: the rows of the task."""
    steps: int = 100
    """Total updates."""
    seed: int = 0
    """Seeds the order of the training rows."""
    batch_size: int = 16
    """Pairs per update."""
    max_tokens: int = 1024
    """Pairs in which a prompt and its answer have more tokens are left out (and counted)."""
    odds_ratio_coef: float = 0.1
    """λ: weight of the odds ratio term (TRL: 0.1); that of the SFT term is 1."""
    learning_rate: float = 1e-5
    """AdamW; as in sft, whose term is the larger one."""
    max_new_tokens: int = 64
    """Maximum tokens per completion, in evaluation."""
    tuning: Tuning = Tuning(anneal_lr=True)
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes during ORPO."""

    config: Config
    policy: LanguageModel
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0


def build(config: Config, spaces: None = None, device: torch.device | str = "cpu") -> State:
    """Load the policy and make the optimizer."""
    if not config.odds_ratio_coef >= 0:
        raise UserError(f"odds_ratio_coef is {config.odds_ratio_coef:g}: it must be at least 0 (0 is SFT).")
    return State(config, *language.build(config, device))


act = answer


def mean_logprob(state: State, batch: TokenBatch) -> Tensor:
    """log P of the chosen and of the rejected answer, `[P, 2]`: the mean over its tokens."""
    logprob = state.policy.logprob(batch)[0].sum(-1)
    return logprob / batch.length.to(logprob.device)


def loss(state: State, batch: TokenBatch, pairs: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch `[P, 2, T]` (chosen first), divided by all `pairs`, and sums for the metrics."""
    chosen, rejected = mean_logprob(state, batch).unbind(1)
    ratio = preference.odds_ratio(chosen, rejected)
    terms = -chosen + state.config.odds_ratio_coef * ratio
    return terms.sum() / pairs, {
        "accuracy": (chosen > rejected).float().sum(),
        "chosen_logprob": chosen.detach().sum(),
        "rejected_logprob": rejected.detach().sum(),
        "odds_ratio_loss": ratio.detach().sum(),
    }


def update(state: State, batch: TokenBatch) -> dict[str, float]:
    """One gradient step on pairs, `[P, 2, T]` with the chosen first."""
    pairs = len(batch.length)
    return fit(state, state.policy, batch, lambda part, few: loss(state, few, pairs), pairs)


def assess(state: State, held_out: Sequence[Example]) -> tuple[str, list[float]]:
    """Whether the chosen answer of each held-out pair is the more likely one: the evaluation without a grader."""
    rows, values = _corpus(state, of_form(held_out, "preference", "orpo")), list[float]()
    for batch in rows.batches(state.config.batch_size):
        with torch.no_grad():
            chosen, rejected = mean_logprob(state, batch).unbind(1)
        values += (chosen > rejected).float().tolist()
    return "pair accuracy", values


def _corpus(state: State, rows: Sequence[Example]) -> Corpus:
    return corpus(
        state.policy, rows, lambda row: [row.columns["chosen"], row.columns["rejected"]], state.config.max_tokens
    )


export = language.export


def train(
    config: Config, env: TextTask, state: State | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, dict[str, Any], State]]:
    """Train on pairs, epoch after epoch; yields after every update."""
    state = build(config, env.spaces, device) if state is None else state
    rows = _corpus(state, examples(config.data, env, "preference", "orpo"))
    while state.step < config.steps:
        metrics = update(state, rows.batch(rows.draw(config.batch_size, state.step, config.seed)))
        state.step += 1
        yield state.step, {**metrics, "left_out": float(rows.left_out)}, state
