"""Training episodes one by one: those that ended between two rows of the log, and those of the end of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from foresight.envs.base import Episodes
from foresight.runtime.catalog import State

HELD = 0.2  # the share of the training, at its end, over which a return is held


def finished(state: State) -> int:
    """The number of episodes that ended in this process; 0 for a State that counts none."""
    episodes = getattr(state, "episodes", None)
    return episodes.finished if isinstance(episodes, Episodes) else 0


def since(state: State, count: int) -> dict[str, float]:
    """Metrics of the episodes after the first `count`: how many `ended`, their mean and least return.

    Nothing if none ended. A State keeps 100 episodes, so of more the newest 100 are counted.
    """
    new = finished(state) - count
    returns = state.episodes.returns[-new:] if new else []
    if not returns:
        return {}
    mean = math.fsum(returns) / len(returns)
    return {"ended": len(returns), "ended_return": mean, "ended_return_min": min(returns)}


def held(rows: Sequence[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """The mean and the least return of the training episodes that ended in the last fifth of `steps`; from the log.

    Exploration is included. Empty for a log without single episodes.
    """
    late = [row for row in rows if "ended" in row and row["step"] > (1 - HELD) * steps]
    if not late:
        return {}
    count = sum(row["ended"] for row in late)
    mean = math.fsum(row["ended"] * row["ended_return"] for row in late) / count
    return {"mean": round(mean, 6), "min": min(row["ended_return_min"] for row in late), "episodes": count}


def held_greedily(rows: Sequence[Mapping[str, Any]], metric: str, steps: int) -> dict[str, float]:
    """The mean and the least of the evaluations, of the greedy policy, in the last fifth of `steps`; from the log.

    Empty for a log with fewer than two, as nothing is held by one.
    """
    name = f"evaluation/{metric}"
    late = [row[name] for row in rows if name in row and row["step"] > (1 - HELD) * steps]
    if len(late) < 2:
        return {}
    return {"mean": round(math.fsum(late) / len(late), 6), "min": min(late), "evaluations": len(late)}
