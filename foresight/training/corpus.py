"""Tokenized language datasets: tokenized once, shuffled in epochs whose order depends only on the seed."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from foresight.data import forms
from foresight.data.text import TokenBatch, pad
from foresight.envs.text import curriculum
from foresight.envs.text.dataset import dataset
from foresight.envs.text.task import Example, Prompt, TextTask
from foresight.errors import UserError
from foresight.nets.language.completion import Answer
from foresight.nets.language.completion import encode as encode
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.scorer import completing

Answers = Callable[[Example], Sequence[Answer]]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Examples with the token ids of a prompt and G completions each; too long ones are left out."""

    examples: list[Example]
    prompts: list[list[int]]
    completions: list[list[list[int]]]
    left_out: int
    own: list[list[list[bool]]] = dataclasses.field(default_factory=list)  # tokens trained on; empty: all

    def __len__(self) -> int:
        return len(self.examples)

    def draw(self, size: int, step: int, seed: int) -> list[int]:
        """The indices of step `step`: consecutive epochs, each in its own order."""
        count, order, chosen = len(self), list[int](), list[int]()
        current = None
        for position in range(step * size, (step + 1) * size):
            epoch, within = divmod(position, count)
            if epoch != current:
                order = torch.randperm(
                    count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)
                ).tolist()
                current = epoch
            chosen.append(order[within])
        return chosen

    def batch(self, indices: Sequence[int]) -> TokenBatch:
        """Those rows as a TokenBatch `[P, G]`."""
        batch = token_batch([self.prompts[i] for i in indices], [self.completions[i] for i in indices])
        rows = [row for i in indices for row in self.own[i]] if self.own else []
        if all(all(row) for row in rows):
            return batch
        marks, _ = pad(rows)
        return dataclasses.replace(batch, own=marks.bool().view(batch.completion.shape))

    def batches(self, size: int) -> Iterator[TokenBatch]:
        """All rows in their order, at most `size` at a time."""
        for i in range(0, len(self), size):
            yield self.batch(range(i, min(i + size, len(self))))

    def digest(self) -> str:
        """The sha256 of the tokens of all rows in their order."""
        found = hashlib.sha256()
        for row in zip(self.prompts, self.completions, strict=True):
            found.update(repr(row).encode())
        return found.hexdigest()


def token_batch(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Sequence[int]]]) -> TokenBatch:
    """P prompts with G completions each, from a dataset: not sampled, so `logprob` is 0."""
    prompt, prompt_length = pad(prompts)
    rows, length = pad([row for group in completions for row in group])
    shape = (len(prompts), len(completions[0]))
    completion, length = rows.view(*shape, -1), length.view(shape)
    return TokenBatch(prompt, prompt_length, completion, length, torch.zeros(completion.shape), length > 0)


def examples(data: str, task: TextTask, wanted: str | tuple[str, ...], name: str) -> Sequence[Example]:
    """The training rows of the file `data`, or of the task if `data` is empty; all have (one of) the wanted forms.

    A file is split as if it were the task, so its held-out rows are never trained on. Raises UserError if there is no
    data or it has another form, and for a task with a curriculum.
    """
    curriculum.refuse(task, name)
    wanted = (wanted,) if isinstance(wanted, str) else wanted
    own = bool(task.train) and forms.form(task.train[0].columns) in wanted  # a task such as chains writes its own
    if not data and not task.path and task.grader is not None and not own:
        raise UserError(
            f"{name} trains on a dataset: give --data FILE, or make one from the task with `foresight data`."
        )
    return of_form((task if _own(data, task) else dataset(data)).train, wanted, name, data or task.name)


def _own(data: str, task: TextTask) -> bool:
    """Whether the training data is that of the task."""
    return not data or (bool(task.path) and Path(data).resolve() == Path(task.path).resolve())


def about(data: str, task: TextTask) -> str:
    """A description of the training and evaluation data of a run, and of what its rewards receive."""
    sizes = (
        task.sizes() if _own(data, task) else f"trained on {data}, evaluated on {len(task.test):,} held-out examples"
    )
    return "; ".join(filter(None, (sizes, task.given())))


def of_form(
    rows: Sequence[Example], wanted: str | tuple[str, ...], name: str, source: str = "the held-out data"
) -> Sequence[Example]:
    """The same rows. Raises UserError unless they have (one of) the wanted forms, on which `name` trains."""
    found = forms.form(rows[0].columns)
    forms_wanted = (wanted,) if isinstance(wanted, str) else wanted
    if found not in forms_wanted:
        label = rows[0].columns.get("label") if found == "demonstration" and "labeled" in wanted else None
        cause = "" if label is None else f" (its 'label' is {label!r}, not true or false)"
        raise UserError(
            f"{name} needs rows of the form '{' or '.join(forms_wanted)}', but {source} has '{found}'{cause}: "
            "see docs/data.md."
        )
    return rows


