"""Trajectory Transformer: decisions a second with a cache of keys and values; the peer computes all of them again.

One environment, random weights and data, in the sizes of the paper (4 layers, 128 wide, 4 heads, horizon 15 after 5
steps, 100 bins) with a beam of 32; the plans are the same. `preset_rate` is with the cache in the sizes of the
Pendulum-v1 preset.
"""

from __future__ import annotations

import time
from typing import Any

UNIT = "decisions/s"
PEER = "foresight"
TARGET = 10.0
DECISIONS = 20


def _seconds(config: Any, cached: bool, decisions: int) -> float:
    """Of one decision: the median."""
    import numpy as np
    import torch
    from gymnasium import spaces as gs

    from foresight.algorithms.sequence import trajectory_transformer as tt
    from foresight.envs.base import Spaces

    torch.set_num_threads(1)
    state = tt.build(config, Spaces(gs.Box(-9, 9, (3,), np.float32), gs.Box(-1, 1, (1,), np.float32)))
    state.net.eval()
    torch.manual_seed(0)
    state.net.bins.fit(torch.randn(1_000, 6), True, {})
    numbers, mask, obs = torch.randn(1, config.context, 5), torch.ones(1, config.context), torch.randn(1, 3)
    found = []
    with torch.no_grad():
        for _ in range(decisions):
            began = time.perf_counter()
            tt.plan(state, numbers, mask, obs, cached)
            found.append(time.perf_counter() - began)
    return sorted(found)[len(found) // 2]


def ours() -> dict[str, Any]:
    """With the cache."""
    import dataclasses

    from foresight.algorithms.sequence import trajectory_transformer as tt
    from foresight.runtime import catalog

    fields = {field.name for field in dataclasses.fields(tt.Config)} - {"data"}
    preset = catalog.presets("trajectory_transformer")["Pendulum-v1"]
    config = tt.Config(**{name: value for name, value in preset.items() if name in fields})
    return {"rate": 1 / _seconds(_paper(), True, DECISIONS), "preset_rate": 1 / _seconds(config, True, DECISIONS)}


def peer() -> dict[str, Any]:
    """Without it."""
    return {"rate": 1 / _seconds(_paper(), False, 3)}


def _paper() -> Any:
    from foresight.algorithms.sequence import trajectory_transformer as tt

    return tt.Config(window=20, context=5, horizon=15, dim=128, layers=4, heads=4, beam_width=32)
