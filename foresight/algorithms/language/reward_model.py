"""Reward models for outcomes (InstructGPT, Ouyang et al. 2022, arXiv:2203.02155, eq. 1) and for steps (Lightman et al.
2023, arXiv:2305.20050).

A language model whose projection to the vocabulary is replaced by a scalar s(x, y), read at the last token. On pairs of
answers (columns chosen, rejected) it is the Bradley-Terry model, with scores centered around 0:

    L(θ) = −E[ log σ(s(x, y_c) − s(x, y_r) − m) ] + c E[ (s(x, y_c) + s(x, y_r))² ]

On answers with labeled steps (columns completions, labels) the score at the end of each step predicts whether all steps
so far are correct: −E[ l log σ(s) + (1 − l) log(1 − σ(s)) ]. The columns of the data select the loss.

With `lm_coef` above 0 the projection to the vocabulary is kept beside the score, and a language-modeling loss is added
(Cobbe et al. 2021, arXiv:2110.14168; Yang et al. 2024, arXiv:2406.10216):

    L(θ) + λ E[ −1/|y_c| Σ_t log π_θ(y_ct | x, y_c<t) ]

of the chosen answers or, with labeled steps, of the tokens of right steps. A tied projection, the embedding matrix,
learns too, unless adapters are trained; another one, which the export does not contain, stays as it is. Yang et al.
weight the terms α and 1 − α, which is λ = α / (1 − α) but for the scale of the loss, and take −log σ(β log π(y_c|x))
for the loss of an answer.

Kept: both. The last token of an answer is its end token. Left out: a third class "neutral" for steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foresight.data import forms
from foresight.data.text import TokenBatch
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language import lora, pretrained
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.scorer import Scorer, at_end
from foresight.ops import preference
from foresight.ops.aggregate import per_sequence
from foresight.planning.reasoning import verifiers
from foresight.training import language, microbatch
from foresight.training.corpus import Corpus, corpus, delimiter, encode, examples, of_form, step_ends, token_batch
from foresight.training.microbatch import fit
from foresight.training.options import Tuning

KIND = "text"
UNIT = "updates"
METRICS = ("loss", "accuracy", "margin")
FORMS = ("preference", "stepwise")  # forms of data


@dataclass(frozen=True)
class Config:
    """Hyperparameters of a reward model."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder, or a hub id: the trunk. If a folder has a head, it is used."""
    data: str = ""
    """Preferences or labeled steps (JSONL, Parquet, a dataset). Empty: the rows of the task."""
    steps: int = 100
    """Total updates."""
    seed: int = 0
    """Seeds the new head and the order of the rows."""
    batch_size: int = 16
    """Pairs, or answers with labeled steps, per update (paper: 64 prompts)."""
    max_tokens: int = 1024
    """Rows with more tokens, prompt and completion together, are left out (and counted)."""
    centering: float = 0.01
    """c: how strongly the scores of a pair are kept around 0 (Eisenstein et al. 2023, arXiv:2312.09244)."""
    margin: bool = True
    """Whether the column `margin`, if there is one, is m (Llama 2, arXiv:2307.09288)."""
    lm_coef: float = 0.0
    """λ: weight of the language-modeling loss on chosen answers or right steps. 0: none."""
    learning_rate: float = 1e-5
    """AdamW (paper: 9e-6 for 6B parameters)."""
    tuning: Tuning = Tuning(anneal_lr=True)
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes while a reward model is trained."""

    config: Config
    scorer: Scorer
    optimizer: torch.optim.Optimizer
    of_steps: bool | None = None  # whether it was trained on labeled steps; None: as the model that it starts from
    delimiter: str = "\n"  # between two of these steps
    step: int = 0


def build(config: Config, spaces: None = None, device: torch.device | str = "cpu") -> State:
    """Load the trunk, initialize a head, and make the optimizer."""
    if not 0 <= config.lm_coef < math.inf:
        raise UserError(f"lm_coef is {config.lm_coef:g}: it must be at least 0 (0: no language-modeling loss).")
    generator = torch.Generator().manual_seed(config.seed)
    scorer = language.scorer(config, device, config.model, generator=generator)
    if config.lm_coef:
        scorer.unembedding = _unembedding(config, device)
    return State(config, scorer, language.adamw(scorer, config.learning_rate, config.tuning))


def _unembedding(config: Config, device: torch.device | str) -> nn.Module | None:
    try:
        return pretrained.unembedding(config.model, device)
    except UserError as error:
        raise UserError(
            f"lm_coef is {config.lm_coef:g}, which needs a language model: {error} Start from a language model, or "
            "leave --lm-coef out."
        ) from error


def act(
    state: State, obs: Sequence[Any], carry: None = None, explore: bool = False
) -> tuple[list[float], dict[str, Tensor], None]:
    """The score of each answer; `obs` are pairs (prompt, completion).

    Of a model of steps it is the least of the probabilities that each is right.
    """
    if not all(isinstance(x, tuple) and len(x) == 2 for x in obs):
        raise UserError("A reward model scores answers and generates none: leave --task out, and give --data pairs.")
    if _marked(state).of_steps:
        verify = verifiers.reward_model(state.scorer)
        return list(verify([Example(prompt) for prompt, _ in obs], [text for _, text in obs])), {}, None
    scores: list[float] = []
    for i in range(0, len(obs), state.config.batch_size):
        rows = [encode(state.scorer.trunk, *x) for x in obs[i : i + state.config.batch_size]]
        with torch.no_grad():
            scores += state.scorer.scores(token_batch([x for x, _ in rows], [[y] for _, y in rows]))[:, 0].tolist()
    return scores, {}, None


def _read(state: State, batch: TokenBatch, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The scores of a micro-batch up to each token `[P, G, T]`, and its share of the language-modeling loss.

    `weights` `[P, G, T]` of the tokens (`ops.aggregate`); None: without this loss.
    """
    if weights is None:
        return state.scorer.steps(batch), None
    scores, logprob = state.scorer.steps_and_logprob(batch, weights > 0)
    return scores, -(weights.to(logprob.device) * logprob).sum()


