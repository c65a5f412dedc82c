"""World models of a line, written down by hand: every prediction is known."""

from __future__ import annotations

from typing import Any

import gymnasium.spaces as gs
import numpy as np
import torch
from torch import Tensor

from foresight.envs.base import Spaces
from foresight.nets.encoders import Flat
from foresight.nets.models.world_model import Images

GAMMA, END = 0.5, 3.0
SPACES = Spaces(gs.Box(-10, 10, (1,), np.float32), gs.Discrete(2))


class Vector:
    """Stands for `world_model.Vectors`."""

    flat = Flat((1,))


class Line:
    """The state is a place; action 1 moves by `step`, action 0 does not. The place `END` ends the episode.

    The reward is the new place, the continuation γ before the end and 0 there.
    """

    size = 1
    obs: Any = Vector()
    discounted = True

    def __init__(self, step: float = 1.0) -> None:
        self.by = step

    def initial(self, batch: int) -> dict[str, Tensor]:
        return {"place": torch.zeros(batch, 1)}

    def observe(self, carry: Any, obs: Tensor, action: Tensor, cut: Tensor, generator: Any) -> dict[str, Tensor]:
        return {"place": obs, "seen": torch.ones_like(obs)}

    def features(self, state: dict[str, Tensor]) -> Tensor:
        return state["place"]

    def begin(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"place": state["place"]}

    def advance(self, state: dict[str, Tensor], action: Tensor, generator: Any) -> tuple[Any, Tensor, Tensor]:
        place = state["place"] + self.by * action[:, 1:]
        return {"place": place}, place[:, 0], GAMMA * (place[:, 0] < END).float()

    def decode(self, state: dict[str, Tensor]) -> Tensor:
        return state["place"]


class Slope(Line):
    """The same with continuous actions: moves of up to `step` in each direction."""

    def advance(self, state: dict[str, Tensor], action: Tensor, generator: Any) -> tuple[Any, Tensor, Tensor]:
        return super().advance(state, action.expand(-1, 2), generator)


class Picture(Line):
    """The same, shown as a gray level of images of 32 × 32 pixels."""

    def __init__(self, step: float = 1.0) -> None:
        super().__init__(step)
        self.obs = Images(gs.Box(0, 255, (32, 32, 3), np.uint8), 2)

    def observe(self, carry: Any, obs: Tensor, action: Tensor, cut: Tensor, generator: Any) -> dict[str, Tensor]:
        return {"place": obs[:, :, 0, 0, :1].float() / 50}

    def decode(self, state: dict[str, Tensor]) -> Tensor:
        return (50 * state["place"]).view(-1, 1, 1, 1).expand(-1, 3, 32, 32).to(torch.uint8)
