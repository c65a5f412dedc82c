"""Rows of language data in the forms that people have, checked one by one: every error names the file and the row.

| form | columns |
|---|---|
| prompt | `prompt`, and whatever a grader needs |
| demonstration | `prompt` and `completion`; or `messages`, whose last one is the completion |
| judged | a demonstration, and `label`: true where it is good, false where it is bad |
| preference | `prompt`, `chosen`, `rejected`, perhaps `margin`; or `chosen` and `rejected` that begin alike |
| stepwise | `prompt`, `completions` (the steps) and `labels` (whether each is right) |

Each is plain (strings) or conversational (lists of `{"role", "content"}`).
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foresight.errors import UserError

FORMS = ("preference", "stepwise", "judged", "demonstration", "prompt")


def read(path: str) -> list[dict[str, Any]]:
    """The rows of a JSONL or Parquet file, of a dataset on disk, or of a hub id that the package `datasets` loads.

    Raises UserError, with the row where there is one, if it cannot be read.
    """
    file = Path(path)
    if file.suffix in (".jsonl", ".json") and file.is_file():
        rows = []
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(
                        f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}."
                    ) from error
                if not isinstance(row, dict):
                    raise UserError(f"{path}, line {number} must be an object with columns, but is {line[:60]!r}.")
                rows.append(row)
        return rows
    if file.suffix in (".jsonl", ".json", ".parquet") and not file.exists():
        raise UserError(f"There is no file {path}.")
    datasets = importlib.import_module("datasets")
    try:
        if file.suffix == ".parquet":
            table = datasets.load_dataset("parquet", data_files=str(file), split="train")
        elif file.is_dir() and (file / "dataset_info.json").is_file():
            table = datasets.load_from_disk(str(file))
        else:
            table = datasets.load_dataset(path, split="train")
    except Exception as error:  # the package raises many kinds; all mean the same to the user
        raise UserError(f"Cannot load the dataset {path}: {error}") from error
    return [dict(row) for row in table]


def form(row: dict[str, Any]) -> str:
    """Which of `FORMS` the columns of a row make."""
    has = {key for key, value in row.items() if value is not None}
    if {"chosen", "rejected"} <= has:
        return "preference"
    if {"completions", "labels"} <= has:
        return "stepwise"
    if "completion" in has or "messages" in has:
        return "judged" if isinstance(row.get("label"), bool) else "demonstration"
    return "prompt"


def check(rows: Sequence[dict[str, Any]], path: str) -> tuple[str, list[dict[str, Any]]]:
    """The form of the rows and the rows in its plainest shape: `prompt` as it is, all completions as strings.

    Raises UserError, naming the row, where a row has another form than the first or is not what it should be.
    """
    if not rows:
        raise UserError(f"{path} has no rows.")
    kind = form(rows[0])
    checked = []
    for number, row in enumerate(rows, 1):
        place = f"{path}, row {number}"
        if form(row) != kind:
            raise UserError(f"{place} is of the form '{form(row)}', but row 1 is of the form '{kind}': use one form.")
        checked.append({**row, **_PARTS[kind](row, place)})
    return kind, checked


def _prompt(row: dict[str, Any], place: str) -> Any:
    if not row.get("prompt"):
        raise UserError(f"{place}: no column 'prompt'. It has: {', '.join(map(str, row))}.")
    return _text_or_messages(row["prompt"], f"{place}: the column 'prompt'")


def _demonstration(row: dict[str, Any], place: str) -> dict[str, Any]:
    if row.get("completion") is not None:
        return {"prompt": _prompt(row, place), "completion": _answer(row["completion"], f"{place}: 'completion'")}
    messages = _text_or_messages(row["messages"], f"{place}: the column 'messages'")
    if isinstance(messages, str) or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise UserError(f"{place}: 'messages' must be a conversation that ends with the assistant's message.")
    return {"prompt": messages[:-1], "completion": messages[-1]["content"]}


def _preference(row: dict[str, Any], place: str) -> dict[str, Any]:
    margin = row.get("margin")
    if margin is not None and not isinstance(margin, int | float):
        raise UserError(f"{place}: 'margin' must be a number, but is {margin!r}.")
    if row.get("prompt") and not (_asks(row["chosen"]) and _asks(row["rejected"])):
        prompt = _prompt(row, place)
        chosen, rejected = (_answer(row[name], f"{place}: '{name}'") for name in ("chosen", "rejected"))
    else:
        prompt, chosen, rejected = _shared(row["chosen"], row["rejected"], place)
    if chosen == rejected:
        raise UserError(f"{place}: 'chosen' and 'rejected' are the same.")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _asks(value: Any) -> bool:
    """Whether this is a whole conversation, which a prompt beside it only repeats."""
    return (
        isinstance(value, list)
        and len(value) > 1
        and isinstance(value[0], dict)
        and value[0].get("role") != "assistant"
    )


def _shared(chosen: Any, rejected: Any, place: str) -> tuple[Any, str, str]:
    """What two completions begin with is their prompt: messages, or text up to a space."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    shared = chosen[: sum(1 for _ in alike)]
    if isinstance(chosen, str) and isinstance(rejected, str):
        cut = shared.rfind(" ") if " " in shared else len(shared)
        shared, chosen, rejected = shared[:cut], chosen[cut:], rejected[cut:]
    else:
        chosen, rejected = (
            _answer(x[len(shared) :], f"{place}: the end of a conversation") for x in (chosen, rejected)
        )
    if not shared:
        raise UserError(f"{place}: no column 'prompt', and 'chosen' and 'rejected' do not begin alike.")
    return _text_or_messages(shared, f"{place}: the prompt"), chosen, rejected


def _stepwise(row: dict[str, Any], place: str) -> dict[str, Any]:
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, list) or not steps or not all(isinstance(s, str) and s.strip() for s in steps):
        raise UserError(f"{place}: 'completions' must be a list of steps, each a text that is not empty.")
    if not isinstance(labels, list) or len(labels) != len(steps) or not all(x in (0, 1) for x in labels):
        raise UserError(f"{place}: 'labels' must say true or false of each of the {len(steps)} steps.")
    return {"prompt": _prompt(row, place), "completions": steps, "labels": [bool(x) for x in labels]}


_PARTS = {
    "prompt": lambda row, place: {"prompt": _prompt(row, place)},
    "demonstration": _demonstration,
    "judged": _demonstration,
    "preference": _preference,
    "stepwise": _stepwise,
}


def _answer(value: Any, place: str) -> str:
    """A completion as text: itself, or the content of the one message that it is."""
    value = _text_or_messages(value, place)
    if isinstance(value, str):
        return value
    if len(value) != 1 or value[0].get("role") != "assistant":
        raise UserError(f"{place} must be one message of the assistant, but has {len(value)}.")
    return str(value[0]["content"])


def _text_or_messages(value: Any, place: str) -> Any:
    if isinstance(value, str):
        if value:
            return value
        raise UserError(f"{place} is empty.")
    if not isinstance(value, list) or not value:
        raise UserError(f"{place} must be a text or a list of messages, but is {str(value)[:60]!r}.")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            raise UserError(
                f"{place}: a message is {{'role': ..., 'content': text}}, but one is {str(message)[:60]!r}."
            )
    return [dict(message) for message in value]
