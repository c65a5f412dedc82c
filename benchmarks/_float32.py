"""The machine's float32 limit, with which updates of 256x256 networks on batches of 256 are compared."""

from __future__ import annotations

import time

BATCH, WIDTH = 256, 256
LAYER = 2 * BATCH * WIDTH * WIDTH  # floating point operations of one pass over one layer


def limit() -> float:
    """The fastest rate of products of the size of a layer, in operations per second, with the faster library."""
    import torch

    from foresight.ops import fused_mlp

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
