"""Batched tasks that test memory alone: the passive T-maze and repeat-first.

Both show the deciding cue at the first step only; a policy without memory can only guess.
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.envs.base import Spaces

RIGHT, UP, LEFT, DOWN = range(4)


class TMaze:
    """The passive T-maze of Ni et al. 2023 (arXiv:2307.03864), after Bakker 2001: a corridor of `length` steps.

    The observation is `[junction, side]`. At the first step side is the side of the goal, +1 (up) or -1 (down); in the
    corridor both are 0; at its end junction is 1 and side is the arm. Actions: right, up, left, down; walls block.
    An episode has length + 1 actions. The last one earns 1 in the arm of the goal and 0 elsewhere; every other one
    costs 1 / length if the agent is behind where always going right would have brought it. So the best return is 1,
    and 0.5 for a policy that cannot remember the goal.
    """

    spaces = Spaces(gs.Box(-1.0, 1.0, (2,), np.float32), gs.Discrete(4))

    def __init__(self, length: int, num_envs: int) -> None:
        self.length, self.last = length, length + 1
        self.limit = self.last
        self.goal, self.x, self.y = (torch.zeros(num_envs, dtype=torch.int64) for _ in range(3))

    def begin(self, rows: Tensor, generator: torch.Generator) -> None:
        """Start a new episode in the environments `rows` (bool)."""
        goal = 2 * torch.randint(0, 2, rows.shape, generator=generator) - 1
        self.goal = torch.where(rows, goal, self.goal)
        self.x, self.y = self.x.masked_fill(rows, 0), self.y.masked_fill(rows, 0)

    def move(self, action: Tensor, time: Tensor, generator: torch.Generator) -> Tensor:
        """Take `action` `[B]`, the `time`-th of its episode (from 1); returns the reward `[B]`."""
        along = (action == RIGHT).long() - (action == LEFT).long()
        across = (action == UP).long() - (action == DOWN).long()
        self.x = torch.where(self.y == 0, (self.x + along).clamp(0, self.length), self.x)
        self.y = torch.where(self.x == self.length, (self.y + across).clamp(-1, 1), self.y)
        late = (self.x < time).float() / -self.length
        return torch.where(time == self.last, (self.y == self.goal).float(), late)

    def over(self, time: Tensor) -> Tensor:
        """Where the episode has terminated, `[B]` bool."""
        return time == self.last

    def show(self, time: Tensor) -> Tensor:
        """The observation after `time` `[B]` actions of the episode."""
        junction = self.x == self.length
        side = torch.where(junction, self.y, torch.where(time == 0, self.goal, 0))
        return torch.stack([junction, side], 1).float()


class RepeatFirst:
    """Repeat-first of POPGym (Morad et al. 2023, arXiv:2303.01859): always answer with the first suit shown.

    Each of `length` steps shows one of `suits` cards, drawn independently (POPGym deals a deck), and earns 1 / length
    if the action is the suit of the first one, else -1 / length. The best return is 1; a policy without memory gets
    2 / suits - 1, and a little more because the first step shows the answer.
    """

    def __init__(self, length: int, num_envs: int, suits: int = 4) -> None:
        self.length, self.last, self.limit, self.suits = length, length, length, suits
        self.spaces = Spaces(gs.Discrete(suits), gs.Discrete(suits))
        self.first, self.card = (torch.zeros(num_envs, dtype=torch.int64) for _ in range(2))

    def begin(self, rows: Tensor, generator: torch.Generator) -> None:
        """Start a new episode in the environments `rows` (bool)."""
        card = torch.randint(0, self.suits, rows.shape, generator=generator)
        self.first, self.card = torch.where(rows, card, self.first), torch.where(rows, card, self.card)

    def move(self, action: Tensor, time: Tensor, generator: torch.Generator) -> Tensor:
        """Take `action` `[B]`, the `time`-th of its episode (from 1); returns the reward `[B]`."""
        self.card = torch.randint(0, self.suits, action.shape, generator=generator)
        return (2 * (action == self.first).float() - 1) / self.length

    def over(self, time: Tensor) -> Tensor:
        """Where the episode has terminated, `[B]` bool."""
        return time == self.last

    def show(self, time: Tensor) -> Tensor:
        """The current card."""
        return self.card
