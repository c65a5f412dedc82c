"""Rows of language datasets in the usual forms, checked one by one: every error names the file and the row.

| form | columns |
|---|---|
| prompt | `prompt`, and any columns for the grader |
| demonstration | `prompt` and `completion`; or `messages` that end with the assistant's |
| labeled | a demonstration, and `label`: true (1) if it is good, false (0) if it is bad |
| preference | `prompt`, `chosen`, `rejected`, optionally `margin`; or `chosen` and `rejected` with a shared prefix |
| stepwise | `prompt`, `completions` (the steps), `labels` (whether each is right), optionally `delimiter` |

Each is plain (strings) or conversational (lists of `{"role", "content"}`). Conversations may be ShareGPT's, too (the
column `conversations` of `{"from", "value"}`), and messages of the assistant may have `tool_calls`; the column `tools`
holds the available functions, as JSON schemas.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import importlib
import io
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foresight.data.text import check_characters
from foresight.errors import UserError

Message = dict[str, Any]  # of a conversation: `role`, `content`, and what a chat template knows besides

TEXTS = ("prompt", "answer", "completion", "chosen", "rejected")  # columns of a CSV file that are never numbers
SPEAKERS = {  # of ShareGPT, with their roles
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
MOST_FILES = 10_000  # in the folder of a data set
LARGEST = 1e38  # of a margin: the loss computes in float32
FORMS = ("preference", "stepwise", "labeled", "demonstration", "prompt")
REPLY = "_reply"  # the column of a completion that calls tools, as a message; `reply` may be the user's


def read(path: str) -> list[dict[str, Any]]:
    """The rows of a JSON, JSONL, CSV, TSV or Parquet file, of a dataset on disk, or of a hub id that `datasets` loads.

    A column of a CSV or TSV file is numeric (or boolean) if all of its fields are, except `prompt`, `answer`,
    `completion`, `chosen` and `rejected`, which are strings; an empty field is None. Raises UserError, with the
    row if there is one, if it cannot be read.
    """
    file = Path(path)
    kind = file.suffix.lower()
    if kind in _READERS and file.is_file():
        return _READERS[kind](path, _text(file))
    if kind in (*_READERS, ".parquet") and not file.exists():
        raise UserError(f"There is no file {path}.")
    whole = file.is_dir() and (file / "dataset_info.json").is_file()
    if file.is_dir() and not whole:
        _require_a_data_set(file)
    datasets = importlib.import_module("datasets")
    try:
        if kind == ".parquet":
            table = datasets.load_dataset("parquet", data_files=str(file), split="train")
        elif whole:
            table = datasets.load_from_disk(str(file))
        else:
            table = datasets.load_dataset(path, split="train")
    except Exception as error:  # the package raises many types of errors
        raise UserError(f"Cannot load the dataset {path}: {error}") from error
    return [dict(row) for row in table]


def _require_a_data_set(folder: Path) -> None:
    """Raise UserError for a folder of too many files: `datasets` would look at them all, and copy what it can read."""
    names = itertools.chain.from_iterable(names for _, _, names in os.walk(folder))
    if sum(1 for _ in itertools.islice(names, MOST_FILES + 1)) > MOST_FILES:
        raise UserError(
            f"{folder} is a folder of more than {MOST_FILES:,} files, which is no data set: name its file with rows, "
            "or the folder of the data set."
        )


def _text(file: Path) -> str:
    """The text of a file, without a byte order mark. Raises UserError if it is not Unicode."""
    data = file.read_bytes()
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(
            f"{file}, line {line} is not UTF-8 (byte 0x{data[error.start]:02x}): save it as UTF-8, or convert it, "
            f"for example from Latin-1: iconv -f latin1 -t utf-8 {file} > utf8-{file.name}"
        ) from error


def _json(path: str, text: str) -> list[dict[str, Any]]:
    """One row per line, or all rows in one array."""
    if text.lstrip()[:1] == "[":
        try:
            table = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {error.lineno} is not JSON: {error.msg} at column {error.colno}.") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} cannot be read as JSON: {_without_advice(error)}. Shorten it.") from error
        for number, row in enumerate(table, 1):
            if not isinstance(row, dict):
                raise UserError(f"{path}, row {number} must be an object with columns, but is {str(row)[:60]!r}.")
        return list(table)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}. Write one object per "
                    "line, or one array of all of them."
                ) from error
            except (ValueError, RecursionError) as error:
                why = _without_advice(error)
                raise UserError(f"{path}, line {number} cannot be read as JSON: {why}. Shorten it.") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number} must be an object with columns, but is {line[:60]!r}.")
            rows.append(row)
    return rows


def _without_advice(error: Exception) -> str:
    """Why Python does not read a JSON text that is valid: a number of thousands of digits, or deep lists."""
    return str(error).partition(";")[0]


def _table(path: str, text: str) -> list[dict[str, Any]]:
    """Rows below a header line."""
    first = text.partition("\n")[0]
    delimiter = "\t" if path.lower().endswith(".tsv") else ";" if ";" in first and "," not in first else ","
    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))
    try:
        names, *fields = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    except (csv.Error, ValueError) as error:
        raise UserError(f"{path} is not a table with a header line: {error}.") from error
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UserError(f"{path} has several columns named '{twice[0]}': give each its own name.")
    for number, row in enumerate(fields, 1):
        if row and len(row) != len(names):
            raise UserError(
                f"{path}, row {number} has {len(row)} fields, but the first line names {len(names)} columns "
                f"({', '.join(names)}): put fields that hold commas or line breaks in double quotes."
            )
    found = [
        _column(name, values) for name, values in zip(names, zip(*filter(None, fields), strict=True), strict=False)
    ]
    return [dict(zip(names, row, strict=True)) for row in zip(*found, strict=True)]


def _column(name: str, values: Sequence[str]) -> Sequence[str | bool | float | None]:
    if name not in TEXTS:
        if {value.lower() for value in values} - {""} <= {"true", "false"}:
            return [value.lower() == "true" if value else None for value in values]
        with contextlib.suppress(ValueError):
            return [_number(value) if value else None for value in values]
    return [value or None for value in values]


def _number(text: str) -> int | float:
    """A text as a JSON number, which 007 and nan are not. Raises ValueError."""
    if text[:1] not in "-0123456789":
        raise ValueError(text)
    number: int | float = json.loads(text)
    return number


_READERS = {".jsonl": _json, ".json": _json, ".csv": _table, ".tsv": _table}


def form(row: dict[str, Any]) -> str:
    """The form of a row, one of `FORMS`, from its columns."""
    has = {key for key, value in row.items() if value is not None}
    if {"chosen", "rejected"} <= has:
        return "preference"
    if {"completions", "labels"} <= has:
        return "stepwise"
    if has & {"completion", "messages", "conversations"}:
        return "labeled" if isinstance(row.get("label"), bool) else "demonstration"
    return "prompt"


def check(rows: Sequence[dict[str, Any]], path: str) -> tuple[str, list[dict[str, Any]]]:
    """The form of the rows, and the rows normalized: `prompt` as it is, all completions as strings.

    Raises UserError, naming the row, if a row is invalid or has another form than the first.
    """
    if not rows:
        raise UserError(f"{path} has no rows.")
    rows = _with_labels(rows)
    kind = form(rows[0])
    checked = []
    for number, row in enumerate(rows, 1):
        place = f"{path}, row {number}"
        if form(row) != kind:
            raise UserError(f"{place} is of the form '{form(row)}', but row 1 is of the form '{kind}': use one form.")
        row = _normalized(row, place)
        parts = _PARTS[kind](row, place)
        check_characters([parts, row.get("tools"), row.get("delimiter")], place)
        checked.append({**row, **parts})
    return kind, checked


def _with_labels(rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The rows of answers with `label` as a boolean if all labels are 0 or 1. Other labels, such as classes, stay."""
    labels = [row["label"] for row in rows if row.get("label") is not None]
    if form(rows[0]) not in ("demonstration", "labeled") or any(label not in (0, 1) for label in labels):
        return rows
    return [row if row.get("label") is None else {**row, "label": bool(row["label"])} for row in rows]


