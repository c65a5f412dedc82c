"""A user's dataset as a text task: a JSONL file, or anything that the package `datasets` loads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foresight.data import forms
from foresight.envs.text.composite import function_parts, weighted_sum
from foresight.envs.text.graders import ending, grade_ending, is_numeric
from foresight.envs.text.rewards import REWARD_TIMEOUT
from foresight.envs.text.split import split
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError


def dataset(
    path: str,
    reward: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    held_out: int | None = None,
    seed: int = 0,
    prompt: str = "prompt",
    reward_timeout: float = REWARD_TIMEOUT,
) -> TextTask:
    """A JSONL file, or a dataset that the package `datasets` loads, with a reward function.

    Each row has the column `prompt` (a string, or a list of messages). `reward` is a function, or its path as
    `file.py:name` or `package.module:name`. It is called as `reward(prompts=..., completions=..., **columns)`,
    each a list with an item per completion, and returns a list of floats; None means unscorable. Completions of
    conversations are lists of one message, as in TRL. A function given by its path runs in a subprocess, and may take
    `reward_timeout` seconds for a batch (0: in this process, without a limit). It may be `async`. Of several, given as
    a list, the reward is the sum, and each is logged by its name; those that are `async` or in a subprocess run
    concurrently. Without `reward`, the last number of a completion, or its end, is compared with the column `answer`
    (`graders.grade_ending`). Where no answer is a number, votes are counted under the last line of a completion. Rows
    may have neither (see `data.forms`): nothing is graded then, as in training on
    demonstrations, preferences or a teacher.

    `held_out` rows are not trained on (default: 100, or a fifth of them if that is less). They may be a few more, since
    all rows of a prompt are on one side.
    """
    rows = [{**row, "prompt": row[prompt]} if prompt in row else row for row in forms.read(path)]
    if not rows or (forms.form(rows[0]) == "prompt" and len(rows) < 2):
        raise UserError(f"{path} has {len(rows)} rows: at least 2 are needed, one to train on and one held out.")
    prompts = [row.get("prompt") for row in rows]
    _, rows = forms.check(rows, path)
    columns = dict.fromkeys(itertools.chain.from_iterable(rows))
    rows = [{**columns, **row} for row in rows]  # a reward function gets every column, None where a row lacks it
    answered = any(row.get("answer") is not None for row in rows)
    graded = reward is not None or answered or prompt != "prompt"
    for number, (row, given) in enumerate(zip(rows, prompts, strict=True), 1):
        if graded:
            forms.check_prompt(row, given, f"{path}, row {number}")
        if reward is None and answered and row.get("answer") is None:
            raise UserError(f"{path}, row {number}: without a reward function every row needs the column 'answer'.")
    examples = [
        Example(
            row["prompt"], str(row["answer"]) if row.get("answer") is not None else None, row, (), f"{path}, row {n}"
        )
        for n, row in enumerate(rows, 1)
    ]
    golds = [example.answer for example in examples if example.answer is not None]
    extract = ending if golds and not any(map(is_numeric, golds)) else None
    if reward is None:
        task = split(Path(path).stem, examples, held_out, seed, grade_ending if answered else None)
        return dataclasses.replace(task, path=path, extract=extract)
    single = isinstance(reward, str) or callable(reward)
    rewards: list[Any] = [reward] if single else list(reward)  # type: ignore[arg-type]
    parts = function_parts(rewards, reward_timeout, tuple(columns))
    task = split(Path(path).stem, examples, held_out, seed, weighted_sum(parts))
    return dataclasses.replace(task, path=path, metric="reward", parts=() if single else parts, extract=extract)
