"""Numbers that change over a run: pure functions of `progress`, the share of the run that is over.

Progress is in [0, 1] and clamped to it, so a run that goes on past its planned end keeps the final value. A
step count becomes progress as step / steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def constant(progress: float, start: float, end: float | None = None) -> float:
    """`start`, always. It takes and ignores the arguments of the others, so that any of them fits its place."""
    return start


def linear(progress: float, start: float, end: float = 0.0) -> float:
    """start + p · (end - start)."""
    return start + _clamped(progress) * (end - start)


def cosine(progress: float, start: float, end: float = 0.0) -> float:
    """end + ½ (start - end) (1 + cos πp): half a period. Source: Loshchilov & Hutter 2017 (arXiv:1608.03983), eq. 5."""
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * _clamped(progress)))


def exponential(progress: float, start: float, end: float) -> float:
    """start · (end / start)^p: an equal factor for an equal share of the run.

    Raises ValueError if start and end are not both positive or both negative.
    """
    if start * end <= 0:
        raise ValueError(f"An exponential schedule cannot go from {start} to {end}: both must have one sign.")
    return start * (end / start) ** _clamped(progress)


def piecewise(progress: float, points: Sequence[tuple[float, float]]) -> float:
    """Straight lines through `points`, pairs (progress, value) in order of progress; flat before and after them.

    Two points at one progress make a jump, to the later one's value. Raises ValueError without points or if
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
    """The factor min(1, (step + 1) / steps): for the first `steps` steps, counted from 0, less than or equal to 1.

    Never 0, so the first update is not wasted; 1 if `steps` is 0.
    """
    return 1.0 if steps <= 0 else min(1.0, (step + 1) / steps)


def planned(base: float, step: int, steps: int, rise: int = 0, anneal: bool = False) -> float:
    """`base` × `warmup` over the first `rise` steps, and × `linear` down to 0 over all `steps` if `anneal`."""
    rate = base * warmup(step, rise)
    return rate * (linear(step / steps, 1.0) if anneal else 1.0)


def passed(before: int, after: int, every: int) -> int:
    """How many multiples of `every` lie in (before, after]: how often what happens every so many steps is due."""
    return after // every - before // every


def _clamped(progress: float) -> float:
    return min(1.0, max(0.0, progress))
