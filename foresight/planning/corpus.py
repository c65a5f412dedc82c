"""Language data as token rows: tokenised once, drawn epoch after epoch in an order that only a seed decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foresight.data import forms
from foresight.data.text import TokenBatch, pad
from foresight.envs import text
from foresight.envs.text import Example, Prompt, TextTask
from foresight.errors import UserError
from foresight.nets.language import LanguageModel, templated

Answers = Callable[[Example], Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Examples with the ids of their prompt and of G completions each; those that were too long are left out."""

    examples: list[Example]
    prompts: list[list[int]]
    completions: list[list[list[int]]]
    left_out: int

    def __len__(self) -> int:
        return len(self.examples)

    def draw(self, size: int, step: int, seed: int) -> list[int]:
        """The indices of step `step`: epochs follow on one another, each in an order of its own."""
        count, order, chosen = len(self), list[int](), list[int]()
        shown = None
        for place in range(step * size, (step + 1) * size):
            epoch, within = divmod(place, count)
            if epoch != shown:
                order = torch.randperm(
                    count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)
                ).tolist()
                shown = epoch
            chosen.append(order[within])
        return chosen

    def batch(self, indices: Sequence[int]) -> TokenBatch:
        """Those rows as a TokenBatch `[P, G]`."""
        return token_batch([self.prompts[i] for i in indices], [self.completions[i] for i in indices])

    def batches(self, size: int) -> Iterator[TokenBatch]:
        """All rows in their order, at most `size` at a time."""
        for i in range(0, len(self), size):
            yield self.batch(range(i, min(i + size, len(self))))


def token_batch(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Sequence[int]]]) -> TokenBatch:
    """P prompts with G completions each, all known: nothing was sampled, so `logprob` is 0."""
    prompt, prompt_length = pad(prompts)
    rows, length = pad([row for group in completions for row in group])
    shape = (len(prompts), len(completions[0]))
    completion, length = rows.view(*shape, -1), length.view(shape)
    return TokenBatch(prompt, prompt_length, completion, length, torch.zeros(completion.shape), length > 0)


def examples(data: str, task: TextTask, wanted: str | tuple[str, ...], name: str) -> Sequence[Example]:
    """The training rows, all of (one of) the wanted forms: of the file `data`, or of the task if it is such a file.

    A file is split as it is where it is the task, so its held-out rows are never learnt from. Raises UserError where
    there is no data or it has another form.
    """
    if not data and not task.path and task.grader is not None:
        raise UserError(f"{name} learns from data: give --data FILE, or make it from the task (see `foresight data`).")
    return of_form((task if _own(data, task) else text.dataset(data)).train, wanted, name, data or task.name)


def _own(data: str, task: TextTask) -> bool:
    """Whether what is trained on is the task's."""
    return not data or (bool(task.path) and Path(data).resolve() == Path(task.path).resolve())


def about(data: str, task: TextTask) -> str:
    """What a run with the file `data` (or without) trains on and is measured on, and what its rewards are given."""
    sizes = task.sizes() if _own(data, task) else f"trained on {data}, measured on {len(task.test):,} held-out examples"
    return "; ".join(filter(None, (sizes, task.given())))


def of_form(
    rows: Sequence[Example], wanted: str | tuple[str, ...], name: str, source: str = "the held-out data"
) -> Sequence[Example]:
    """The same rows. Raises UserError unless they are of (one of) the wanted forms, which `name` learns from."""
    found = forms.form(rows[0].columns)
    forms_wanted = (wanted,) if isinstance(wanted, str) else wanted
    if found not in forms_wanted:
        raise UserError(
            f"{name} needs rows of the form '{' or '.join(forms_wanted)}', but {source} has '{found}': see "
            "docs/data.md."
        )
    return rows


