"""An environment with images in Gymnasium's layout: only the color of a lamp tells the right action."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces as gs

LENGTH = 8


class ColorChoice(gymnasium.Env):  # type: ignore[type-arg]
    """`[36, 40, 3]`: a red or a green field, equally bright, on a dark ground. The right action is worth 1."""

    def __init__(self, discrete: bool = True, gray: bool = False) -> None:
        self.observation_space = gs.Box(0, 255, (36, 40) if gray else (36, 40, 3), np.uint8)
        self.action_space = gs.Discrete(2) if discrete else gs.Box(-1.0, 1.0, (1,), np.float32)
        self.discrete, self.gray, self.steps, self.green = discrete, gray, 0, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.see(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        right = float((int(action) == 1) == self.green) if self.discrete else float(action[0]) * (2 * self.green - 1)
        return self.see(), right, self.steps == LENGTH, False, {}

    def see(self) -> Any:
        self.green = bool(self.np_random.integers(2))
        picture = np.full((36, 40, 3), 10, np.uint8)
        picture[4:27, 6:34] = (0, 102, 0) if self.green else (200, 0, 0)
        return picture[..., 0] if self.gray else picture


gymnasium.register("ColorChoice-v0", lambda **options: ColorChoice(**options))
