"""The machine's float32 limit, with which updates of 256x256 networks on batches of 256 are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

BATCH, WIDTH = 256, 256
LAYER = 2 * BATCH * WIDTH * WIDTH  # floating point operations of one pass over one layer


WINDOWS, PRODUCTS = 40, 50  # of one training; of one window


def products() -> Callable[[], float]:
    """A function that computes products of the size of a layer, with the faster library, and returns its seconds."""
    import torch

    from foresight.ops.fused import mlp as fused_mlp

    a, b, out = torch.randn(BATCH, WIDTH), torch.randn(WIDTH, WIDTH), torch.empty(BATCH, WIDTH)

    def seconds(way: Callable[[], object]) -> float:
        for _ in range(5):  # the caches hold what was computed before
            way()
        begun = time.perf_counter()
        for _ in range(PRODUCTS):
            way()
        return time.perf_counter() - begun

    ways: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out)]
    if fused_mlp.ONEDNN:
        ways.append(lambda: fused_mlp.linear(a, b))
    fastest = min(ways, key=lambda way: min(seconds(way) for _ in range(30)))
    return lambda: seconds(fastest)


def limit() -> float:
    """The fastest rate of products of the size of a layer, in operations per second."""
    window = products()
    return PRODUCTS * LAYER / min(window() for _ in range(30))


def measured(algorithm: Any, config: Any, env: str, warm: int, flops: int) -> dict[str, Any]:
    """Steps per second after `warm` steps and the return, of updates in float32 and in bfloat16, and their shares.

    A share is the rate as a fraction of the rate of products, in windows between the same steps: other load on the
    machine slows both. `share_of_best` compares with the fastest window instead.
    """
    import dataclasses

    import torch

    from foresight.envs.make import make

    window, every = products(), (config.steps - warm) // WINDOWS
    algorithm.REPORT = every  # steps between two yields

    def timed(precision: str) -> tuple[float, float, list[float]]:
        begun, metrics, windows = 0.0, {}, list[float]()
        given, paused = dataclasses.replace(config, precision=precision), 0.0
        for step, metrics, _ in algorithm.train(given, make(env, num_envs=1)):  # noqa: B007
            if step == warm:
                begun = time.perf_counter()
            if step > warm:
                at = time.perf_counter()
                windows.append(window())
                paused += time.perf_counter() - at
        return (config.steps - warm) / (time.perf_counter() - begun - paused), metrics["return"], windows

    (rate, reached, beside), (halved, halved_return, beside_halved) = timed("float32"), timed("bfloat16")
    work = PRODUCTS * LAYER
    best = work / min(beside + beside_halved)
    return {
        "rate": rate,
        "return": reached,
        "bfloat16_rate": halved,
        "bfloat16_return": halved_return,
        "threads": torch.get_num_threads(),
        "share": rate * flops / (work / statistics.mean(beside)),
        "share_of_best": rate * flops / best,
        "bfloat16_share": halved * flops / (work / statistics.mean(beside_halved)),
        "gflops": work / statistics.mean(beside) / 1e9,
        "best_gflops": best / 1e9,
    }
