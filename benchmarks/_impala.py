"""Shared by the benchmarks of IMPALA: the learner with Ray actors on this machine, and its speed."""

from __future__ import annotations

import time
from typing import Any


def measure(env: str, actors: int, given: dict[str, Any]) -> dict[str, Any]:
    """Env steps per second that the learner trains on, as in `foresight train impala --actors N`.

    `given` are fields of the Config. One thread; the first fifth of the steps is warm-up.
    """
    import torch

    from foresight.algorithms.policy import impala
    from foresight.envs.make import make
    from foresight.runtime.config import resolve
    from foresight.runtime.distributed import actors as processes
    from foresight.runtime.distributed import learner, ray_cluster
    from foresight.runtime.monitoring import profile

    torch.set_num_threads(1)
    resolved = resolve.resolve("impala", env=env, config=impala.Config(**given), actors=actors)
    config = impala.Config(**resolved.config)
    single = make(env, num_envs=1)
    state = impala.build(config, single.spaces)
    single.close()
    times, begun, first, metrics = profile.Profile(), 0.0, 0, {}
    fleet = ray_cluster.Fleet("impala", *processes.plan(resolved, actors), actors)
    with profile.time_updates(impala, times):
        for step, metrics, _ in learner.train(impala, config, state, fleet, times):  # noqa: B007
            if not begun and step >= config.steps // 5:
                begun, first = time.perf_counter(), step
                times.shares()
        seconds = time.perf_counter() - begun
    shares = {name.partition("/")[2]: round(share, 3) for name, share in times.shares().items()}
    result = {"rate": (state.step - first) / seconds, "lag": metrics["lag"], "actors": actors}
    result |= {"return": metrics["return"]} if "return" in metrics else {}
    return {**result, **{f"share of {name}": share for name, share in shares.items()}}
