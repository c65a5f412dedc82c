"""Graders of short answers: the last integer of a completion, or how it ends."""

from __future__ import annotations

import re
from collections.abc import Sequence

from foresight.envs.text.task import Example


def last_integer(text: str) -> int | None:
    """The last number in a text; None if it is not an integer, or if there is none. "1,000" is one thousand."""
    last = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?", text)[-1:]
    return int(last[0].replace(",", "")) if last and "." not in last[0] else None


def grade_last_integer(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """1 where the last number in the completion is the example's answer, an integer; else 0."""
    return [float(last_integer(c) == int(e.answer or "")) for e, c in zip(examples, completions, strict=True)]


def grade_ending(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """1 where the completion ends with the example's answer, as a whole word; else 0."""

    def right(answer: str, completion: str) -> bool:
        ending = completion.strip().rstrip(".").rstrip()
        return ending == answer or bool(re.search(rf"(?<!\w){re.escape(answer)}$", ending))

    return [float(right(str(e.answer).strip().rstrip("."), c)) for e, c in zip(examples, completions, strict=True)]
