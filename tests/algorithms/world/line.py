"""A point on a line, seen in one row of pixels: the smallest task whose goals are images."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.algorithms.world.lewm import Config
from foresight.envs.base import Spaces
from foresight.envs.control.own import Own

SPEED = 0.1
# Sizes at which an update takes a few milliseconds.
LEWM = Config(
    steps=60, num_envs=16, data_steps=2_048, hold=2.0, block=2, history=2, batch_size=64, slices=16, dim=2, depth=4,
    width=16, layers=1, heads=2, hidden=32, horizon=3, executed=3, candidates=32, elites=8, iterations=3, lr_warmup=10,
    learning_rate=3e-3,
)  # fmt: skip


class Line:
    """A point in [0, 1], which an action of 2 moves by 0.1; the goal is within 0.03 of a place up to 0.4 away."""

    spaces = Spaces(
        gs.Dict({name: gs.Box(0, 255, (8, 8, 1), np.uint8) for name in ("goal", "image")}),
        gs.Box(-2.0, 2.0, (1,), np.float32),
    )
    limit = 6

    def __init__(self, num_envs: int) -> None:
        self.place, self.goal = torch.zeros(2, num_envs)

    def begin(self, rows: Tensor, generator: torch.Generator) -> None:
        """Start and goal are uniform."""
        start, far = torch.rand(2, len(rows), generator=generator)
        goal = (start + 0.8 * far - 0.4).clamp(0, 1)
        self.place, self.goal = torch.where(rows, start, self.place), torch.where(rows, goal, self.goal)

    def move(self, action: Tensor, time: Tensor, generator: torch.Generator) -> Tensor:
        """1 at the goal."""
        self.place = (self.place + SPEED * action[:, 0].clamp(-2, 2) / 2).clamp(0, 1)
        return self.over(time).float()

    def over(self, time: Tensor) -> Tensor:
        """At the goal."""
        return (self.place - self.goal).abs() < 0.03

    def show(self, time: Tensor) -> dict[str, Tensor]:
        """Both places."""
        return {"goal": draw(self.goal), "image": draw(self.place)}


def draw(place: Tensor) -> Tensor:
    """A blurred column at `place` `[B]`: bytes `[B, 8, 8, 1]`."""
    near = (-(((torch.arange(8) + 0.5) / 8 - place.unsqueeze(-1)) ** 2) / (2 * 0.15**2)).exp()
    return (255 * near).round().to(torch.uint8).view(-1, 1, 8, 1).expand(-1, 8, -1, -1)


def line(num_envs: int = 16) -> Own:
    """`num_envs` lines."""
    return Own("Line", num_envs, Line(num_envs), None)
