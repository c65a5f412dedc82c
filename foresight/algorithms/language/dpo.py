"""DPO: Direct Preference Optimization, Rafailov et al. 2023 (arXiv:2305.18290), equation 7.

    L(θ) = −E[ log σ(β D) ]      D = log π_θ(y_c|x)/π_ref(y_c|x) − log π_θ(y_r|x)/π_ref(y_r|x)

β log π_θ/π_ref is the implicit reward of a policy, and the loss is that of the Bradley-Terry model with this reward.
The other losses on D are functions of `ops.preference`: `ipo` (arXiv:2310.12036), `hinge`; with `label_smoothing` above
0, `sigmoid` is cDPO and `robust` is rDPO (arXiv:2403.00409). With `nll_coef` above 0 the negative log-probability of
the chosen answer is added, so that it cannot become unlikely (RPO, Pang et al. 2024, arXiv:2404.19733). With
`length_normalized` the log-probabilities are means over tokens, so that longer answers have no advantage. With
`precompute_reference` log π_ref of all answers is computed once, before training, and saved with the State; again only
if the rows have changed when a run is resumed.

Kept: all of it. The prompt is computed once for both answers, and tokenized once with each. Dropout is never active.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresight.data.text import TokenBatch
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError, unknown
from foresight.nets.language.model import LanguageModel
from foresight.ops import preference
from foresight.planning.generation.rollout import answer
from foresight.training import language
from foresight.training.corpus import Corpus, corpus, examples, of_form
from foresight.training.microbatch import fit, gather
from foresight.training.options import Tuning

KIND = "text"
UNIT = "updates"
METRICS = ("loss", "accuracy", "margin", "chosen_reward")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of DPO."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder, or a hub id. It is also the reference."""
    data: str = ""
    """Preferences (JSONL, Parquet, a dataset): prompt, chosen, rejected. Empty: the rows of the task."""
    steps: int = 100
    """Total updates."""
    seed: int = 0
    """Seeds the order of the training rows."""
    batch_size: int = 16
    """Pairs per update (paper: 64)."""
    max_tokens: int = 1024
    """Pairs in which a prompt and its answer have more tokens are left out (and counted)."""
    beta: float = 0.1
    """β: how strongly the policy is kept near the reference (paper: 0.1)."""
    loss: str = "sigmoid"
    """The function of `ops.preference`: sigmoid (DPO), robust, ipo or hinge."""
    label_smoothing: float = 0.0
    """ε of cDPO (sigmoid) and rDPO (robust): the share of pairs with swapped labels."""
    nll_coef: float = 0.0
    """α of RPO: weight of the chosen answer's negative log-probability per token (paper: 1)."""
    length_normalized: bool = False
    """Whether log-probabilities are means over tokens instead of sums (as for IPO in TRL, but not in IPO's paper)."""
    precompute_reference: bool = False
    """Whether log π_ref of all answers is computed once before training: a quarter less to compute from epoch 2 on."""
    learning_rate: float = 1e-6
    """AdamW (paper: RMSprop at 1e-6)."""
    max_new_tokens: int = 64
    """Maximum tokens per completion, in evaluation."""
    tuning: Tuning = Tuning(anneal_lr=True)
    """How the model is tuned (`training.options`)."""


@dataclass
class State:
    """Everything that changes during DPO, and the reference, which does not."""

    config: Config
    policy: LanguageModel
    reference: LanguageModel
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0
    reference_logprob: Tensor | None = None  # log π_ref of all answers of the data `[rows, 2]`, if precomputed
    reference_rows: str | None = None  # digest of those rows: data that changed before a resume is computed again


def build(config: Config, spaces: None = None, device: torch.device | str = "cpu") -> State:
    """Load the policy, freeze a copy of it, and make the optimizer."""
    if config.loss not in preference.LOSSES:
        raise unknown("loss", config.loss, preference.LOSSES)
    if config.label_smoothing and (config.loss not in ("sigmoid", "robust") or not 0 <= config.label_smoothing < 0.5):
        raise UserError(
            f"label_smoothing is {config.label_smoothing:g} with the loss '{config.loss}': it is the share of wrong "
            "labels that cDPO and rDPO expect, in [0, 0.5), and the losses ipo and hinge have none."
        )
    if not config.beta > 0:
        raise UserError(f"beta is {config.beta:g}: the reward is β times a log-ratio, so it must be more than 0.")
    policy, optimizer, generator = language.build(config, device)
    return State(config, policy, language.frozen(policy), optimizer, generator)


