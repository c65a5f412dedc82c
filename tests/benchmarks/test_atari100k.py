"""Atari 100k on this machine: runs above the limit of memory are named."""

from __future__ import annotations

import runpy
from pathlib import Path

made = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "atari100k.py"))


def test_runs_above_the_limit_are_named() -> None:
    runs = {"storm-Pong": {"peak_gib": 8.01, "limit_gib": 8.0}, "dreamer-Pong": {"peak_gib": 8.0, "limit_gib": 8.0}}
    assert made["over_limit"](runs) == ["storm-Pong 8.01 GiB"]
