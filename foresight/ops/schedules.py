"""Schedules: pure functions of `progress`, the fraction of the run that is done.

Progress is clamped to [0, 1], so a run that continues past its planned end keeps the final value. For a step
count, progress is step / steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def constant(progress: float, start: float, end: float | None = None) -> float:
    """`start`, always. Takes and ignores the arguments of the others, so that it can replace them."""
    return start


def linear(progress: float, start: float, end: float = 0.0) -> float:
    """start + p · (end - start)."""
    return start + _clamped(progress) * (end - start)


def cosine(progress: float, start: float, end: float = 0.0) -> float:
    """end + ½ (start - end) (1 + cos πp): half a period. Source: Loshchilov & Hutter 2017 (arXiv:1608.03983), eq. 5."""
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * _clamped(progress)))


def exponential(progress: float, start: float, end: float) -> float:
    """start · (end / start)^p: the same factor over equal parts of the run.

    Raises ValueError if start and end are not both positive or both negative.
    """
    if start * end <= 0:
        raise ValueError(f"An exponential schedule cannot go from {start} to {end}: both must have the same sign.")
    value: float = start * (end / start) ** _clamped(progress)
    return value


def piecewise(progress: float, points: Sequence[tuple[float, float]]) -> float:
    """Straight lines through `points`, pairs (progress, value) in order of progress; constant before and after them.

    Two points at the same progress make a jump to the value of the later one. Raises ValueError without points or if
    they are out of order.
    """
    if not points or any(a[0] > b[0] for a, b in itertools.pairwise(points)):
        raise ValueError(f"A piecewise schedule needs points in order of progress, but has {list(points)}.")
    value = points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if progress >= x1:
            value = y1
        elif progress > x0:
            return y0 + (progress - x0) / (x1 - x0) * (y1 - y0)
    return value


def warmup(step: int, steps: int) -> float:
    """The warmup factor min(1, (step + 1) / steps); `step` counts from 0.

    Never 0, so the first update is not wasted; 1 if `steps` is 0.
    """
    return 1.0 if steps <= 0 else min(1.0, (step + 1) / steps)


def warmup_linear(base: float, step: int, steps: int, rise: int = 0, anneal: bool = False) -> float:
    """`base` × `warmup` over the first `rise` steps, and × `linear` down to 0 over all `steps` if `anneal`."""
    rate = base * warmup(step, rise)
    return rate * (linear(step / steps, 1.0) if anneal else 1.0)


def passed(before: int, after: int, every: int) -> int:
    """How many multiples of `every` lie in (before, after]."""
    return after // every - before // every


def _clamped(progress: float) -> float:
    return min(1.0, max(0.0, progress))
