"""Graders of short answers: the last number of a completion, or how it ends."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence

from foresight.envs.text import exact
from foresight.envs.text.task import Example

CLOSING = string.whitespace + ".!*`\"')}"  # what may stand after an answer
OPENING = string.whitespace + "*`\"'({"  # and before it


def last_integer(text: str) -> int | None:
    """The last number in a text; None if it is not an integer, or if there is none. "1,000" is one thousand, "1,2"
    ends with 2.

    One of more than `exact.LONGEST` characters is none: `int` refuses thousands of digits.
    """
    last = re.findall(r"(?<![\w.])[-\u2212]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", text)[-1:]
    if not last or "." in last[0] or len(last[0]) > exact.LONGEST:
        return None
    return int(last[0].replace(",", "").replace("\u2212", "-"))


def grade_last_integer(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """1 where the last number in the completion is the example's answer, an integer; else 0."""
    return [float(last_integer(c) == int(e.answer or "")) for e, c in zip(examples, completions, strict=True)]


def grade_ending(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """1 where the completion gives the example's answer; else 0.

    An answer that is a number is compared with the last number in the completion, by value: "1,234" is 1234, 19.0 is
    19, and 3/4 is 0.75. Any other answer must be how the completion ends, as a whole word; spaces, closing punctuation
    and Markdown after it do not count.
    """
    return [float(_gives(str(e.answer).strip(), c)) for e, c in zip(examples, completions, strict=True)]


def scored(grades: Sequence[float]) -> list[float]:
    """The grades that are not NaN, which stands for an answer that could not be scored."""
    return [float(grade) for grade in grades if not math.isnan(grade)]


def ending(text: str) -> str:
    """The last line of a text without what may stand around an answer: what votes on words are counted under."""
    lines = text.strip().rstrip(CLOSING).splitlines()
    return lines[-1].lstrip(OPENING) if lines else ""


def is_numeric(answer: str) -> bool:
    """Whether an answer is compared as a number."""
    return exact.is_number(answer.strip().rstrip("."))


def _gives(answer: str, completion: str) -> bool:
    if is_numeric(answer):
        return exact.canonical(exact.last_number(completion)) == exact.canonical(exact.last_number(answer))
    ending, wanted = (text.strip().rstrip(CLOSING) or text.strip() for text in (completion, answer))
    return ending == wanted or (bool(wanted) and bool(re.search(rf"(?<![\w.,/+-]){re.escape(wanted)}$", ending)))
