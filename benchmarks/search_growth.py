"""Tree search with PUCT at batch 256: simulations per second at 100, 400 and 1,600 simulations, and the peak memory.

The model is that of `search_puct`. Paths are longer in larger trees, so the time of a simulation grows slightly with
their number: `us_per_simulation` shows how much, and `mean_depth` why. `rate` is at 1,600 simulations.
"""

from __future__ import annotations

import time
from typing import Any

UNIT = "simulations/s"
ROWS = 256


def ours() -> dict[str, Any]:
    """One search of each size, after a small one for compilation."""
    import torch

    from benchmarks import _search
    from foresight.planning.search.mcts import PUCT, search
    from foresight.runtime import machine

    torch.set_num_threads(_search.THREADS)
    model = _search.TorchModel()
    model.discount = torch.full((ROWS,), _search.DISCOUNT)
    obs = torch.randn(ROWS, _search.LATENT, generator=torch.Generator().manual_seed(0))
    rule = PUCT(normalize="tree", first_play="parent")
    search(model, obs, 5, rule)
    before = 2**10 * machine.peak_gib()
    found: dict[str, Any] = {"us_per_simulation": {}, "mean_depth": {}}
    for simulations in (100, 400, 1_600):
        begun = time.perf_counter()
        tree = search(model, obs, simulations, rule).tree
        seconds = time.perf_counter() - begun
        found["us_per_simulation"][str(simulations)] = 1e6 * seconds / (ROWS * simulations)
        depth = torch.zeros(ROWS, tree.size)
        for node in range(1, tree.size):
            depth[:, node] = depth.gather(1, tree.parent[:, node : node + 1].clamp(min=0).long()).squeeze(1) + 1
        found["mean_depth"][str(simulations)] = float(depth.mean())
        found["rate"] = ROWS * simulations / seconds
    found["tree_mib"] = 2**10 * machine.peak_gib() - before
    return found
