"""Completions and conversations of a run, as `media/samples.jsonl` holds them: searched, sorted, and read turn by turn.

A log is read once, and then only what was appended. Conversations are read with the functions that the environment
uses: a call is what `envs.tools.tool` takes for one.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foresight.envs.tools import tool
from foresight.errors import UserError, unknown

ORDERS = ("step", "best", "worst")
LONGEST = 200  # rows of a page


@dataclasses.dataclass
class Log:
    """The rows of one log, read so far."""

    inode: int = 0
    offset: int = 0
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

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
            except ValueError:
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
    """Rows that contain `search`, by "step" (newest first), "best" or "worst", `count` from `start`.

    `held_out`: those of evaluations, or those of training only. `held_out_steps` are the steps of evaluations. Of a
    conversation only the number of its messages is given, as `transcript`.
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
    else:
        sign = -1 if sort == "best" else 1
        found.sort(key=lambda row: sign * _reward(row, math.inf * sign))
    shown = [_brief(row) for row in found[start : start + min(count, LONGEST)]]
    return {"total": len(found), "steps": steps, "held_out_steps": evaluated, "rows": shown}


def conversation(rows: Sequence[dict[str, Any]], index: int) -> dict[str, Any]:
    """A row with its `turns`, and its `versions`: the same question at other steps, by step.

    Raises UserError if there is no such row, or it is no conversation.
    """
    if not 0 <= index < len(rows) or not _talks(rows[index]):
        raise UserError(f"The row {index} of this run is no conversation.")
    row = rows[index]
    same = [one for one in rows if one.get("prompt") == row.get("prompt") and _talks(one)]
    versions = [{key: one.get(key) for key in ("index", "step", "reward", "held_out")} for one in same]
    turns = [turn(message) for message in row["transcript"] if isinstance(message, dict)]
    return {**_brief(row), "turns": turns, "versions": sorted(versions, key=lambda one: one["step"])}


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
    return {**row, "transcript": len(row["transcript"])} if _talks(row) else row


def _reward(row: dict[str, Any], otherwise: float) -> float:
    reward = row.get("reward")
    return float(reward) if isinstance(reward, int | float) and not isinstance(reward, bool) else otherwise
