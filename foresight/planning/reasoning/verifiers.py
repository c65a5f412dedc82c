"""Verifiers: scores in [0, 1] of texts, whole or not, by exact rules, a reward model, a critic or another model."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import torch

from foresight import errors
from foresight.data.text import TokenBatch, pad
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language import mtp
from foresight.nets.language.completion import encode
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.mtp import MultiTokenHeads
from foresight.nets.language.scorer import Scorer, completing
from foresight.nets.language.tokenizer import ids_of
from foresight.planning.reasoning.beam import AGGREGATES
from foresight.planning.reasoning.mind import Verifier

BATCH = 64  # texts scored at once


def exact(task: TextTask) -> Verifier:
    """The verifier of the task, which knows no gold answers. Raises UserError if it has none."""
    if task.verifier is None:
        raise UserError(
            f"The task '{task.name}' has no exact verifier: give --verifier FOLDER, the export of a reward model, or a "
            "method that needs none, such as self_consistency."
        )
    return task.verifier


def reward_model(scorer: Scorer, aggregate: str = "min") -> Verifier:
    """σ of a reward model's scores, read where it was trained.

    Of a model of whole answers: at the end token, which follows the text as in training (`completion.encode`). Of a
    model of steps: at the last token of each, the least of them, their product or the last (`aggregate`; Lightman et
    al. 2023 use the product); 0.5 before the first. The delimiter after a step, such as a line break, is no part of it.
    """
    if aggregate not in AGGREGATES:
        raise errors.unknown("aggregate", aggregate, AGGREGATES)
    steps = scorer.of_steps

    def verify(examples: Sequence[Example], texts: Sequence[str]) -> list[float]:
        found = list[float]()
        for start in range(0, len(texts), BATCH):
            few = slice(start, start + BATCH)
            batch = (_batch if steps else _answers)(scorer.trunk, examples[few], texts[few])
            with torch.no_grad():
                scores = scorer.steps(batch)[:, 0].sigmoid()
            for row, ids, length, text in zip(
                scores, batch.completion[:, 0], batch.length[:, 0], texts[few], strict=True
            ):
                if not steps:
                    found.append(row[int(length) - 1].item())
                    continue
                places = completing(scorer.trunk, ids[: int(length)].tolist(), ends(text, scorer.delimiter))
                found.append(AGGREGATES[aggregate](row[places].tolist()) if places else 0.5)
        return found

    return verify


def likelihood(model: LanguageModel, aggregate: str = "min") -> Verifier:
    """The probability that a language model gives to the steps, which are lines, of one that knows less.

    The least of them, their product or the last; 0.5 before the first. With the policy's own probabilities to compare
    with, it would be the implicit process reward of Yuan et al. 2024 (arXiv:2412.01981). Nothing is trained for it.
    """
    if aggregate not in AGGREGATES:
        raise errors.unknown("aggregate", aggregate, AGGREGATES)

    def verify(examples: Sequence[Example], texts: Sequence[str]) -> list[float]:
        found = list[float]()
        for start in range(0, len(texts), BATCH):
            few = slice(start, start + BATCH)
            batch = _batch(model, examples[few], texts[few])
            with torch.no_grad():
                logprob = model.logprob(batch)[0][:, 0].cumsum(-1).cpu()
            for row, ids, length, text in zip(
                logprob, batch.completion[:, 0], batch.length[:, 0], texts[few], strict=True
            ):
                places = completing(model, ids[: int(length)].tolist(), ends(text))
                sums = torch.cat([torch.zeros(1), row[places]]).diff()
                found.append(AGGREGATES[aggregate](sums.exp().tolist()) if places else 0.5)
        return found

    return verify


def ends(text: str, delimiter: str = "\n") -> list[int]:
    """The number of characters up to the end of each step that is not empty, without the delimiter after it."""
    steps = text.split(delimiter)
    found = itertools.accumulate((len(step) + len(delimiter) for step in steps), initial=-len(delimiter))
    return [end for step, end in zip(steps, list(found)[1:], strict=True) if step.strip()]


def critic(policy: LanguageModel, heads: MultiTokenHeads) -> Verifier:
    """The value that a multi-token critic predicts after a text: the mean of its heads, clamped to [0, 1]."""

    def verify(examples: Sequence[Example], texts: Sequence[str]) -> list[float]:
        found = list[float]()
        for start in range(0, len(texts), BATCH):
            few = slice(start, start + BATCH)
            batch = _batch(policy, examples[few], texts[few], [policy.stop_ids[0]])  # a value is of the state before it
            with torch.no_grad():
                seen = mtp.view(policy, batch)
                features, exist = heads(seen.hidden, seen.embedded, seen.parents)
                values, there = (
                    seen.scatter(heads.values(features[:, seen.context])),
                    seen.scatter(exist[:, seen.context]),
                )
            value = (values * there).sum(0) / there.sum(0).clamp(min=1)
            last = (batch.length.to(value.device) - 1)[..., None]
            found += value.gather(-1, last)[:, 0, 0].clamp(0, 1).tolist()
        return found

    return verify


def _batch(
    model: LanguageModel, examples: Sequence[Example], texts: Sequence[str], after: Sequence[int] = ()
) -> TokenBatch:
    """Prompts with the ids of a text each. An empty text is its prompt's last token."""
    prompts = [model.encode(example.prompt, example.tools) for example in examples]
    rows = [[*ids_of(model.tokenizer, text, add_special_tokens=False), *after] for text in texts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            row.append(prompt.pop())
    return _padded(prompts, rows)


def _answers(model: LanguageModel, examples: Sequence[Example], texts: Sequence[str]) -> TokenBatch:
    """Prompts with a whole answer each, and the token that ends it."""
    pairs = [encode(model, one.prompt, text, one.tools) for one, text in zip(examples, texts, strict=True)]
    return _padded([prompt for prompt, _ in pairs], [answer for _, answer in pairs])


def _padded(prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> TokenBatch:
    """Prompts with one completion each."""
    prompt_ids, prompt_length = pad(prompts)
    completion, length = pad(rows)
    shape = (len(rows), 1, completion.shape[1])
    zeros = torch.zeros(shape)
    return TokenBatch(
        prompt_ids, prompt_length, completion.view(shape), length[:, None], zeros, torch.ones(len(rows), 1).bool()
    )


def auc_within(scores: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """The mean `auc` of the questions that have right and wrong answers: votes and best-of-N compare no others."""
    each = [auc(*pair) for pair in zip(scores, right, strict=True)]
    return statistics.fmean(found for found in each if found == found)


def auc(scores: Sequence[float], right: Sequence[float]) -> float:
    """The probability that a right answer scores above a wrong one, ties half: 0.5 is a blind verifier.

    NaN without answers of both kinds.
    """
    good = sorted(s for s, r in zip(scores, right, strict=True) if r >= 1)
    bad = [s for s, r in zip(scores, right, strict=True) if r < 1]
    if not good or not bad:
        return float("nan")
    one, other = torch.tensor(good, dtype=torch.float64), torch.tensor(bad, dtype=torch.float64)
    below = torch.searchsorted(one, other, right=False).double()  # good ones strictly below each bad one
    upto = torch.searchsorted(one, other, right=True).double()
    wins = (len(good) - upto) + 0.5 * (upto - below)
    return float(wins.mean() / len(good))
