"""Tabular Q-learning on the cliff: updates per second of the compiled walk, one thread.

Each update is a whole step: an ε-greedy action, an outcome drawn from the tables, and the value of one pair moved.
20 million of them. Compilation is apart: a warm-up, reported as `warmup_seconds` (read from numba's cache after the
first time).
"""

from __future__ import annotations

from typing import Any

from benchmarks import _walks

UNIT = "updates/s"
TARGET = None  # no peer: the issue asks for a million


def ours() -> dict[str, Any]:
    from foresight.algorithms.tabular import q_learning

    return _walks.measure(q_learning)
