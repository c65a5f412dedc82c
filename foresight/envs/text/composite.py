"""Composite rewards: several graders, each with a weight, summed into the reward of training."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from foresight import errors
from foresight.data import traces
from foresight.envs.text.rewards import Examples, Grader, function_grader, reward_at, reward_name, waits
from foresight.errors import UserError

BUNDLED = ("correct", "format", "tags")  # parts of a composite reward; others are the user's functions


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a composite reward: its name in the log, its weight and its grader.

    Parts that wait (`waits`) for another process or the network are graded concurrently.
    """

    name: str
    weight: float
    grader: Grader
    waits: bool = False


def grade_parts(parts: Sequence[Part], examples: Examples, completions: Sequence[str]) -> list[list[float]]:
    """The grades of each part for each completion. Parts that wait run concurrently."""
    waiting = sum(part.waits for part in parts)
    if waiting < 2:
        return [part.grader(examples, completions) for part in parts]
    pool = ThreadPoolExecutor(waiting)
    try:
        futures = [pool.submit(part.grader, examples, completions) if part.waits else None for part in parts]
        pairs = zip(parts, futures, strict=True)
        return [part.grader(examples, completions) if future is None else future.result() for part, future in pairs]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a run that is stopped does not wait for them


def weighted(weights: Sequence[float], grades: Sequence[float]) -> float:
    """The weighted sum of the grades that are not NaN; NaN if all are."""
    scored = [weight * grade for weight, grade in zip(weights, grades, strict=True) if not math.isnan(grade)]
    return sum(scored) if scored else math.nan


def weighted_sum(parts: Sequence[Part]) -> Grader:
    """A grader that returns the weighted sum of the parts."""
    weights = [part.weight for part in parts]

    def grade(examples: Examples, completions: Sequence[str]) -> list[float]:
        return [weighted(weights, row) for row in zip(*grade_parts(parts, examples, completions), strict=True)]

    return grade


def parse_weights(rewards: Any, example: str = "{correct: 1, format: 0.2}") -> list[tuple[str, float]]:
    """The parts of a composite reward with their weights. Raises UserError unless each has a finite weight."""
    try:
        pairs = [(str(name), float(weight)) for name, weight in dict(rewards).items()]
    except (TypeError, ValueError):
        pairs = []
    if not pairs or not all(math.isfinite(weight) for _, weight in pairs):
        raise UserError(f"rewards is {rewards!r}: give each part its weight, as in rewards={example}.")
    return pairs


def part(correct: Grader, name: str, weight: float, limit: float) -> Part:
    """The part `name`: one of `BUNDLED`, or the function at `file.py:name`. `correct` grades answers for the task."""
    bundled: dict[str, Grader] = {
        "correct": correct,
        "format": lambda _, completions: [float(traces.read(c).whole) for c in completions],
        "tags": lambda _, completions: [traces.tags(c) for c in completions],
    }
    if name in bundled:
        return Part(name, weight, bundled[name])
    if ":" not in name:
        raise errors.unknown("part of a reward", name, [*bundled, "FILE.py:FUNCTION"])
    return function_part(name, weight, limit)


def function_part(
    given: str | Callable[..., Any], weight: float, limit: float, columns: Sequence[str] | None = None
) -> Part:
    """A reward function, or the one at `file.py:name`, as a part with its own name."""
    reward = reward_at(given, limit, columns)
    return Part(reward_name(reward), weight, function_grader(reward), waits(reward))


def function_parts(
    rewards: Sequence[str | Callable[..., Any]], limit: float, columns: Sequence[str] | None = None
) -> tuple[Part, ...]:
    """Reward functions, which take the task's `columns`, as parts of equal weight; equal names are numbered."""
    if not rewards:
        raise UserError("reward is an empty list: give a reward function, or leave it out for the column 'answer'.")
    return numbered([function_part(given, 1.0, limit, columns) for given in rewards])


def numbered(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts, each with a name of its own for the log: the second of a name is NAME_2."""
    found, names = list[Part](), Counter[str]()
    for part in parts:
        names[part.name] += 1
        count = names[part.name]
        found.append(dataclasses.replace(part, name=f"{part.name}_{count}") if count > 1 else part)
    return tuple(found)