def all_good(rows: Sequence[Example], name: str) -> Sequence[Example]:
    """The same rows. Raises UserError for an answer that is labeled bad, if `name` trains on every row."""
    for row in rows:
        if row.columns.get("label") is False:
            bad = str(row.columns.get("completion", row.answer))
            raise UserError(
                f"{row.place}: the answer {bad[:40]!r} is labeled bad ('label' is false), and "
                f"{name} trains on every row: remove such rows, rename the column if it means something else, or train "
                "kto."
            )
    return rows


def corpus(policy: LanguageModel, rows: Sequence[Example], answers: Answers, max_tokens: int) -> Corpus:
    """Tokenize prompts and their answers; rows longer than `max_tokens` are left out, not cut.

    Raises UserError if no row is short enough or, naming the row, if one cannot be tokenized (see `encode`).
    """
    limit = min(max_tokens, policy.context)
    kept = Corpus([], [], [], 0)
    for row in rows:
        with _naming(row):
            pairs = [encode(policy, row.prompt, answer, row.tools) for answer in answers(row)]
        if all(len(prompt) + len(completion) <= limit for prompt, completion in pairs):
            kept.examples.append(row)
            kept.prompts.append(pairs[0][0])
            kept.completions.append([completion for _, completion in pairs])
    _check_some(kept, rows, limit)
    return dataclasses.replace(kept, left_out=len(rows) - len(kept.examples))


def demonstrations(policy: LanguageModel, rows: Sequence[Example], max_tokens: int, all_turns: bool) -> Corpus:
    """Tokenize demonstrations; of a conversation (the column `messages`) the last answer or, with `all_turns`, all of
    them.

    The answers of a conversation are one row, in which the messages between them are masked (`own`). If the template
    rewrites earlier turns, they are several rows, each with the prompt that the sampler would get. A conversation is
    cut before the first answer that exceeds `max_tokens`, and left out if that is its first. Raises UserError as
    `corpus` does.
    """
    limit = min(max_tokens, policy.context)
    kept, left_out = Corpus([], [], [], 0), 0
    for row in rows:
        parts = list[tuple[list[int], list[int], list[bool]]]()
        for prompt, reply in _turns(row, all_turns):
            with _naming(row):
                head, tail = encode(policy, prompt, reply, row.tools)
            if len(head) + len(tail) > limit:
                break
            before = [*parts[-1][0], *parts[-1][1]] if parts else []
            if parts and head[: len(before)] == before:
                start, after, own = parts.pop()
                between = head[len(before) :]
                parts.append((start, [*after, *between, *tail], [*own, *[False] * len(between), *[True] * len(tail)]))
            else:
                parts.append((head, tail, [True] * len(tail)))
        left_out += not parts
        for start, after, own in parts:
            kept.examples.append(row)
            kept.prompts.append(start)
            kept.completions.append([after])
            kept.own.append([own])
    _check_some(kept, rows, limit)
    return dataclasses.replace(kept, left_out=left_out)


def _turns(row: Example, all_turns: bool) -> list[tuple[Prompt, Answer]]:
    """The answers of a demonstration to train on, each with the conversation before it."""
    messages = row.columns.get("messages")
    if messages is None or messages[:-1] != row.prompt:  # a task may have changed the prompt
        return [(row.prompt, row.columns.get(forms.REPLY) or row.columns["completion"])]
    turns = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    return [(messages[:i], messages[i]) for i in (turns if all_turns else turns[-1:])]


def last_answer(row: Example) -> Answer:
    """The last answer of a demonstration."""
    return _turns(row, all_turns=False)[0][1]


@contextmanager
def _naming(row: Example) -> Iterator[None]:
    """Prefix errors with the row they are about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{row.place or f'The prompt {row.question[:60]!r}'}: {error}") from error


def _check_some(kept: Corpus, rows: Sequence[Example], limit: int) -> None:
    if not kept.examples:
        raise UserError(f"All {len(rows)} rows are longer than {limit} tokens: raise max_tokens or shorten them.")


def delimiter(row: Example) -> str:
    """The text between two steps of an answer with labeled steps: a line break, or the column `delimiter`."""
    return str(row.columns.get("delimiter") or "\n")


def step_ends(policy: LanguageModel, batch: TokenBatch, rows: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Where the steps of answers end and whether each is right: `ends` (bool) and `labels` `[P, T]`.

    A step ends at the last token that contains a part of it, before the `delimiter`.
    """
    ends = torch.zeros(len(rows), batch.completion.shape[-1], dtype=torch.bool)
    labels = torch.zeros(ends.shape)
    for p, row in enumerate(rows):
        ids = batch.completion[p, 0, : batch.length[p, 0]].tolist()
        first, between = str(row.columns["completions"][0]), len(delimiter(row))
        leading = len(first) - len(first.lstrip())  # a template may strip it, and may add text before the step
        before = max(policy.decode(ids).find(first.strip()), 0) - leading - between
        written = itertools.accumulate((len(step) + between for step in row.columns["completions"]), initial=before)
        places = completing(policy, ids, list(written)[1:])
        for end, right in zip(places, row.columns["labels"], strict=True):
            ends[p, end], labels[p, end] = True, float(right)
    return ends, labels
