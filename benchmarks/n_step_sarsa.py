"""Tabular n-step Sarsa (n = 4) on CliffWalking: updates per second of the compiled loop, one thread.

As in benchmarks/q_learning.py, an update is a whole step: an action, an outcome and a target with four rewards.
"""

from __future__ import annotations

from typing import Any

from benchmarks import _td_control

UNIT = "updates/s"
TARGET = None  # no peer


def ours() -> dict[str, Any]:
    from foresight.algorithms.tabular import n_step_sarsa

    return _td_control.measure(n_step_sarsa, n_steps=4)
