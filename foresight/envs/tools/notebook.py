"""`notebook`: notes by name that the model reads and changes. The notes at the end of an episode are graded."""

from __future__ import annotations

import random
import re
from typing import Any

from foresight.envs.tools import tool

NAMES = ("apples", "bread", "coffee", "eggs", "flour", "honey", "lemons", "milk", "onions", "rice", "salt", "tea")
LONGEST = 1_000  # characters of a note
MOST = 100  # notes


class Notebook:
    """Requests such as "Add 5 to the number in the note milk."; the outcome is 1 if the notes end as they should."""

    instruction = "You keep a notebook. Do what is asked, then end with: done."

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}
        self._wanted: dict[str, str] = {}

    @staticmethod
    def questions(size: int = 1_200, seed: int = 0) -> list[dict[str, Any]]:
        """`size` different requests about notebooks of 3 to 6 notes."""
        draw, rows = random.Random(seed), dict[str, dict[str, Any]]()
        while len(rows) < size:
            row = _request(draw)
            rows.setdefault(row["request"] + repr(row["notes"]), row)
        return list(rows.values())

    def reset(self, row: dict[str, Any]) -> str:
        """The request."""
        self._notes, self._wanted = dict(row["notes"]), dict(row["wanted"])
        return str(row["request"])

    def list_notes(self) -> str:
        """The names of all notes."""
        return ", ".join(sorted(self._notes))

    def read_note(self, name: str) -> str:
        """The text of a note."""
        return self._notes[name]

    @tool.writes
    def write_note(self, name: str, text: str) -> str:
        """Write a note, which replaces the one of that name."""
        if len(text) > LONGEST:
            raise ValueError(f"a note has at most {LONGEST} characters")
        if name not in self._notes and len(self._notes) >= MOST:
            raise ValueError(f"there are {MOST} notes already")
        self._notes[name] = text
        return "written"

    @tool.writes
    def delete_note(self, name: str) -> str:
        """Delete a note."""
        del self._notes[name]
        return "deleted"

    def reward(self, answer: str) -> float:
        """1 if all notes are as they should be and the answer states that it is done."""
        return float(self._notes == self._wanted and "done" in answer.lower())

    @staticmethod
    def script(messages: list[dict[str, str]]) -> str:
        """A demonstration: read, then write, then report."""
        request = next(m["content"] for m in messages if m["role"] == "user")
        results = [m["content"] for m in messages if m["content"].startswith(tool.RESULT)]
        first = results[0].removeprefix(tool.RESULT).removesuffix(tool.RESULT_END) if results else ""
        steps: tuple[str, ...]
        if found := re.match(r"Add (\d+) to the number in the note (\w+)\.", request):
            added = str(int(first or 0) + int(found[1]))
            steps = tool.write("read_note", name=found[2]), tool.write("write_note", name=found[2], text=added)
        elif found := re.match(r"Copy the note (\w+) to the note (\w+)\.", request):
            steps = tool.write("read_note", name=found[1]), tool.write("write_note", name=found[2], text=first)
        elif found := re.match(r"Rename the note (\w+) to (\w+)\.", request):
            written = tool.write("write_note", name=found[2], text=first)
            steps = tool.write("read_note", name=found[1]), written, tool.write("delete_note", name=found[1])
        else:
            steps = (tool.write("delete_note", name=re.findall(r"\w+", request)[-1]),)
        return (*steps, "done")[len(results)]


def _request(draw: random.Random) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(4, 7))
    notes = {name: str(draw.randint(1, 99)) for name in names[:-1]}
    wanted, (name, other), absent = dict(notes), names[:2], names[-1]
    kind = draw.choice(("add", "copy", "rename", "delete"))
    if kind == "add":
        more = draw.randint(1, 99)
        wanted[name] = str(int(notes[name]) + more)
        request = f"Add {more} to the number in the note {name}."
    elif kind == "copy":
        wanted[other] = notes[name]
        request = f"Copy the note {name} to the note {other}."
    elif kind == "rename":
        wanted[absent] = wanted.pop(name)
        request = f"Rename the note {name} to {absent}."
    else:
        del wanted[name]
        request = f"Delete the note {name}."
    return {"notes": notes, "wanted": wanted, "request": request}
