"""Key and door: a grid world in pixels that is seen in part, batched.

Two rooms are separated by a wall with one locked door. The agent and a key start in the left room, the goal is in the
right one; all places are drawn for every episode. The observation is an image of the cells around the agent.
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces as gs
from numpy.typing import NDArray
from torch import Tensor

from foresight.envs.base import Frame, Spaces
from foresight.errors import UserError

RIGHT, UP, LEFT, DOWN = range(4)
FLOOR, WALL, DOOR, OPEN, KEY, GOAL, AGENT, HOLDER = range(8)  # cells; HOLDER is the agent with the key
PIXELS = 64  # a side of the observation
MOVES = torch.tensor([[0, 1], [-1, 0], [0, -1], [1, 0]])  # (row, column) of each action


class KeyDoor:
    """The rules: rooms of `size` × `size` cells, of which the agent sees `view` × `view`, itself in the middle.

    Actions: right, up, left, down; a wall and a locked door block. Who steps on the key takes it, who steps into the
    door with the key opens it. An episode ends with reward 1 at the goal; every other reward is 0, so the return is 1
    for a success and 0 for a failure. The time limit, 100 actions by default, truncates.

    The observation is `[64, 64, 3]`, bytes. The agent is red, with a yellow dot while it holds the key. Cells outside
    are walls.
    """

    spaces = Spaces(gs.Box(0, 255, (PIXELS, PIXELS, 3), np.uint8), gs.Discrete(4))
    limit = 100  # actions

    def __init__(self, size: int, view: int, num_envs: int) -> None:
        """Raises UserError unless `view` is odd and at most 15."""
        if view % 2 == 0 or view > 15:
            raise UserError(f"view of 'KeyDoor-v0' must be an odd number of cells from 3 to 15, not {view}.")
        self.size, self.view, self.margin = size, view, view // 2
        self._tiles, self._border = tiles(PIXELS // view), (PIXELS - PIXELS // view * view) // 2
        height, width = size + 2 * self.margin, 2 * size + 1 + 2 * self.margin
        empty = torch.full((height, width), WALL)
        for left in (self.margin, self.margin + size + 1):
            empty[self.margin : self.margin + size, left : left + size] = FLOOR
        self._empty, self._rows = empty, torch.arange(num_envs)
        self._offsets = torch.arange(view) - self.margin
        self.cells = empty.expand(num_envs, -1, -1).clone()
        self.place = torch.zeros(num_envs, 2, dtype=torch.int64)  # (row, column) of the agent
        self.holds = torch.zeros(num_envs, dtype=torch.bool)
        self.reached = torch.zeros(num_envs, dtype=torch.bool)

    def begin(self, rows: Tensor, generator: torch.Generator) -> None:
        """Start a new episode in the environments `rows` (bool)."""
        count, area = len(rows), self.size**2
        agent, goal = (torch.randint(area, (count,), generator=generator) for _ in range(2))
        key = (agent + 1 + torch.randint(area - 1, (count,), generator=generator)) % area  # not where the agent is
        door = torch.randint(self.size, (count,), generator=generator)
        cells = self._empty.repeat(count, 1, 1)
        cells[(self._rows, *self._in_room(key, 0).unbind(1))] = KEY
        cells[(self._rows, *self._in_room(goal, 1).unbind(1))] = GOAL
        cells[self._rows, self.margin + door, self.margin + self.size] = DOOR
        self.cells = torch.where(rows.view(-1, 1, 1), cells, self.cells)
        self.place = torch.where(rows.unsqueeze(1), self._in_room(agent, 0), self.place)
        self.holds, self.reached = self.holds & ~rows, self.reached & ~rows

    def move(self, action: Tensor, time: Tensor, generator: torch.Generator) -> Tensor:
        """Take `action` `[B]`; returns the reward `[B]`."""
        wanted = self.place + MOVES[action]
        cell = self.cells[(self._rows, *wanted.unbind(1))]
        blocked = (cell == WALL) | ((cell == DOOR) & ~self.holds)
        self.place = torch.where(blocked.unsqueeze(1), self.place, wanted)
        self.holds = self.holds | (cell == KEY)
        after = torch.where(cell == KEY, FLOOR, torch.where((cell == DOOR) & self.holds, OPEN, cell))
        self.cells = self.cells.index_put((self._rows, *wanted.unbind(1)), after)
        self.reached = cell == GOAL
        return self.reached.float()

    def over(self, time: Tensor) -> Tensor:
        """Where the episode has terminated, `[B]` bool."""
        return self.reached

    def show(self, time: Tensor) -> Tensor:
        """The observation, `[B, 64, 64, 3]`."""
        rows, columns = (self.place.unsqueeze(2) + self._offsets).unbind(1)
        seen = self.cells[self._rows.view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)]
        seen[:, self.margin, self.margin] = AGENT + self.holds.long()
        obs = torch.zeros(len(seen), PIXELS, PIXELS, 3, dtype=torch.uint8)
        inside = slice(self._border, self._border + self.view * self._tiles.shape[1])
        obs[:, inside, inside] = self._drawn(seen)
        return obs

    def picture(self) -> Frame:
        """The whole grid of environment 0, what the agent sees in full color, and beside it the observation."""
        cells = self.cells[0].clone()
        row, column = self.place[0].tolist()
        cells[row, column] = AGENT + int(self.holds[0])
        image = self._drawn(cells.unsqueeze(0))[0]
        bright = torch.zeros(cells.shape, dtype=torch.bool)
        bright[row - self.margin : row + self.margin + 1, column - self.margin : column + self.margin + 1] = True
        side = self._tiles.shape[1]
        bright = bright.repeat_interleave(side, 0).repeat_interleave(side, 1).unsqueeze(2)
        image = torch.where(bright, image, image // 3)
        first = self.show(torch.zeros(len(self.place)))[0]
        height = max(len(image), PIXELS)
        beside = torch.zeros(height, image.shape[1] + PIXELS + side, 3, dtype=torch.uint8)
        beside[: len(image), : image.shape[1]] = image
        beside[:PIXELS, -PIXELS:] = first
        return beside.repeat_interleave(3, 0).repeat_interleave(3, 1).numpy()

    def _in_room(self, index: Tensor, room: int) -> Tensor:
        """`(row, column)` `[B, 2]` of the cells `index` `[B]` of a room, counted by rows."""
        left = self.margin + room * (self.size + 1)
        return torch.stack([self.margin + index // self.size, left + index % self.size], 1)

    def _drawn(self, cells: Tensor) -> Tensor:
        """Cells `[B, H, W]` as pixels `[B, H side, W side, 3]`."""
        batch, height, width = cells.shape
        side = self._tiles.shape[1]
        return self._tiles[cells].transpose(2, 3).reshape(batch, height * side, width * side, 3)


def tiles(side: int) -> Tensor:
    """The picture of every kind of cell, `[8, side, side, 3]`, bytes."""
    y, x = (np.mgrid[:side, :side] + 0.5) / side  # of the pixels' centers, in [0, 1]
    radius = np.hypot(y - 0.5, x - 0.5)
    bow = np.hypot(y - 0.5, x - 0.3) < 0.2
    blade = (abs(y - 0.5) < 0.09) & (x > 0.4) & (x < 0.88)
    tooth = (abs(x - 0.78) < 0.1) & (y > 0.5) & (y < 0.75)
    edge = np.maximum(abs(y - 0.5), abs(x - 0.5))
    made: NDArray[np.uint8] = np.full((8, side, side, 3), (24, 24, 32), np.uint8)
    made[:, edge > 0.46] = (44, 44, 56)  # faint lines between cells
    made[WALL] = (120, 120, 120)
    made[DOOR, edge < 0.5] = (150, 90, 30)
    made[DOOR, radius < 0.14] = (20, 12, 4)
    made[OPEN, edge > 0.34] = (150, 90, 30)
    made[KEY, bow | blade | tooth] = (240, 210, 40)
    made[GOAL, edge < 0.42] = (40, 190, 70)
    made[AGENT : HOLDER + 1, radius < 0.44] = (220, 50, 50)
    made[HOLDER, radius < 0.2] = (240, 210, 40)
    return torch.from_numpy(made)
