"""STORM's imagination: 16 steps from contexts of 8, with the cache of keys and values and without it.

The published sizes (32 × 32 latents, 2 layers of width 512, 8 heads), 64 rollouts at once instead of 1,024, one thread.
The peer is the same loop in which every step reads context and imagined steps again. Both sides draw equal latents and
actions, so `difference`, the largest one between their features, shows that they compute the same. `share` is the rate
as a fraction of the machine's float32 limit: the multiplications of the linear layers divided by the fastest of many
products of 256x256 by 256x256 matrices.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks._float32 import limit

UNIT = "imagined steps/s"
PEER = "foresight"
TARGET = 2.0
ROLLOUTS, CONTEXT, HORIZON, REPEATS = 64, 8, 16, 4


def ours() -> dict[str, Any]:
    """`STORM.imagine`, as training runs it."""
    return _measure(cached=True)


def peer() -> dict[str, Any]:
    """The same without a cache."""
    return _measure(cached=False)


def _measure(cached: bool) -> dict[str, Any]:
    import gymnasium.spaces as gs
    import numpy as np

    from foresight.nets.models.latent_actor import LatentActor
    from foresight.nets.models.storm import STORM, CausalTransformer
    from foresight.nets.models.world_model import obs_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    obs = obs_model(gs.Box(0, 255, (64, 64, 3), np.uint8), 512, 2, 16)
    model = STORM(obs, 6, CausalTransformer(512, 2, 8), context=CONTEXT)
    actor = LatentActor(gs.Discrete(6), model.size, 512, 2)
    with torch.no_grad():
        actions = torch.eye(6)[torch.arange(CONTEXT) % 6].expand(ROLLOUTS, -1, -1)
        state = {
            "stoch": _latents(ROLLOUTS),
            "context": torch.cat([_latents(ROLLOUTS, CONTEXT), actions], -1),
            "filled": torch.ones(ROLLOUTS, CONTEXT, dtype=torch.bool),
        }
        reference = model.imagine(state, actor, HORIZON, torch.Generator().manual_seed(0))[0].obs
        if not cached:
            model.sequence = Uncached(model.sequence)
        found = model.imagine(state, actor, HORIZON, torch.Generator().manual_seed(0))[0].obs  # warm-up
        began = time.perf_counter()
        for seed in range(REPEATS):
            model.imagine(state, actor, HORIZON, torch.Generator().manual_seed(seed))
        seconds = time.perf_counter() - began
    steps = REPEATS * ROLLOUTS * HORIZON
    tokens = _weights(model.mixer) + _weights(model.sequence)
    others = sum(_weights(part) for part in (model.prior_logits, actor, model.reward, model.continues))
    weights = tokens * (1 + CONTEXT / HORIZON) + others
    peak = limit()
    return {
        "rate": steps / seconds,
        "difference": float((found - reference).abs().max()),
        "share": 2 * weights * steps / seconds / peak,
        "gflops": peak / 1e9,
        "threads": 1,
    }


def _weights(part: Any) -> int:
    return sum(p.numel() for p in part.parameters())


def _latents(*lead: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.randint(32, (*lead, 32)), 32).float().flatten(-2)


class Uncached(torch.nn.Module):
    """A sequence model whose memory is the tokens, all of which are read at every step."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net, self.size, self.dropout = net, net.size, net.dropout

    def prefill(self, x: Tensor, filled: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
        """See `SequenceModel`; all slots are filled here."""
        return self.net.net.features(x)[0][:, -1], x

    def step(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See `SequenceModel`."""
        memory = torch.cat([memory, x.unsqueeze(1)], 1)
        return self.net.net.features(memory)[0][:, -1], memory
