"""SAC on Pendulum-v1: 256x256 networks, batches of 256, one update per step, 2,000 steps.

Equal settings on both sides: Adam, a learning rate of 1e-3, gamma 0.99, tau 0.005, learned temperature, two critics,
100 random steps at first, one environment. Threads: all cores, the faster choice for both. The first 1,000 steps are
warm-up; the rest is measured. `return` is the mean over all episodes of training, with exploration. `bfloat16_rate` is
of updates in bfloat16 (`--precision`), all else in float32. `share` is the rate as a fraction of that of matrix
products: the multiplications of an update (policy: two forward passes and one backward; critics: targets, values with
the gradient of the weights, values with the gradient of the action) divided by the rate of products of 256x256 by
256x256 matrices in windows between the same steps; `share_of_best`: by the fastest window.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks._float32 import BATCH, LAYER, WIDTH, measured

UNIT = "env steps/s"
PEER = "stable-baselines3"
TARGET = 1.5
STEPS, WARM = 2_000, 1_000
# Of an update, in floating point operations: passes over one 256x256 layer. Policy: 2 forward, 2 back. Critics, two of
# each: targets 1, forward 1 and back 2, forward 1 and back to the action 1.
FLOPS = LAYER * (2 + 2 + 2 * (1 + 3 + 2))


def ours() -> dict[str, Any]:
    """This library's `sac.train`, as a user runs it."""
    from foresight.algorithms.policy import sac

    config = sac.Config(steps=STEPS, learning_rate=1e-3, learning_starts=100, hidden=(WIDTH, WIDTH))
    return measured(sac, config, "Pendulum-v1", WARM, FLOPS)


def peer() -> dict[str, Any]:
    """stable-baselines3's SAC at the same settings."""
    import gymnasium
    import numpy as np
    import torch
    from stable_baselines3 import SAC
    from stable_baselines3.common.monitor import Monitor

    model = SAC(
        "MlpPolicy", Monitor(gymnasium.make("Pendulum-v1")), learning_rate=1e-3, learning_starts=100, batch_size=BATCH,
        policy_kwargs={"net_arch": [WIDTH, WIDTH]}, seed=0, device="cpu",
    )  # fmt: skip
    marks: list[float] = []

    def mark(local: dict[str, Any], _: dict[str, Any]) -> bool:
        if local["self"].num_timesteps == WARM:
            marks.append(time.perf_counter())
        return True

    model.learn(STEPS, callback=mark)
    rate = (STEPS - WARM) / (time.perf_counter() - marks[0])
    reached = float(np.mean([episode["r"] for episode in model.ep_info_buffer]))
    return {"rate": rate, "return": reached, "threads": torch.get_num_threads()}
