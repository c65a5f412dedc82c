"""Sorting digits: the task of Graph of Thoughts (Besta et al. 2023, arXiv:2308.09687, §5.1), with its error score."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Sequence

from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError

ASK = "Sort: "


def sorting(length: int = 64, size: int = 1000, held_out: int = 100, seed: int = 0) -> TextTask:
    """Questions like "Sort: 3 1 9 0": `length` digits, of which some may be equal. No list is asked twice.

    Graded 1 if the whole list is right.
    """
    if length < 1 or size < 1 or held_out < 1:
        raise UserError(f"length is {length}, size {size} and held_out {held_out}: all must be at least 1.")
    if size + held_out > 10**length // 2:  # half: samples are rejected until they differ
        raise UserError(
            f"size {size} and held_out {held_out} are too many for lists of {length} digits: together they must be at "
            f"most {10**length // 2:,}."
        )
    draw, seen = random.Random(f"sorting {seed}"), dict[tuple[int, ...], None]()
    while len(seen) < size + held_out:
        seen[tuple(draw.randrange(10) for _ in range(length))] = None
    examples = [Example(ASK + listed(row), listed(sorted(row)), {"digits": list(row)}) for row in seen]
    return TextTask(
        "sorting", examples[held_out:], examples[:held_out], grade, extract=lambda text: listed(digits(text))
    )


def listed(row: Sequence[int]) -> str:
    """Digits as text."""
    return " ".join(map(str, row))


def digits(text: str) -> list[int]:
    """The digits in a text."""
    return [int(word) for word in re.findall(r"\d", text)]


def error(given: Sequence[int], found: Sequence[int]) -> int:
    """The paper's error score: wrong counts of digits, plus adjacent pairs out of order. 0: sorted."""
    counts = Counter(given)
    counts.subtract(Counter(found))
    return sum(map(abs, counts.values())) + sum(a > b for a, b in itertools.pairwise(found))


def grade(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """1 where the digits of the completion are the question's, sorted; else 0."""
    return [float(error(e.columns["digits"], digits(c)) == 0) for e, c in zip(examples, completions, strict=True)]
