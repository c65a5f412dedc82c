"""DreamerV3 with one actor that acts while the learner learns: how long acting waits, in gradient steps.

CartPole-v1 from state with the preset's sizes, 4 environments and one step of each between two updates, so that a round
is one gradient step. The rate is of env steps; the peer acts and learns in turn. `longest_wait` is that of the actor,
in the longest gradient step, and `median_wait` the same of the medians. The rounds that fill the replay, and those of
the first 10 updates, are not counted.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any

UNIT = "env steps/s"
PEER = "foresight"
TARGET = None
ENVS, ROUNDS, WARM, START = 4, 300, 10, 1_000


def ours() -> dict[str, Any]:
    """The learner over a fleet of one Ray actor, as `foresight train dreamer --actors 1` runs it."""
    return _measure(overlapped=True)


def peer() -> dict[str, Any]:
    """Acting and learning in turn."""
    return _measure(overlapped=False)


def _measure(overlapped: bool) -> dict[str, Any]:
    import torch

    from foresight.algorithms.world import dreamer
    from foresight.envs.make import make
    from foresight.runtime.distributed import learner
    from foresight.runtime.distributed.ray_cluster import Fleet
    from foresight.runtime.monitoring.profile import Profile

    torch.set_num_threads(1)
    config = dreamer.Config(
        num_envs=ENVS, learning_starts=START, train_ratio=16 * 32 / ENVS, batch_size=16, sequence_length=32,
        replay_size=100_000, imagined_last=8, deter=128, hidden=64, groups=8, classes=8, blocks=1, units=64, layers=2,
    )  # fmt: skip
    make_envs = functools.partial(make, "CartPole-v1", num_envs=ENVS)
    env = make_envs()
    state = dreamer.build(config, env.spaces)
    waits, ends, steps = list[float](), list[float](), list[float]()

    class Times(Profile):
        def add(self, section: str, seconds: float) -> None:
            if section == "actors_waiting":
                waits.append(seconds)

    def update(*args: Any) -> dict[str, float]:
        began = time.perf_counter()
        found = inner(*args)
        ends.append(time.perf_counter())
        steps.append(ends[-1] - began)
        return found

    inner, dreamer.update = dreamer.update, update
    if overlapped:
        fleet = Fleet("dreamer", dataclasses.asdict(config), make_envs, 1)
        run = learner.train(dreamer, config, state, fleet, Times())
    else:
        run = dreamer.train(config, env, state)
    for _ in run:
        if len(steps) >= ROUNDS:
            break
    run.close()
    one, count = statistics.median(steps[WARM:]), len(steps) - WARM
    found = {"rate": ENVS * count / (ends[-1] - ends[WARM - 1]), "gradient_step_seconds": one, "threads": 1}
    if overlapped:  # one message a round; those of the rounds that only filled the replay, and of the first updates, go
        kept = waits[-count:]
        found |= {"longest_wait": max(kept) / max(steps[WARM:]), "median_wait": statistics.median(kept) / one}
    return found
