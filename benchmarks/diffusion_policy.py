"""Diffusion policy: chunks of actions a second with DDIM (10 steps), in the sizes of the PushT-v0 preset.

64 observations at once, random weights. `share` is the share of the arithmetic limit: operations of the denoiser, as
torch counts them, in the time of a batch, relative to those of large matrix products measured between the batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

UNIT = "samples/s"
BATCH, MEASURED = 64, 12


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def ours() -> dict[str, Any]:
    """This library's `diffusion_policy.sample`."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from foresight.algorithms.imitation import diffusion_policy as dp
    from foresight.envs.control.pusht import PushT

    torch.set_num_threads(1)
    state = dp.build(dp.Config(widths=(32, 64)), PushT.spaces)
    obs = 512 * torch.rand(BATCH, state.config.obs_steps, 18)
    with FlopCounterMode(display=False) as counter:
        dp.sample(state, obs)
    matrix = torch.randn(1_024, 1_024)
    found, limits = [], []
    for _ in range(MEASURED):  # alternately: both sides meet the same load
        limits.append(2 * 1_024**3 / _seconds(lambda: matrix @ matrix))
        found.append(_seconds(lambda: dp.sample(state, obs)))
    seconds, limit = sorted(found)[MEASURED // 2], sorted(limits)[MEASURED // 2]
    share = counter.get_total_flops() / seconds / limit
    return {"rate": BATCH / seconds, "share": share, "limit_gflops": limit / 1e9, "threads": torch.get_num_threads()}
