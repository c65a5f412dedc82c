"""IMPALA on ALE/Pong-v5 pixels with two actors on Ray, compared with this library's synchronous PPO on as many cores.

The same network (Nature), frames (84x84 gray, 4 frames, skip 4) and precision (`auto`) on both sides. IMPALA: two
actors with 8 environments and one thread each, rollouts of 20 steps, two per update, one thread for the learner. PPO: 8
environments x 128 steps, 4 epochs, minibatches of 256, two threads, as in `ppo_pong`. PPO trains on every step four
times and IMPALA once, so this compares the systems as they are used, not at equal work. An agent step is four frames.
The first fifth of the steps is warm-up.
"""

from __future__ import annotations

from typing import Any

UNIT = "agent steps/s"
PEER = "foresight"
TARGET = 1.0
ACTORS, ENVS, ROLLOUT, STEPS = 2, 8, 20, 10_240


def ours() -> dict[str, Any]:
    """IMPALA's learner over Ray actors, as `foresight train impala --actors 2` runs it."""
    from benchmarks import _impala

    given = {"steps": STEPS, "num_envs": ENVS, "rollout_steps": ROLLOUT, "rollouts_per_update": 2, "images": "nature"}
    return _impala.measure("ALE/Pong-v5", ACTORS, {**given, "precision": "auto"})


def peer() -> dict[str, Any]:
    """This library's PPO, as the benchmark `ppo_pong` measures it."""
    import torch

    from benchmarks import ppo_pong

    torch.set_num_threads(ppo_pong.THREADS)
    return {"rate": ppo_pong.rate("auto")[0], "threads": ppo_pong.THREADS}
