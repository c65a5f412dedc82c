"""Shared by the benchmarks of tabular control: the workload and its timing."""

from __future__ import annotations

import time
from typing import Any

import torch

from foresight.envs.tabular import grid
from foresight.planning.dynamic import bellman

UPDATES = 20_000_000


def measure(module: Any, **fields: Any) -> dict[str, Any]:
    """Updates per second of `module` at the cliff, and the return of its greedy policy."""
    torch.set_num_threads(1)
    env = grid.make("CliffWalking-v1")
    common = {"gamma": 1.0, "alpha": 0.1, "epsilon": 0.1, **fields}

    def run(steps: int) -> tuple[float, Any]:
        config = module.Config(steps=steps, yield_every=steps, **common)
        began = time.perf_counter()
        *_, (_, _, state) = module.train(config, env)
        return time.perf_counter() - began, state

    warmup, _ = run(1_000)
    seconds, state = run(UPDATES)
    return {
        "rate": UPDATES / seconds,
        "seconds": seconds,
        "updates": UPDATES,
        "greedy_return": bellman.expected_return(env, state.policy, 1.0, 1_000),
        "warmup_seconds": warmup,
        "threads": 1,
    }
