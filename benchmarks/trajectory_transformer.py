"""Trajectory Transformer: decisions a second with a cache of keys and values, in the sizes of the Pendulum-v1 preset.

One environment, random weights and data. `speed_up` is the time of a decision without the cache relative to one with
it, in the sizes of the paper (4 layers, 128 wide, horizon 15 after 5 steps) with a beam of 32; the plans are the same.
"""

from __future__ import annotations

import time
from typing import Any

UNIT = "decisions/s"
DECISIONS = 20


def _seconds(config: Any, cached: bool, decisions: int) -> float:
    """Of one decision: the median."""
    import numpy as np
    import torch
    from gymnasium import spaces as gs

    from foresight.algorithms.sequence import trajectory_transformer as tt
    from foresight.envs.base import Spaces

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
    """This library's `plan`."""
    import torch

    from foresight.algorithms.sequence import trajectory_transformer as tt

    torch.set_num_threads(1)
    preset = tt.Config(bins=50, heads=1, beam_width=16)
    paper = tt.Config(window=20, context=5, horizon=15, dim=128, layers=4, heads=4, beam_width=32)
    rate = 1 / _seconds(preset, True, DECISIONS)
    return {"rate": rate, "speed_up": _seconds(paper, False, 3) / _seconds(paper, True, 3)}
