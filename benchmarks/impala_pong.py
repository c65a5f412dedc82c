"""IMPALA on ALE/Pong-v5 pixels with two actors on Ray, against this library's own synchronous PPO on as many cores.

The same network (Nature), frames (84x84 grey, 4 frames, skip 4) and precision (`auto`) on both sides. IMPALA: two
actors of 8 environments and one thread each, unrolls of 20, two of them an update, one thread to learn with. PPO: 8
environments x 128 steps, 4 epochs, minibatches of 256, two threads, as its preset has it. So PPO reads every row four
times and IMPALA once: this compares the speed of the systems as they are used, not of equal work. An agent step is
four frames. The first fifth of the steps warms up.
"""

from __future__ import annotations

import time
from typing import Any

UNIT = "agent steps/s"
PEER = "foresight"
TARGET = 1.0
ACTORS, ENVS, UNROLL, STEPS = 2, 8, 20, 10_240
ITERATIONS, ROWS, THREADS = 4, 8 * 128, 2


def ours() -> dict[str, Any]:
    """IMPALA's learner over Ray actors, as `foresight train impala --actors 2` runs it."""
    import torch

    from foresight.algorithms.policy import impala
    from foresight.envs.make import make
    from foresight.runtime import actors, cluster, profile, settings

    torch.set_num_threads(1)
    given = {"steps": STEPS, "num_envs": ENVS, "unroll_steps": UNROLL, "unrolls": 2, "images": "nature"}
    config = impala.Config(**given, precision="auto")
    resolved = settings.resolve("impala", env="ALE/Pong-v5", config=config, actors=ACTORS)
    config = impala.Config(**resolved.config)
    world = make("ALE/Pong-v5", num_envs=1)
    state = impala.build(config, world.spaces)
    world.close()
    times, begun, first, metrics = profile.Profile(), 0.0, 0, {}
    fleet = cluster.Fleet("impala", *actors.plan(resolved, ACTORS), ACTORS)
    with profile.learning(impala, times):
        for step, metrics, _ in actors.train(impala, config, state, fleet, times):  # noqa: B007
            if not begun and step >= STEPS // 5:
                begun, first = time.perf_counter(), step
                times.shares()
        seconds = time.perf_counter() - begun
    shares = {name.partition("/")[2]: round(share, 3) for name, share in times.shares().items()}
    result = {"rate": (state.step - first) / seconds, "lag": metrics["lag"], "actors": ACTORS}
    return {**result, **{f"share of {name}": share for name, share in shares.items()}}


def peer() -> dict[str, Any]:
    """This library's PPO, as `foresight train ppo` runs it."""
    import torch

    from foresight.algorithms.policy import ppo
    from foresight.envs.make import make

    torch.set_num_threads(THREADS)
    config = ppo.Config(
        steps=(ITERATIONS + 1) * ROWS, num_envs=8, unroll_steps=128, epochs=4, minibatches=4, clip_ratio=0.1,
        entropy_coef=0.01, precision="auto",
    )  # fmt: skip
    env = make("ALE/Pong-v5", num_envs=config.num_envs)
    begun = 0.0
    for step, _, _ in ppo.train(config, env):
        if step == ROWS:
            begun = time.perf_counter()
    env.close()
    return {"rate": ITERATIONS * ROWS / (time.perf_counter() - begun), "threads": THREADS}
