"""The global generators of torch, for what takes no other one: dropout and initialization."""

from __future__ import annotations

import torch


def seed_global(seed: int, device: torch.device | str) -> None:
    """Seed the generators that torch draws from on the CPU and on `device`.

    `torch.manual_seed` also writes down the stack of calls for devices that are not in use: too slow for every gradient
    step of a small network.
    """
    if torch.device(device).type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
