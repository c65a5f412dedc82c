"""Sorting in parts: the plan of `graph_of_thoughts`, and a noisy sorter whose error rates are known.

The sorter is no language model. Its rates are those that one might have: per digit of the input, growing with the
length of the list, since long lists are where language models lose and repeat elements.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from foresight.envs.text.sorting import digits, error, listed
from foresight.envs.text.task import Example
from foresight.planning.reasoning.graph_of_thoughts import Plan

SORT, MERGE, IMPROVE, BETWEEN = "Sort: ", "Merge: ", "Improve: ", " | "


def plan() -> Plan:
    """Lists of digits: sort a part, merge two sorted lists, improve a result given its input."""

    def split(example: Example, parts: int) -> list[str]:
        row = example.columns["digits"]
        size = -(-len(row) // parts)
        return [listed(row[i : i + size]) for i in range(0, len(row), size)]

    return Plan(
        split,
        solve=lambda part: SORT + part,
        merge=lambda parts: MERGE + BETWEEN.join(parts),
        improve=lambda given, text: IMPROVE + given + BETWEEN + text,
        join=" ".join,
        error=lambda given, text: float(error(digits(given), digits(text))),
    )


def noisy_sorter(rate: float = 0.002, repair: float = 0.3) -> Callable[[str, random.Random], str]:
    """A function for `Scripted`. Each digit is lost or doubled with probability `rate` · n in a list of n digits.

    Merging makes a quarter of these errors, as only the ends of two sorted lists are compared. Improving repairs each
    wrong count with probability `repair`, and then makes the errors of a merge.
    """

    def reply(text: str, draw: random.Random) -> str:
        head, _, body = text.partition(": ")
        if head == "Sort":
            row = sorted(digits(body))
            return listed(_spoilt(row, rate * len(row), draw))
        if head == "Merge":
            row = sorted(digits(body))
            return listed(_spoilt(row, 0.25 * rate * len(row), draw))
        given, _, before = body.partition(BETWEEN)
        row = _repaired(digits(given), digits(before), repair, draw)
        return listed(_spoilt(row, 0.25 * rate * len(row), draw))

    return reply


def _spoilt(row: Sequence[int], rate: float, draw: random.Random) -> list[int]:
    found = list[int]()
    for digit in row:
        kind = draw.random()
        found += [] if kind < rate / 2 else [digit, digit] if kind < rate else [digit]
    return found


def _repaired(given: Sequence[int], before: Sequence[int], repair: float, draw: random.Random) -> list[int]:
    found = list[int]()
    for digit in range(10):
        wanted, count = given.count(digit), before.count(digit)
        found += [digit] * (wanted if count != wanted and draw.random() < repair else count)
    return found
