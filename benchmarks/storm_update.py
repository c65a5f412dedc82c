"""Memory and time of one of STORM's updates: `gradient_checkpointing` compared with without it.

16 sequences of 64 images for the model, 1,024 rollouts of 16 steps from contexts of 8 for the agent: the defaults of
`storm.Config`, which are the published sizes but of the image networks, on random 64 × 64 images in color. `peak_gib`
is the highest resident memory of the process in the first two updates less what it was before the networks were built;
`whole_gib` is all of it. `model_gib` is the same after the model's first update, before the agent's. One thread; `rate`
counts seconds of processor time, which other programs on the machine disturb less than those of a clock.
"""

from __future__ import annotations

import time
from typing import Any

UNIT = "updates/s of one core"
PEER = "foresight"
ROWS, ACTIONS, UPDATES = 600, 6, 2


def ours() -> dict[str, Any]:
    """Encoder and decoder are recomputed in the backward pass."""
    return _measure(True)


def peer() -> dict[str, Any]:
    """Their activations are kept."""
    return _measure(False)


def _measure(checkpointing: bool) -> dict[str, Any]:
    import gymnasium.spaces as gs
    import numpy as np
    import torch

    from foresight.algorithms.world import storm
    from foresight.envs.base import Spaces

    torch.set_num_threads(1)
    spaces = Spaces(gs.Box(0, 255, (64, 64, 3), np.uint8), gs.Discrete(ACTIONS))
    config = storm.Config(replay_size=ROWS, gradient_checkpointing=checkpointing)
    before = _peak()
    state = storm.build(config, spaces)
    generator = torch.Generator().manual_seed(0)
    for _ in range(ROWS - 10):
        image = torch.randint(256, (1, 64, 64, 3), dtype=torch.uint8, generator=generator)
        cut = (torch.rand(1, generator=generator) < 0.01).float()
        action = torch.randint(ACTIONS, (1,), generator=generator)
        row = {
            "obs": image, "action": action, "reward": torch.randn(1, generator=generator), "discount": 1 - cut,
            "cut": cut, "mask": torch.ones(1), "extras": {"action": torch.eye(ACTIONS)[action]},
        }  # fmt: skip
        state.replay.add(row, image)
    began = time.process_time()
    batch, arrival = storm.sample(state, config.batch_size, config.sequence_length)
    _, found = storm.update_model(state, batch, arrival)
    model = _peak()
    storm.update_agent(state, *storm.roots(state, *storm.sample(state, config.imagined_batch, config.context + 1)))
    del batch, arrival, found
    for _ in range(UPDATES - 1):
        storm.update(state)
    return {
        "rate": UPDATES / (time.process_time() - began),
        "peak_gib": _peak() - before,
        "whole_gib": _peak(),
        "model_gib": model - before,
        "weights": sum(p.numel() for part in (state.model, state.actor, state.critic) for p in part.parameters()),
        "threads": 1,
    }


def _peak() -> float:
    """The highest resident memory of this process so far, in GiB."""
    from foresight.runtime import machine

    return machine.peak_gib()
