"""Actions of planners, scaled to [-1, 1], and the bounds of the environment's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.errors import UserError


def width(space: gs.Space[Any]) -> int:
    """The number of dims of an action. Raises UserError for a space that is not a bounded Box with one dim."""
    if isinstance(space, gs.Box) and len(space.shape) == 1 and np.isfinite([space.low, space.high]).all():
        return int(space.shape[0])
    raise UserError(
        f"CEM and MPPI plan bounded Box actions with one dim, not {space}. Choose an environment with such actions, "
        "such as Pendulum-v1, or an algorithm for discrete actions, such as muzero or dreamer."
    )


def to_env(action: Tensor, space: gs.Box) -> Tensor:
    """Actions `[..., A]` in [-1, 1], mapped linearly to the bounds of `space`."""
    low, high = (torch.from_numpy(x).to(action) for x in (space.low, space.high))
    return (high + low) / 2 + (high - low) / 2 * action
