"""Completions and conversations of a run, as `media/samples.jsonl` holds them: searched, sorted, and read turn by turn.

A log is read once, and then only what was appended. Conversations are read with the functions that the environment
uses: a call is what `envs.tools.tool` takes for one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foresight.envs.tools import tool
from foresight.errors import UserError, unknown
from foresight.studio.encode import number

ORDERS = ("step", "best", "worst", "team")
LONGEST = 200  # rows of a page
TEAM = "team"  # the role of the last message of a conversation with sub-agents, which holds their documents
DEEPEST, MOST = 20, 400  # levels of delegation, and sub-agents of one conversation, that are shown
FACTS = ("tokens", "read", "budget", "ended", "answer", "version", "parts", "tools", "documents")  # of a sub-agent


@dataclasses.dataclass
class Log:
    """The rows of one log, read so far."""

    inode: int = 0
    offset: int = 0
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # held by who reads

    def read(self, file: Path) -> list[dict[str, Any]]:
        """All whole rows; from the start again if the file is another one or is shorter (a resumed run)."""
        try:
            stat = file.stat()
            if stat.st_ino != self.inode or stat.st_size < self.offset:
                self.inode, self.offset, self.rows = stat.st_ino, 0, []
            with file.open("rb") as stream:
                stream.seek(self.offset)
                chunk = stream.read()
        except OSError:
            return []
        whole = chunk.rfind(b"\n") + 1  # a row that is being written is left for the next time
        self.offset += whole
        for line in chunk[:whole].split(b"\n"):
            try:
                row = json.loads(line, parse_constant=lambda _: None)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and type(row.get("step")) is int:
                self.rows.append({**row, "index": len(self.rows)})
        return self.rows


def page(
    rows: Sequence[dict[str, Any]],
    search: str = "",
    sort: str = "step",
    step: int | None = None,
    held_out: bool | None = None,
    start: int = 0,
    count: int = 50,
) -> dict[str, Any]:
    """Rows that contain `search`, by "step" (newest first), "best", "worst" or "team" (size), `count` from `start`.

    `held_out`: those of evaluations, or those of training only. `held_out_steps` are the steps of evaluations. Of a
    conversation only the number of its messages is given, as `transcript`, and that of its sub-agents, as `members`.
    """
    if sort not in ORDERS:
        raise unknown("order", sort, ORDERS)
    steps = sorted({row["step"] for row in rows})
    evaluated = sorted({row["step"] for row in rows if row.get("held_out")})
    found = [
        row
        for row in rows
        if (step is None or row["step"] == step) and (held_out is None or bool(row.get("held_out")) == held_out)
    ]
    if search:
        found = [row for row in found if search.lower() in json.dumps(row, ensure_ascii=False).lower()]
    if sort == "step":
        found.sort(key=lambda row: -row["step"])
    elif sort == "team":
        found.sort(key=lambda row: (-_brief(row).get("members", 0), -row["step"]))
    else:
        sign = -1 if sort == "best" else 1
        found.sort(key=lambda row: sign * number(row.get("reward"), math.inf * sign))
    shown = [_brief(row) for row in found[start : start + min(count, LONGEST)]]
    return {"total": len(found), "steps": steps, "held_out_steps": evaluated, "rows": shown}


def conversation(rows: Sequence[dict[str, Any]], index: int) -> dict[str, Any]:
    """A row with its `turns`, its `members`, and its `versions`: the same question at other steps, by step.

    `members` are the sub-agents, as `member` returns them.
    Raises UserError if there is no such row, or it is no conversation.
    """
    if not 0 <= index < len(rows) or not _talks(rows[index]):
        raise UserError(f"The row {index} of this run is no conversation.")
    row = rows[index]
    same = [one for one in rows if one.get("prompt") == row.get("prompt") and _talks(one)]
    versions = [{key: one.get(key) for key in ("index", "step", "reward", "held_out")} for one in same]
    messages, members = _split(row["transcript"])
    shown = {"turns": turns(messages), "members": _members(members, DEEPEST, [MOST])}
    return {**_brief(row), **shown, "versions": sorted(versions, key=lambda one: one["step"])}


def member(document: dict[str, Any]) -> dict[str, Any]:
    """A conversation of a team as its trace holds it (`agents.team`), with its `turns` and its own `members`.

    `path` is its number after those of who delegated, which is 0 for the first of a team; `goal` what it was asked.
    """
    return _member(document, DEEPEST, [MOST])


def _member(document: dict[str, Any], depth: int, left: list[int]) -> dict[str, Any]:
    messages = document.get("messages")
    read = turns(messages if isinstance(messages, list) else [])
    asked = next((one["text"] for one in read if one["role"] == "user"), "")
    path = document.get("path")
    return {
        "path": [0, *(number for number in path[1:] if type(number) is int)] if isinstance(path, list) else [],
        "goal": str(document.get("goal") or asked),
        **{key: document[key] for key in FACTS if document.get(key) is not None},
        "turns": read,
        "members": _members(document.get("members"), depth - 1, left),
    }


def _members(documents: Any, depth: int, left: list[int]) -> list[dict[str, Any]]:
    """The first sub-agents; `left` is how many more may be shown."""
    found = []
    for document in documents if isinstance(documents, list) and depth > 0 else []:
        if left[0] > 0 and isinstance(document, dict):
            left[0] -= 1
            found.append(_member(document, depth, left))
    return found


def _split(transcript: list[Any]) -> tuple[list[Any], list[Any]]:
    """The messages of a conversation, and the documents of its sub-agents."""
    last = transcript[-1] if transcript else None
    if not isinstance(last, dict) or last.get("role") != TEAM:
        return transcript, []
    members = last.get("members")
    return transcript[:-1], members if isinstance(members, list) else []


def _count(documents: Any, depth: int = DEEPEST) -> int:
    found = [one for one in documents if isinstance(one, dict)] if isinstance(documents, list) and depth else []
    return len(found) + sum(_count(one.get("members"), depth - 1) for one in found)


def turns(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of a conversation, each as `turn` returns it."""
    return [turn(message) for message in messages if isinstance(message, dict)]


def turn(message: dict[str, Any]) -> dict[str, Any]:
    """A message: its `role` and `text`; of a model its `calls`, of an environment the `results` of calls.

    A message that answers calls has the role "tool".
    """
    role, content = str(message.get("role")), str(message.get("content", ""))
    found: dict[str, Any] = {"role": role, "text": content, "calls": [], "results": []}
    if role == "assistant":
        found |= {key: message[key] for key in ("tokens", "logprob") if key in message}
        calls = [dataclasses.asdict(call) for call in tool.calls(content)]
        return {**found, "text": tool.answer(content), "calls": calls}
    if role != "system" and tool.RESULT in content:
        before, *blocks = content.split(tool.RESULT)
        parts = [block.partition(tool.RESULT_END) for block in blocks]
        results = [{"text": text, "failed": text.startswith("error:")} for text, _, _ in parts]
        rest = "".join([before, *(after for _, _, after in parts)]).strip()
        return {**found, "role": "tool", "text": rest, "results": results}
    return found


def talks(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether there is a conversation among the rows."""
    return any(_talks(row) for row in rows)


def _talks(row: dict[str, Any]) -> bool:
    return isinstance(row.get("transcript"), list)


def _brief(row: dict[str, Any]) -> dict[str, Any]:
    if not _talks(row):
        return row
    messages, members = _split(row["transcript"])
    return {**row, "transcript": len(messages), "members": _count(members)}
