"""Glide: the disc of errands, alone on an open floor, gets to a point and stops there."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.envs.base import Spaces
from foresight.envs.control.errands.rules import FRICTION, SLOW, SPEED, THRUST

FAR = 0.45  # the point is at most so far away along each axis
NEAR = 0.03  # the radius of the point


class Glide:
    """An action `[2]` in [-1, 1] is thrust; the motion is that of `errands.rules`, without walls.

    Observed are the offset of the point, in units of `FAR`, and the velocity, in units of `SPEED`: `[4]`. The reward
    is from 0 to 1: half for being near, half for being slow at the point. Episodes are cut after 40 steps.
    """

    spaces = Spaces(gs.Box(-10.0, 10.0, (4,), np.float32), gs.Box(-1.0, 1.0, (2,), np.float32), continuing=True)

    def __init__(self, num_envs: int) -> None:
        self.limit = 40
        self.offset, self.velocity = torch.zeros(2, num_envs, 2)

    def begin(self, rows: Tensor, generator: torch.Generator) -> None:
        """Start a new episode in the environments `rows` (bool)."""
        offset, velocity = (2 * torch.rand(2, *self.offset.shape, generator=generator) - 1).unbind(0)
        chosen = rows.unsqueeze(-1)
        self.offset = torch.where(chosen, FAR * offset, self.offset)
        self.velocity = torch.where(chosen, SPEED * velocity, self.velocity)

    def move(self, action: Tensor, time: Tensor, generator: torch.Generator) -> Tensor:
        """Take `action` `[B, 2]`; returns the reward `[B]`."""
        self.velocity = (FRICTION * self.velocity + THRUST * action.clamp(-1, 1)).clamp(-SPEED, SPEED)
        self.offset = self.offset - self.velocity
        distance, speed = self.offset.abs().amax(-1), self.velocity.abs().amax(-1)
        near = (-distance / (4 * NEAR)).exp()
        there = (distance <= NEAR) * (1 - speed / SLOW).clamp(min=0)
        return 0.5 * near + 0.5 * there

    def over(self, time: Tensor) -> Tensor:
        """Never, `[B]` bool."""
        return torch.zeros(len(time), dtype=torch.bool)

    def show(self, time: Tensor) -> Tensor:
        """The observation `[B, 4]`."""
        return observation(self.offset, self.velocity)


def observation(offset: Tensor, velocity: Tensor) -> Tensor:
    """What is observed of an offset and a velocity `[B, 2]`: `[B, 4]`."""
    return torch.cat([offset / FAR, velocity / SPEED], -1)