def _normalized(row: dict[str, Any], place: str) -> dict[str, Any]:
    """The row with a ShareGPT conversation as messages, and with tools as a list."""
    if row.get("conversations") is not None and row.get("messages") is None:
        messages = _text_or_messages(row["conversations"], f"{place}: the column 'conversations'")
        if row.get("system") and isinstance(messages, list) and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": row["system"]}, *messages]
        row = {**row, "messages": messages}
    if (tools := row.get("tools")) is None:
        return row
    tools = _parsed(tools, f"{place}: the column 'tools'") if isinstance(tools, str) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{place}: 'tools' must be a list of JSON schemas of functions, but is {str(tools)[:60]!r}.")
    return {**row, "tools": tools or None}


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON: {error.msg} at column {error.colno} of {text[:60]!r}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} cannot be read as JSON: {_without_advice(error)}. Shorten it.") from error


def check_prompt(row: dict[str, Any], given: Any, place: str) -> None:
    """Raise UserError if the messages of a checked row replaced the `given` column `prompt` by another prompt.

    They may begin with messages of the system, which a prompt need not repeat.
    """
    if not given or row.get("messages") is None or form(row) not in ("demonstration", "labeled"):
        return
    found = _text_or_messages(given, f"{place}: the column 'prompt'")
    asked = [{"role": "user", "content": found}] if isinstance(found, str) else found
    if asked not in (row["prompt"], [message for message in row["prompt"] if message["role"] != "system"]):
        raise UserError(
            f"{place}: the prompt {str(given)[:40]!r} is not what its conversation ('messages') asks, and only one of "
            "the two can be answered and graded: leave one of the columns out."
        )