act = answer


def log_odds(state: State, batch: TokenBatch, logprob: Tensor | None = None, reference: Tensor | None = None) -> Tensor:
    """log π_θ/π_ref of the chosen and of the rejected answer, `[P, 2]`: the implicit rewards divided by β.

    `logprob` and `reference` `[P, 2]`: log π_θ and log π_ref of the answers, if they are known already.
    """
    if reference is None:
        with torch.no_grad():
            reference = state.reference.logprob(batch)[0].sum(-1)
    if logprob is None:
        logprob = state.policy.logprob(batch)[0].sum(-1)
    odds = logprob - reference.to(logprob.device)
    return odds / batch.length.to(odds.device) if state.config.length_normalized else odds


def precomputed(state: State, rows: Corpus) -> Tensor:
    """log π_ref of both answers of every row, `[rows, 2]`."""
    found, tokens = list[Tensor](), state.config.tuning.micro_tokens
    with state.reference.precision():
        for batch in rows.batches(state.config.batch_size):
            found.append(gather(lambda few: state.reference.logprob(few)[0], batch, tokens).sum(-1))
    return torch.cat(found)


def loss(
    state: State, batch: TokenBatch, pairs: int, reference: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch `[P, 2, T]` (chosen first), divided by all `pairs`, and sums for the metrics."""
    config, logprob = state.config, state.policy.logprob(batch)[0].sum(-1)
    odds = log_odds(state, batch, logprob, reference)
    difference = odds[:, 0] - odds[:, 1]
    terms = getattr(preference, config.loss)(difference, config.beta, config.label_smoothing)
    if config.nll_coef:
        terms = terms - config.nll_coef * logprob[:, 0] / batch.length[:, 0].to(logprob.device)
    rewards = config.beta * odds.detach()
    return terms.sum() / pairs, {
        "accuracy": (0.5 * (difference >= 0) + 0.5 * (difference > 0)).sum(),  # a tie, as at the start, scores one half
        "margin": (rewards[:, 0] - rewards[:, 1]).sum(),
        "chosen_reward": rewards[:, 0].sum(),
        "rejected_reward": rewards[:, 1].sum(),
    }


def update(state: State, batch: TokenBatch, reference: Tensor | None = None) -> dict[str, float]:
    """One gradient step on pairs, `[P, 2, T]` with the chosen first; `reference` `[P, 2]` is log π_ref, if known."""
    pairs = len(batch.length)

    def part_loss(part: Tensor, few: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return loss(state, few, pairs, None if reference is None else reference[part])

    return fit(state, state.policy, batch, part_loss, pairs)


def assess(state: State, held_out: Sequence[Example]) -> tuple[str, list[float]]:
    """Whether the implicit reward ranks each held-out pair correctly: the evaluation without a grader."""
    rows, values = _corpus(state, of_form(held_out, "preference", "dpo")), list[float]()
    for batch in rows.batches(state.config.batch_size):
        with torch.no_grad():
            odds = log_odds(state, batch)
        # Policy and reference start equal: neither answer is preferred, which scores one half.
        values += (0.5 * (odds[:, 0] > odds[:, 1]) + 0.5 * (odds[:, 0] >= odds[:, 1])).tolist()
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
    rows = _corpus(state, examples(config.data, env, "preference", "dpo"))
    if config.precompute_reference and state.reference_rows != (digest := rows.digest()):
        state.reference_logprob, state.reference_rows = precomputed(state, rows), digest
    while state.step < config.steps:
        drawn = rows.draw(config.batch_size, state.step, config.seed)
        reference = None if state.reference_logprob is None else state.reference_logprob[drawn]
        metrics = update(state, rows.batch(drawn), reference)
        state.step += 1
        yield state.step, {**metrics, "left_out": float(rows.left_out)}, state
