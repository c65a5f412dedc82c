"""DQN on CartPole-v1: 256x256 networks, batches of 256, one update per step, 12,000 steps.

Equal settings on both sides: Adam, a learning rate of 1e-3, gamma 0.99, a target copied every 500 steps, Huber's loss,
gradient norm 10, a replay of 100,000 steps, ε from 1 to 0.05 over the first 3,000 steps, one environment. Threads: all
cores, the faster choice for both. The first 2,000 steps are warm-up; the rest is measured. `return` is the mean over
the last 100 episodes of training, with exploration. `bfloat16_rate` is of updates in bfloat16 (`--precision`), all else
in float32. `share` is the rate as a fraction of that of matrix products: the multiplications of an update (one
forward pass of the target, one forward and one backward pass of the network) divided by the rate of products of 256x256
by 256x256 matrices in windows between the same steps; `share_of_best`: by the fastest window.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks._float32 import BATCH, LAYER, WIDTH, measured

UNIT = "env steps/s"
PEER = "stable-baselines3"
TARGET = 1.5
STEPS, WARM = 12_000, 2_000
# Of an update, in floating point operations: 256x256 layers alone; inputs and outputs are narrow.
FLOPS = LAYER * (1 + 1 + 2)


def ours() -> dict[str, Any]:
    """This library's `dqn.train`, as a user runs it."""
    from foresight.algorithms.value import dqn

    config = dqn.Config(
        steps=STEPS, learning_rate=1e-3, batch_size=BATCH, replay_size=100_000, learning_starts=500, train_every=1,
        target_every=500, epsilon_fraction=0.25, epsilon_end=0.05, hidden=(WIDTH, WIDTH),
    )  # fmt: skip
    return measured(dqn, config, "CartPole-v1", WARM, FLOPS)


def peer() -> dict[str, Any]:
    """stable-baselines3's DQN at the same settings."""
    import gymnasium
    import numpy as np
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.monitor import Monitor

    model = DQN(
        "MlpPolicy", Monitor(gymnasium.make("CartPole-v1")), learning_rate=1e-3, batch_size=BATCH, buffer_size=100_000,
        learning_starts=500, train_freq=1, target_update_interval=500, exploration_fraction=0.25,
        exploration_final_eps=0.05, gamma=0.99, policy_kwargs={"net_arch": [WIDTH, WIDTH]}, seed=0, device="cpu",
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