def _prompt(row: dict[str, Any], place: str) -> str | list[Message]:
    if not row.get("prompt"):
        raise UserError(f"{place}: no column 'prompt'. It has: {', '.join(map(str, row))}.")
    return _text_or_messages(row["prompt"], f"{place}: the column 'prompt'")


def _demonstration(row: dict[str, Any], place: str) -> dict[str, Any]:
    if row.get("completion") is not None:
        reply = _reply(row["completion"], f"{place}: 'completion'")
        parts: dict[str, Any] = {"prompt": _prompt(row, place), "completion": reply["content"]}
        parts |= {"messages": None} if "messages" in row else {}  # replaced by the prompt and the completion
        parts |= {REPLY: None} if REPLY in row else {}
        return {**parts, REPLY: reply} if reply.get("tool_calls") else parts
    messages = _text_or_messages(row["messages"], f"{place}: the column 'messages'")
    if isinstance(messages, str) or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise UserError(f"{place}: 'messages' must be a conversation that ends with the assistant's message.")
    return {"prompt": messages[:-1], "completion": messages[-1]["content"], "messages": messages}


def _preference(row: dict[str, Any], place: str) -> dict[str, Any]:
    margin = row.get("margin")
    if margin is not None and not (isinstance(margin, int | float) and -LARGEST < margin < LARGEST):
        raise UserError(f"{place}: 'margin' must be a number that is finite, but is {repr(margin)[:60]}.")
    if not row.get("prompt") and row.get("messages") is not None:  # ShareGPT's prompt
        row = {**row, "prompt": row["messages"]}
    if row.get("prompt") and not (_whole_conversation(row["chosen"]) and _whole_conversation(row["rejected"])):
        prompt = _prompt(row, place)
        chosen, rejected = (_answer(row[name], f"{place}: '{name}'") for name in ("chosen", "rejected"))
    else:
        prompt, chosen, rejected = _shared(row["chosen"], row["rejected"], place)
    if chosen == rejected:
        raise UserError(f"{place}: 'chosen' and 'rejected' are the same.")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _whole_conversation(value: object) -> bool:
    """Whether this is a whole conversation, which already contains the prompt."""
    return (
        isinstance(value, list)
        and len(value) > 1
        and isinstance(value[0], dict)
        and value[0].get("role") != "assistant"
    )


def _shared(chosen: Any, rejected: Any, place: str) -> tuple[str | list[Message], str, str]:
    """Two completions split at their shared prefix, which is the prompt: messages, or text up to a space."""
    if not any(isinstance(chosen, kind) and isinstance(rejected, kind) for kind in (str, list)):
        raise UserError(f"{place}: no column 'prompt', and 'chosen' and 'rejected' are not two texts or two lists.")
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
        raise UserError(f"{place}: no column 'prompt', and 'chosen' and 'rejected' have no shared prefix.")
    return _text_or_messages(shared, f"{place}: the prompt"), chosen, rejected