def corpus(policy: LanguageModel, rows: Sequence[Example], answers: Answers, max_tokens: int) -> Corpus:
    """Tokenise prompts and their answers; a row of more than `max_tokens` is left out, as half an answer teaches harm.

    Raises UserError if no row is short enough and, naming the row, where one cannot be written (see `encode`).
    """
    limit = min(max_tokens, policy.context)
    kept = Corpus([], [], [], 0)
    for row in rows:
        try:
            pairs = [encode(policy, row.prompt, answer) for answer in answers(row)]
        except UserError as error:
            raise UserError(f"{row.place or f'The prompt {row.question[:60]!r}'}: {error}") from error
        if all(len(prompt) + len(completion) <= limit for prompt, completion in pairs):
            kept.examples.append(row)
            kept.prompts.append(pairs[0][0])
            kept.completions.append([completion for _, completion in pairs])
    if not kept.examples:
        raise UserError(f"All {len(rows)} rows are longer than {limit} tokens: raise max_tokens or shorten them.")
    return dataclasses.replace(kept, left_out=len(rows) - len(kept.examples))


def encode(policy: LanguageModel, prompt: Prompt, completion: str) -> tuple[list[int], list[int]]:
    """Ids of a prompt, exactly as the sampler would be given it, and of a completion with the token that ends it.

    Raises UserError if the chat template writes a prompt otherwise once an answer follows it.
    """
    tokenizer, head = policy.tokenizer, policy.encode(prompt)
    if tokenizer.chat_template is None:
        asked = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        said = asked + completion
        whole = list(tokenizer.encode(said))
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        answered = [*messages, {"role": "assistant", "content": completion}]
        whole = list(templated(tokenizer, answered, return_dict=False))
        if whole[: len(head)] != head:
            asked = templated(tokenizer, messages, add_generation_prompt=True, tokenize=False)
            said = templated(tokenizer, answered, tokenize=False)
            if not said.startswith(asked):
                raise UserError(
                    "The chat template writes the prompt otherwise when an answer follows (it drops the generation "
                    "prompt or rewrites earlier turns), so what is learnt would not be what is sampled: use a template "
                    "that only appends."
                )
    if whole[: len(head)] != head:  # tokens merge across the seam (blanks, newlines), which a sampler could never do
        whole = head + _alone(tokenizer, head, said[len(asked) :])
    tail = whole[len(head) :]
    ends = [i for i, token in enumerate(tail) if token in policy.stop_ids]
    if ends:
        return head, tail[: ends[0] + 1]  # what a template writes after the end is never sampled
    return head, [*tail, *policy.stop_ids[:1]] if tokenizer.eos_token_id is None else [*tail, tokenizer.eos_token_id]


def _alone(tokenizer: Any, head: list[int], text: str) -> list[int]:
    """Ids of a text that goes on after `head`: without the beginning or the blank that some put before a whole text."""

    def ids(words: str) -> list[int]:
        return list(tokenizer.encode(words, add_special_tokens=False))

    end, read = tokenizer.eos_token, str(tokenizer.decode(head)) + text
    after = [] if end is None else ids(end + text)[1:]
    ways = [ids(text), after, ids(text.removeprefix(" "))]
    return next((way for way in ways if tokenizer.decode(head + way) == read), ways[0])


def step_ends(policy: LanguageModel, batch: TokenBatch, rows: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Where the steps of answers end and whether they are right: `ends` (bool) and `labels` `[P, T]`.

    Steps stand on lines of their own; a step ends with the last token that holds a part of it.
    """
    ends = torch.zeros(len(rows), batch.completion.shape[-1], dtype=torch.bool)
    labels = torch.zeros(ends.shape)
    for p, row in enumerate(rows):
        ids = batch.completion[p, 0, : batch.length[p, 0]].tolist()
        written = [len(policy.decode(ids[: t + 1])) for t in range(len(ids))]  # characters after each token
        first = str(row.columns["completions"][0])
        ahead = len(first) - len(first.lstrip())  # which a template may leave out, as it may write before the step
        target = max(policy.decode(ids).find(first.strip()), 0) - ahead - 1
        for step, right in zip(row.columns["completions"], row.columns["labels"], strict=True):
            target += len(step) + 1
            place = next((t for t, count in enumerate(written) if count >= target), len(ids) - 1)
            ends[p, place], labels[p, place] = True, float(right)
    return ends, labels
