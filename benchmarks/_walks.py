"""What the benchmarks of learning on tables share: the workload and how it is timed."""

from __future__ import annotations

import time
from typing import Any

import torch

from foresight.envs import grid
from foresight.planning import dynamic, walks

UPDATES = 20_000_000
READABLE = 2_000


def measure(module: Any, **fields: Any) -> dict[str, Any]:
    """Updates per second of `module` at the cliff, those of its readable form, and what was learnt."""
    torch.set_num_threads(1)
    env = grid.make("CliffWalking-v1")
    common = {"gamma": 1.0, "alpha": 0.1, "epsilon": 0.1, **fields}

    def run(steps: int) -> tuple[float, Any]:
        config = module.Config(steps=steps, every=steps, **common)
        began = time.perf_counter()
        *_, (_, _, state) = module.train(config, env)
        return time.perf_counter() - began, state

    warmup, _ = run(1_000)
    seconds, state = run(UPDATES)
    make = walks.World.__init__
    walks.World.__init__ = lambda self, *a: (make(self, *a), setattr(self, "compiled", False))[0]  # type: ignore
    readable, _ = run(READABLE)
    return {
        "rate": UPDATES / seconds,
        "seconds": seconds,
        "updates": UPDATES,
        "greedy_return": dynamic.expected_return(env, state.policy, 1.0, 1_000),
        "readable_rate": READABLE / readable,
        "warmup_seconds": warmup,
        "threads": 1,
    }
