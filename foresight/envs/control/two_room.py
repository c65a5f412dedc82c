"""Two rooms with a door, seen as pixels: a point moves to a goal that is given as an image.

After the TwoRoom task of LeWorldModel (arXiv:2603.19312) at 32 × 32 pixels instead of 224 × 224; own sizes and speeds.
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.envs.base import Frame, Spaces

SIDE = 32  # pixels
EDGE, WALL, DOOR = 0.05, 0.04, 0.12  # how near the point gets to the border, the middle of the wall and of the door
GAP = 1e-4  # by which walls stop the point before it touches them: rounding must not put it on the wrong side
SPEED = 0.025  # the longest move along each axis in one step; the room has side 1
RADIUS = 1 / 14  # of the goal: 16 of 224 pixels in the paper
NOISE = 0.5  # standard deviation that the walk to a goal adds to each action
BLOB = 0.035  # standard deviation of the picture of the point
FLOOR, STONE, POINT = (1.0, 1.0, 1.0), (0.25, 0.25, 0.25), (0.85, 0.1, 0.1)  # colors


class TwoRoom:
    """A point in the unit square, whose left and right room are joined by a door in the middle of the wall.

    An action `[2]` in [-1, 1] moves it along x and y, at most `SPEED` per step along each; walls stop it. Observations
    are `image` and `goal`, RGB bytes `[32, 32, 3]`. The episode ends with reward 1 within `RADIUS` of the goal, so
    the mean return is the success rate; there is no other reward.

    A goal is where a noisy walk from the start toward a random place, through the door if needed, is after `ahead`
    steps: the published protocol with its 25 steps, and 50 actions to get there. With `ahead` 0 the goal is anywhere
    in the other room.
    """

    spaces = Spaces(
        gs.Dict({name: gs.Box(0, 255, (SIDE, SIDE, 3), np.uint8) for name in ("goal", "image")}),
        gs.Box(-1.0, 1.0, (2,), np.float32),
    )

    def __init__(self, num_envs: int, ahead: int = 25) -> None:
        self.limit, self.ahead = 50, ahead
        self.place, self.goal = torch.full((2, num_envs, 2), 0.25)
        self._center = (torch.arange(SIDE) + 0.5) / SIDE
        middle = (self._center - 0.5).abs()
        border = middle > 0.5 - EDGE / 2
        wall = (middle < WALL) & (middle > DOOR).unsqueeze(1)
        stone = (wall | border | border.unsqueeze(1)).unsqueeze(-1)
        self._room = torch.where(stone, torch.tensor(STONE), torch.tensor(FLOOR))
        self.goal_image = draw(self.goal, self._room, self._center)

    def begin(self, rows: Tensor, generator: torch.Generator) -> None:
        """Start a new episode in the environments `rows` (bool)."""
        count = len(rows)
        start, end = (EDGE + (1 - 2 * EDGE) * torch.rand(2, count, 2, generator=generator)).unbind(0)
        start, end = outside_wall(start), outside_wall(end)
        if self.ahead:
            goal = start
            for _ in range(self.ahead):
                noise = NOISE * torch.randn(count, 2, generator=generator)
                goal = moved(goal, toward(goal, end) + noise)
        else:
            mirrored = torch.stack([1 - end[:, 0], end[:, 1]], 1)
            goal = torch.where(((start - 0.5) * (end - 0.5) > 0)[:, :1], mirrored, end)
        chosen = rows.unsqueeze(-1)
        self.place, self.goal = torch.where(chosen, start, self.place), torch.where(chosen, goal, self.goal)
        self.goal_image = draw(self.goal, self._room, self._center)

    def move(self, action: Tensor, time: Tensor, generator: torch.Generator) -> Tensor:
        """Take `action` `[B, 2]`; returns the reward `[B]`."""
        self.place = moved(self.place, action)
        return self.over(time).float()

    def over(self, time: Tensor) -> Tensor:
        """Where the goal is reached, `[B]` bool."""
        return (self.place - self.goal).norm(dim=-1) < RADIUS

    def show(self, time: Tensor) -> dict[str, Tensor]:
        """The images of the place and of the goal, `[B, 32, 32, 3]`."""
        return {"goal": self.goal_image.clone(), "image": draw(self.place, self._room, self._center)}

    def picture(self) -> Frame:
        """The image of environment 0 beside its goal, 8 times as large."""
        both = torch.cat([draw(self.place[:1], self._room, self._center)[0], self.goal_image[0]], 1)
        return both.repeat_interleave(8, 0).repeat_interleave(8, 1).numpy()


def outside_wall(place: Tensor) -> Tensor:
    """`[B, 2]` with the places inside the wall, and in the door, put to its nearest side."""
    x = place[:, 0]
    side = torch.where(x < 0.5, 0.5 - WALL - GAP, 0.5 + WALL + GAP)
    return torch.stack([torch.where((x - 0.5).abs() < WALL, side, x), place[:, 1]], 1)


def moved(place: Tensor, action: Tensor) -> Tensor:
    """Where `action` `[B, 2]` leads from `place` `[B, 2]`: first along x, then along y, as far as walls permit."""
    step = SPEED * action.clamp(-1, 1)
    x, y = place.unbind(-1)
    wanted = (x + step[:, 0]).clamp(EDGE, 1 - EDGE)
    blocked = ((y - 0.5).abs() > DOOR) & ((wanted - 0.5).abs() < WALL)
    x = torch.where(blocked, torch.where(x < 0.5, 0.5 - WALL - GAP, 0.5 + WALL + GAP), wanted)
    inside = (x - 0.5).abs() < WALL  # in the door, whose sides stop it
    y = (y + step[:, 1]).clamp(EDGE, 1 - EDGE)
    y = torch.where(inside, y.clamp(0.5 - DOOR + GAP, 0.5 + DOOR - GAP), y)
    return torch.stack([x, y], -1)


def toward(place: Tensor, end: Tensor) -> Tensor:
    """The action `[B, 2]` that leads from `place` to `end`, by way of the door if they are in different rooms."""
    side = torch.where(place[:, 0] < 0.5, 1.0, -1.0)
    apart = (place[:, 0] - 0.5) * (end[:, 0] - 0.5) < 0
    before_door = ((place[:, 1] - 0.5).abs() > DOOR) & apart
    door = torch.stack([0.5 - side * (WALL + SPEED / 2), torch.full_like(side, 0.5)], 1)
    through = torch.stack([0.5 + side * (WALL + SPEED), torch.full_like(side, 0.5)], 1)
    target = torch.where(before_door.unsqueeze(-1), door, torch.where(apart.unsqueeze(-1), through, end))
    return ((target - place) / SPEED).clamp(-1, 1)


def draw(place: Tensor, room: Tensor, center: Tensor) -> Tensor:
    """The point at `place` `[B, 2]` over the picture of the `room` `[32, 32, 3]` with pixels at `center`: bytes."""
    near = (-((center - place.unsqueeze(-1)) ** 2) / (2 * BLOB**2)).exp()  # [B, 2, 32]
    share = (near[:, 1].unsqueeze(-1) * near[:, 0].unsqueeze(-2)).unsqueeze(-1)  # y down, x to the right
    return (255 * torch.lerp(room, torch.tensor(POINT), share)).round().to(torch.uint8)
