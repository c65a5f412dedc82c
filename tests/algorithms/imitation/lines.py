"""Demonstrations small enough for tests: a point on a line, whose actions are a known function of what was seen."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from gymnasium import spaces as gs

from foresight.data import episodes
from foresight.data.episodes import Episodes
from foresight.data.trajectory import Tree
from foresight.envs.base import Spaces

SPACES = Spaces(gs.Box(-9, 9, (2,), np.float32), gs.Box(-9, 9, (2,), np.float32))
ENV = SimpleNamespace(spaces=SPACES, num_envs=1)


def line(length: int = 6, count: int = 4, dims: int = 2) -> Episodes:
    """Episodes in which the observation is (time, 1) and the action (2 · time, 3): its second dimension is constant."""
    time = torch.arange(length + 1.0)
    obs, action = torch.stack([time, torch.ones_like(time)], 1), torch.stack([2 * time, 3 + 0 * time], 1)
    action[-1] = 0
    one = Episodes(obs, action, torch.zeros(length + 1), torch.tensor([length]), torch.tensor([False]))
    return episodes.join([one] * count)


SIGHTS = {  # a picture whose brightness is the time of `line`, alone or with a vector
    "picture": gs.Box(0, 255, (12, 12, 1), np.uint8),
    "dict": gs.Dict({"eye": gs.Box(0, 255, (12, 12, 1), np.uint8), "pose": gs.Box(-9, 9, (2,), np.float32)}),
}


def seen(kind: str, values: torch.Tensor) -> Tree:
    """Observations `[..., 2]` of `line` as those of the space `SIGHTS[kind]`, whose vector then is constant."""
    picture = (40 * values[..., :1, None, None]).expand(*values.shape[:-1], 12, 12, 1).byte()
    return picture if kind == "picture" else {"eye": picture, "pose": torch.ones_like(values)}


def two_modes(count: int = 16) -> Episodes:
    """Half of the episodes act -1 throughout and half act 1; nothing that is seen tells which."""
    found = []
    for i in range(count):
        action = torch.full((5, 1), -1.0 if i % 2 else 1.0)
        action[-1] = 0
        found.append(Episodes(torch.zeros(5, 1), action, torch.zeros(5), torch.tensor([4]), torch.tensor([False])))
    return episodes.join(found)


TWO_MODES = Spaces(gs.Box(-1, 1, (1,), np.float32), gs.Box(-1, 1, (1,), np.float32))