def _joined(
    state: State, loss: Tensor, modeled: Tensor | None, count: int, sums: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss with that of language modeling, if any, and its metric."""
    if modeled is None:
        return loss, sums
    return loss + state.config.lm_coef * modeled, sums | {"lm_loss": count * modeled.detach()}


def pair_loss(
    state: State, batch: TokenBatch, margin: Tensor, pairs: int, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch `[P, 2, T]` (chosen first), margin `[P]`, divided by all `pairs`; metric sums.

    `weights` `[P, 2, T]`: those of the tokens in the language-modeling loss, if there is one.
    """
    scores, modeled = _read(state, batch, weights)
    chosen, rejected = at_end(scores, batch).unbind(1)
    terms = preference.bradley_terry(chosen, rejected, margin.to(chosen.device))
    terms = terms + state.config.centering * preference.centering(chosen, rejected)
    sums = {
        "accuracy": (chosen > rejected).float().sum(),
        "margin": (chosen - rejected).detach().sum(),
        "mean_score": 0.5 * (chosen + rejected).detach().sum(),
    }
    return _joined(state, terms.sum() / pairs, modeled, pairs, sums)


def step_loss(
    state: State, batch: TokenBatch, ends: Tensor, labels: Tensor, count: int, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch `[P, 1, T]`, divided by all `count` steps; ends (bool) and labels `[P, T]`.

    `weights` `[P, 1, T]`: those of the tokens in the language-modeling loss, if there is one.
    """
    scores, modeled = _read(state, batch, weights)
    device = scores.device
    logits, right = scores[:, 0][ends.to(device)], labels.to(device)[ends.to(device)]
    terms = torch.nn.functional.binary_cross_entropy_with_logits(logits, right, reduction="sum")
    sums = {"accuracy": ((logits > 0) == (right > 0.5)).float().sum()}
    return _joined(state, terms / count, modeled, count, sums)


def right_tokens(ends: Tensor, labels: Tensor) -> Tensor:
    """The tokens of right steps, bool `[P, T]`: a token belongs to the step that ends next; ends, labels `[P, T]`."""
    width = ends.shape[-1]
    places = torch.arange(width).where(ends, width)
    following = places.flip(-1).cummin(-1).values.flip(-1)  # `width` after the last step
    return torch.nn.functional.pad(labels, (0, 1)).gather(-1, following) > 0.5


def update(state: State, batch: TokenBatch, rows: Sequence[Example]) -> dict[str, float]:
    """One gradient step on pairs `[P, 2, T]` or on answers with labeled steps `[P, 1, T]`; `rows`: their examples."""
    trunk, models = state.scorer.trunk, state.config.lm_coef > 0

    def share(weights: Tensor | None, part: Tensor, few: TokenBatch) -> Tensor | None:
        return None if weights is None else microbatch.rows(weights, part, few)

    if _paired(rows[0]):
        pairs = len(rows)
        chosen = torch.tensor([True, False])[:, None]
        weights = per_sequence(batch.mask & chosen) if models else None  # of the whole batch, before it is split
        margin = torch.tensor([float(row.columns.get("margin") or 0) * state.config.margin for row in rows])

        def loss(part: Tensor, few: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return pair_loss(state, few, margin[part], pairs, share(weights, part, few))

        return fit(state, trunk, batch, loss, pairs)
    ends, labels = step_ends(trunk, batch, rows)
    count = int(ends.sum())
    of_steps = per_sequence(right_tokens(ends, labels)[:, None]) if models else None

    def part_loss(part: Tensor, few: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        width = few.completion.shape[-1]
        few_ends, few_labels = ends[part][:, :width], labels[part][:, :width]
        return step_loss(state, few, few_ends, few_labels, count, share(of_steps, part, few))

    return fit(state, trunk, batch, part_loss, count)


def assess(state: State, held_out: Sequence[Example]) -> tuple[str, list[float]]:
    """Whether each held-out pair is ranked correctly, or each held-out step classified correctly."""
    rows, values = _corpus(state, of_form(held_out, FORMS, "reward_model")), list[float]()
    for i in range(0, len(rows), state.config.batch_size):
        few = range(i, min(i + state.config.batch_size, len(rows)))
        batch, trunk = rows.batch(few), state.scorer.trunk
        with torch.no_grad():
            if batch.length.shape[1] == 2:
                chosen, rejected = state.scorer.scores(batch).unbind(1)
                values += (chosen > rejected).float().tolist()
            else:
                ends, labels = step_ends(trunk, batch, [rows.examples[j] for j in few])
                logits = state.scorer.steps(batch)[:, 0].cpu()
                values += ((logits > 0) == (labels > 0.5))[ends].float().tolist()
    return ("pair accuracy" if _paired(held_out[0]) else "step accuracy"), values


def _marked(state: State) -> Scorer:
    """The scorer, marked by what it was trained on: a checkpoint holds its weights alone, without the marks."""
    if state.of_steps is not None:
        state.scorer.of_steps, state.scorer.delimiter = state.of_steps, state.delimiter
    return state.scorer


def _paired(row: Example) -> bool:
    """Whether a row is a pair of answers; one of steps may have empty columns of that name."""
    return forms.form(row.columns) == "preference"


def _corpus(state: State, rows: Sequence[Example]) -> Corpus:
    def answers(row: Example) -> list[str]:
        if _paired(row):
            return [row.columns["chosen"], row.columns["rejected"]]
        return [delimiter(row).join(row.columns["completions"])]

    return corpus(state.scorer.trunk, rows, answers, state.config.max_tokens)


def export(state: State, directory: str | Path, merged: bool = True) -> Path:
    """Write a Hugging Face folder for sequence classification with one label; `rlhf_ppo` takes it as `reward_model`.

    Adapters are merged into the weights. An adapter alone does not contain the head: raises UserError if not `merged`.
    """
    trunk = _marked(state).trunk
    if not merged and lora.has(trunk.module):
        raise UserError("An adapter does not contain the head of a reward model: export it merged.")
    config, tokenizer = trunk.module.config, trunk.tokenizer
    before = getattr(config, "pad_token_id", None), tokenizer.pad_token, tokenizer.padding_side
    try:
        config.pad_token_id = padding(trunk)
        tokenizer.pad_token, tokenizer.padding_side = tokenizer.convert_ids_to_tokens(config.pad_token_id), "right"
        return pretrained.save_folder(trunk.module, tokenizer, directory, merged, base=state.config.model)
    finally:
        config.pad_token_id, tokenizer.pad_token, tokenizer.padding_side = before


def padding(trunk: LanguageModel) -> int:
    """The padding token of an export: the tokenizer's own, or another one if the tokenizer's ends an answer.

    transformers reads the score at the last token that is not padding, so it would skip the end of an answer.
    """
    tokenizer = trunk.tokenizer
    candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids, *range(len(tokenizer))]
    return next(int(token) for token in candidates if token is not None and token not in trunk.stop_ids)


def train(
    config: Config, env: TextTask, state: State | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, dict[str, Any], State]]:
    """Train on pairs or answers, epoch after epoch; yields after every update.

    Raises UserError if the steps of the answers have several delimiters.
    """
    state = build(config, env.spaces, device) if state is None else state
    rows = _corpus(state, examples(config.data, env, FORMS, "reward_model"))
    state.of_steps = not _paired(rows.examples[0])
    state.delimiter, *others = sorted({delimiter(row) for row in rows.examples})
    if others:
        raise UserError(
            f"The steps of some rows are separated by {state.delimiter!r}, and of others by {others[0]!r} (the "
            "column 'delimiter'): train on rows of one kind."
        )
    _marked(state)
    while state.step < config.steps:
        chosen = rows.draw(config.batch_size, state.step, config.seed)
        metrics = update(state, rows.batch(chosen), [rows.examples[i] for i in chosen])
        state.step += 1
        yield state.step, {**metrics, "left_out": float(rows.left_out)}, state
