"""SFT: supervised fine-tuning, the first stage of InstructGPT, Ouyang et al. 2022 (arXiv:2203.02155).

    L(θ) = − 1/Σ_i |y_i|  Σ_i Σ_t log π_θ(y_it | x_i, y_i<t)

over the tokens of the completions only, including the end token. In a conversation (`messages`) these are the tokens of
all answers. The mean is over all tokens of a batch, even if the batch is split into micro-batches. Prompts are
formatted by the model's chat template, exactly as in sampling.

Kept: all of it. Rows are packed end to end as one tree of tokens (`nets.language.tokentree`), each with its own
positions and masked from the others: there is no padding, and a shared prefix is computed once. The result is the same.
Left out: the mix with pretraining data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresight.data.text import TokenBatch
from foresight.envs.text.task import Example, TextTask
from foresight.nets.language.model import LanguageModel
from foresight.ops.aggregate import per_token
from foresight.planning.generation.rollout import answer
from foresight.training import language
from foresight.training.corpus import Corpus, all_good, demonstrations, examples, of_form
from foresight.training.microbatch import fit, rows
from foresight.training.options import Tuning

KIND = "text"
UNIT = "updates"
METRICS = ("loss", "entropy", "grad_norm")
FORMS = ("demonstration", "labeled")  # forms of data


@dataclass(frozen=True)
class Config:
    """Hyperparameters of SFT."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder, or a hub id."""
    data: str = ""
    """Demonstrations (JSONL, Parquet, a dataset): prompt and completion, or messages. Empty: the rows of the task."""
    steps: int = 100
    """Total updates."""
    seed: int = 0
    """Seeds the order of the training rows."""
    batch_size: int = 16
    """Rows per update (paper: 32)."""
    max_tokens: int = 1024
    """Rows with more tokens, prompt and completion together, are left out (and counted)."""
    learning_rate: float = 1e-5
    """AdamW (paper: 9.65e-6 for 1.3B parameters, weight decay 0.1)."""
    all_turns: bool = True
    """Whether to train on every answer of a conversation (`messages`), or only on the last."""
    max_new_tokens: int = 64
    """Maximum tokens per completion, in evaluation."""
    tuning: Tuning = Tuning(anneal_lr=True)
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes during SFT."""

    config: Config
    policy: LanguageModel
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0


def build(config: Config, spaces: None = None, device: torch.device | str = "cpu") -> State:
    """Load the policy and make the optimizer."""
    return State(config, *language.build(config, device))


act = answer


def loss(state: State, batch: TokenBatch, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch `[P, 1, T]`, as its share of the batch, and sums over its tokens for the metrics."""
    logprob, entropy = state.policy.logprob(batch)
    return -(weights.to(logprob.device) * logprob).sum(), {"entropy": entropy.sum()}


def update(state: State, batch: TokenBatch) -> dict[str, float]:
    """One gradient step on demonstrations."""
    weights = per_token(batch.mask)  # of the whole batch, before it is split

    def part_loss(part: Tensor, few: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return loss(state, few, rows(weights, part, few))

    return fit(state, state.policy, batch, part_loss, int(batch.mask.sum()))


def assess(state: State, held_out: Sequence[Example]) -> tuple[str, list[float]]:
    """The mean log-probability per token of each held-out completion, in nats: the evaluation without a grader."""
    corpus, values = _corpus(state, of_form(held_out, FORMS, "sft")), list[float]()
    for batch in corpus.batches(state.config.batch_size):
        with torch.no_grad():
            logprob, _ = state.policy.logprob(batch)
        values += (logprob.sum(-1) / batch.mask.sum(-1).to(logprob.device))[:, 0].tolist()
    return "logprob", values


def _corpus(state: State, rows: Sequence[Example]) -> Corpus:
    return demonstrations(state.policy, all_good(rows, "sft"), state.config.max_tokens, state.config.all_turns)


export = language.export


def train(
    config: Config, env: TextTask, state: State | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, dict[str, Any], State]]:
    """Train on demonstrations, epoch after epoch; yields after every update."""
    state = build(config, env.spaces, device) if state is None else state
    corpus = _corpus(state, examples(config.data, env, FORMS, "sft"))
    while state.step < config.steps:
        metrics = update(state, corpus.batch(corpus.draw(config.batch_size, state.step, config.seed)))
        state.step += 1
        yield state.step, {**metrics, "left_out": float(corpus.left_out)}, state
