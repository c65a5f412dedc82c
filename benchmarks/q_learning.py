"""Tabular Q-learning on CliffWalking: updates per second of the compiled loop, one thread.

Each update is a whole step: an ε-greedy action, an outcome sampled from the tables, and the update of one value. 20
million updates are measured. Compilation is a separate warm-up, reported as `warmup_seconds` (numba's cache makes it
short after the first time).
"""

from __future__ import annotations

from typing import Any

from benchmarks import _td_control

UNIT = "updates/s"
TARGET = None  # no peer


def ours() -> dict[str, Any]:
    from foresight.algorithms.tabular import q_learning

    return _td_control.measure(q_learning)