def _stepwise(row: dict[str, Any], place: str) -> dict[str, Any]:
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, list) or not steps or not all(isinstance(s, str) and s.strip() for s in steps):
        raise UserError(f"{place}: 'completions' must be a list of steps, each a non-empty string.")
    if not isinstance(labels, list) or len(labels) != len(steps) or not all(x in (0, 1) for x in labels):
        raise UserError(f"{place}: 'labels' must be true or false for each of the {len(steps)} steps.")
    if not isinstance(between := row.get("delimiter"), str | None) or between == "":
        raise UserError(f"{place}: 'delimiter' must be the text between two steps, but is {between!r}.")
    return {"prompt": _prompt(row, place), "completions": steps, "labels": [bool(x) for x in labels]}


_PARTS: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "prompt": lambda row, place: {"prompt": _prompt(row, place)},
    "demonstration": _demonstration,
    "labeled": _demonstration,
    "preference": _preference,
    "stepwise": _stepwise,
}


def _answer(value: object, place: str) -> str:
    """A completion as text: itself, or the content of its only message."""
    reply = _reply(value, place)
    if reply.get("tool_calls"):
        raise UserError(f"{place} calls a tool: only demonstrations may.")
    return str(reply["content"])


def _reply(value: object, place: str) -> Message:
    """A completion as one message of the assistant."""
    found = _text_or_messages([value] if isinstance(value, dict) else value, place)
    if isinstance(found, str):
        return {"role": "assistant", "content": found}
    if len(found) != 1 or found[0].get("role") != "assistant":
        raise UserError(f"{place} must be one message of the assistant, but has {len(found)}.")
    return dict(found[0])


def _text_or_messages(value: object, place: str) -> str | list[Message]:
    if isinstance(value, str):
        if value:
            return value
        raise UserError(f"{place} is empty.")
    if not isinstance(value, list) or not value:
        raise UserError(f"{place} must be a text or a list of messages, but is {str(value)[:60]!r}.")
    return [_message(message, place) for message in value]


def _message(message: object, place: str) -> Message:
    """A message with a role, a text (empty if it only calls tools), and calls whose arguments are objects."""
    if isinstance(message, dict) and "from" in message and "role" not in message:
        message = _sharegpt_message(message, place)
    if not isinstance(message, dict) or message.get("role") is None:
        raise UserError(f"{place}: a message is {{'role': ..., 'content': text}}, but one is {str(message)[:60]!r}.")
    known = {key: value for key, value in message.items() if value is not None}  # tables fill missing fields with None
    if known.get("tool_calls"):
        if not isinstance(known["tool_calls"], list):
            raise UserError(f"{place}: tool_calls is a list of calls, not {str(known['tool_calls'])[:60]!r}.")
        known["tool_calls"] = [_call(call, place) for call in known["tool_calls"]]
        known.setdefault("content", "")
    if isinstance(parts := known.get("content"), list) and all(_is_text(part) for part in parts):
        known["content"] = "".join(part["text"] for part in parts)
    if not isinstance(known.get("content"), str):
        raise UserError(f"{place}: a message is {{'role': ..., 'content': text}}, but one is {str(message)[:60]!r}.")
    return known


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _sharegpt_message(message: Message, place: str) -> Message:
    """A message of ShareGPT, `{"from", "value"}`, with a role and a content."""
    speaker, value = message["from"], message.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise UserError(f"{place}: a message is from {speaker!r}. ShareGPT's speakers are: {', '.join(SPEAKERS)}.")
    if speaker != "function_call":
        return {"role": SPEAKERS[speaker], "content": value}
    calls = _parsed(value, f"{place}: a function call") if isinstance(value, str) else value
    return {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _call(call: object, place: str) -> dict[str, Any]:
    """A tool call in the form of chat templates: `{"type", "function": {"name", "arguments": object}}`."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(
            f"{place}: a tool call is {{'function': {{'name': ..., 'arguments': ...}}}}, but one is {str(call)[:60]!r}."
        )
    given = function.get("arguments") or {}
    if isinstance(given, str):
        given = _parsed(given, f"{place}: the arguments of the tool call '{function['name']}'")
    return {**(call if "function" in call else {}), "type": "function", "function": {**function, "arguments": given}}
