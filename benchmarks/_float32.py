"""The machine's float32 limit, with which updates of 256x256 networks on batches of 256 are compared."""

from __future__ import annotations

import time
from typing import Any

BATCH, WIDTH = 256, 256
LAYER = 2 * BATCH * WIDTH * WIDTH  # floating point operations of one pass over one layer


def limit() -> float:
    """The fastest rate of products of the size of a layer, in operations per second, with the faster library."""
    import torch

    from foresight.ops.fused import mlp as fused_mlp

    a, b, out = torch.randn(BATCH, WIDTH), torch.randn(WIDTH, WIDTH), torch.empty(BATCH, WIDTH)
    ways = [lambda: torch.mm(a, b, out=out)]
    if fused_mlp.ONEDNN:
        ways.append(lambda: fused_mlp.linear(a, b))
    best = float("inf")
    for way in ways * 30:
        begun = time.perf_counter()
        for _ in range(50):
            way()
        best = min(best, time.perf_counter() - begun)
    return 50 * LAYER / best


def measured(algorithm: Any, config: Any, env: str, warm: int, flops: int) -> dict[str, Any]:
    """Steps per second after `warm` steps and the return, of updates in float32 and in bfloat16, and their shares."""
    import dataclasses

    import torch

    from foresight.envs.make import make

    def timed(precision: str) -> tuple[float, float]:
        begun, metrics = 0.0, {}
        given = dataclasses.replace(config, precision=precision)
        for step, metrics, _ in algorithm.train(given, make(env, num_envs=1)):  # noqa: B007
            if step == warm:
                begun = time.perf_counter()
        return (config.steps - warm) / (time.perf_counter() - begun), metrics["return"]

    (rate, reached), (halved, halved_return), peak = timed("float32"), timed("bfloat16"), limit()
    return {
        "rate": rate,
        "return": reached,
        "bfloat16_rate": halved,
        "bfloat16_return": halved_return,
        "threads": torch.get_num_threads(),
        "share": rate * flops / peak,
        "bfloat16_share": halved * flops / peak,
        "gflops": peak / 1e9,
    }
