"""Two routes: a point has to pass an obstacle on its way to a goal, on the left or on the right.

Demonstrations take either side, equally often and whatever is observed, so the mean of what they do hits the obstacle.
After the multimodal task of Chi et al. 2023 (arXiv:2303.04137, figure 4); own sizes.
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces as gs
from numpy.typing import NDArray
from torch import Tensor

from foresight.envs.base import Frame, Spaces

SPEED = 0.2  # the longest move along each axis in one step; the field is [-1, 1]²
RADIUS = 0.3  # of the obstacle in the middle
GOAL, REACH = (0.0, 0.8), 0.2  # where to go, and how near is there
START, SPREAD = (0.0, -0.9), 0.01  # where episodes begin, and the standard deviation
TURN = -0.6  # the height at which demonstrations turn to a side
ASIDE = 0.6  # how far from the middle they pass the obstacle
NOISE = 0.02  # standard deviation of the noise in the actions of demonstrations
SIDE = 128  # pixels of the picture


class TwoRoutes:
    """A point in [-1, 1]²; an action `[2]` in [-1, 1] moves it by `SPEED` times it. Observed is its place `[2]`.

    The episode ends with reward 1 at the goal, and with reward -1 at the obstacle; after 20 steps it is truncated.
    """

    spaces = Spaces(gs.Box(-1.0, 1.0, (2,), np.float32), gs.Box(-1.0, 1.0, (2,), np.float32))

    def __init__(self, num_envs: int) -> None:
        self.limit = 20
        self.place = torch.tensor(START).repeat(num_envs, 1)
        self.side = torch.ones(num_envs)  # on which demonstrations pass: -1 left, 1 right

    def begin(self, rows: Tensor, generator: torch.Generator) -> None:
        """Start a new episode in the environments `rows` (bool)."""
        start = torch.tensor(START) + SPREAD * torch.randn(self.place.shape, generator=generator)
        drawn = torch.where(torch.rand(self.side.shape, generator=generator) < 0.5, -1.0, 1.0)
        self.place = torch.where(rows.unsqueeze(-1), start.clamp(-1, 1), self.place)
        self.side = torch.where(rows, drawn, self.side)

    def move(self, action: Tensor, time: Tensor, generator: torch.Generator) -> Tensor:
        """Take `action` `[B, 2]`; returns the reward `[B]`."""
        self.place = (self.place + SPEED * action.clamp(-1, 1)).clamp(-1, 1)
        return _near_goal(self.place).float() - collides(self.place).float()

    def over(self, time: Tensor) -> Tensor:
        """Where the goal or the obstacle is reached, `[B]` bool."""
        return collides(self.place) | _near_goal(self.place)

    def show(self, time: Tensor) -> Tensor:
        """The place `[B, 2]`."""
        return self.place.clone()

    def expert(self, generator: torch.Generator) -> Tensor:
        """Demonstrations `[B, 2]`: straight on, then past the obstacle on the side that `begin` drew."""
        noise = NOISE * torch.randn(self.place.shape, generator=generator)
        return (toward(self.place, self.side) + noise).clamp(-1, 1)

    def picture(self) -> Frame:
        """The place in environment 0 (red), the obstacle (gray) and the goal (green)."""
        axis = (torch.arange(SIDE) + 0.5) / SIDE * 2 - 1
        at = torch.stack([axis.expand(SIDE, SIDE), -axis.unsqueeze(1).expand(SIDE, SIDE)], -1)  # y up
        image: NDArray[np.uint8] = np.full((SIDE, SIDE, 3), 255, np.uint8)
        for center, radius, color in (
            ((0.0, 0.0), RADIUS, (64, 64, 64)), (GOAL, REACH, (90, 190, 90)),
            (self.place[0].tolist(), 0.05, (217, 26, 26)),
        ):  # fmt: skip
            image[((at - torch.tensor(center)).norm(dim=-1) < radius).numpy()] = color
        return image


def collides(place: Tensor) -> Tensor:
    """Where places `[..., 2]` are in the obstacle, `[...]` bool."""
    return place.norm(dim=-1) < RADIUS


def _near_goal(place: Tensor) -> Tensor:
    return (place - torch.tensor(GOAL)).norm(dim=-1) < REACH


def toward(place: Tensor, side: Tensor) -> Tensor:
    """The action `[B, 2]` at `place` `[B, 2]` of a demonstration that passes on `side` `[B]`, -1 or 1."""
    y, zero = place[:, 1], torch.zeros_like(side)
    before, beside = y < TURN, (y < 0) & (y >= TURN)
    ahead = torch.stack([zero, torch.ones_like(side)], 1)
    past = torch.stack([side * ASIDE, zero + 0.05], 1)
    to_goal = torch.tensor(GOAL).expand_as(place)
    target = torch.where(beside.unsqueeze(-1), past, to_goal)
    move = (target - place) / SPEED
    move = move / move.norm(dim=-1, keepdim=True).clamp(min=1)
    return torch.where(before.unsqueeze(-1), ahead, move)
