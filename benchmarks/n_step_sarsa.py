"""Tabular n-step Sarsa (n = 4) on the cliff: updates per second of the compiled walk, one thread.

As benchmarks/q_learning.py: each update is a whole step with an action, an outcome and a target of four rewards.
"""

from __future__ import annotations

from typing import Any

from benchmarks import _walks

UNIT = "updates/s"
TARGET = None  # no peer: the issue asks for a million


def ours() -> dict[str, Any]:
    from foresight.algorithms.tabular import n_step_sarsa

    return _walks.measure(n_step_sarsa, n_steps=4)
