"""An environment with a known solution: walk to the button whose color the mission names, and press it."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.envs.base import Feedback, Spaces

CELLS, SIDE, LIMIT, GAMMA = 5, 8, 10, 0.9
LEFT, RIGHT, PRESS = 0, 1, 2
MISSIONS = torch.tensor([list(m.ljust(12, b"\0")) for m in (b"press red", b"press blue")], dtype=torch.uint8)
SPACES = Spaces(
    gs.Dict(
        {
            "image": gs.Box(0, 255, (SIDE, CELLS * SIDE, 3), np.uint8),
            "mission": gs.Box(0, 255, (12,), np.uint8),
        }
    ),
    gs.Discrete(3),
)


class Corridor:
    """Five cells, a red and a blue button at the ends, in either order; the walker is green.

    The right button gives 1, the wrong one 0; both terminate. After `LIMIT` steps an episode is cut.
    """

    name, spaces = "Corridor", SPACES

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def reset(self, seed: int):
        """New episodes."""
        self.generator = torch.Generator().manual_seed(seed)
        self.at, self.red, self.named, self.time = (torch.zeros(self.num_envs, dtype=torch.int64) for _ in range(4))
        self._begin(torch.ones(self.num_envs, dtype=torch.bool))
        return observe(self.at, self.red, self.named)

    def _begin(self, which: Tensor) -> None:
        for x, high in ((self.at, CELLS), (self.red, 2), (self.named, 2), (self.time, 1)):
            x[which] = torch.randint(high, (int(which.sum()),), generator=self.generator)

    def step(self, action: Tensor) -> Feedback:
        """Walk or press."""
        self.time += 1
        self.at = (self.at + (action == RIGHT).long() - (action == LEFT).long()).clamp(0, CELLS - 1)
        end = (action == PRESS) & ((self.at == 0) | (self.at == CELLS - 1))
        reward = (end & (self.at == goal(self.red, self.named))).float()
        cut = end | (self.time >= LIMIT)
        final = observe(self.at, self.red, self.named)
        info = {"episode_return": reward[cut].tolist(), "episode_length": self.time[cut].tolist()} if cut.any() else {}
        self._begin(cut)
        obs = observe(self.at, self.red, self.named) if cut.any() else final
        return Feedback(obs, reward, 1 - end.float(), cut.float(), torch.ones(self.num_envs), final, info)

    def render(self) -> None:
        """Nothing to draw."""

    def close(self) -> None:
        """Nothing to close."""


def goal(red: Tensor, named: Tensor) -> Tensor:
    """The cell of the button to press. `red` is the side of the red button, `named` is 1 for blue."""
    return (red ^ named) * (CELLS - 1)


def observe(at: Tensor, red: Tensor, named: Tensor) -> dict[str, Tensor]:
    """The image and the mission of each state."""
    rows = torch.arange(len(at))
    cells = torch.zeros(len(at), CELLS, 3, dtype=torch.uint8)
    cells[rows, red * (CELLS - 1), 0] = 255
    cells[rows, (1 - red) * (CELLS - 1), 2] = 255
    cells[rows, at, 1] = 255
    image = cells[:, None].expand(-1, SIDE, -1, -1).repeat_interleave(SIDE, 2)
    return {"image": image.contiguous(), "mission": MISSIONS[named]}


def states() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """All 20 observations, the best action in each, and its value γᵈ for d steps before the press."""
    at, red, named = torch.cartesian_prod(torch.arange(CELLS), torch.arange(2), torch.arange(2)).unbind(1)
    target = goal(red, named)
    best = torch.where(target == at, PRESS, torch.where(target > at, RIGHT, LEFT))
    return observe(at, red, named), best, GAMMA ** (target - at).abs()
