"""A small environment: a bright square is left or right, and the mission is to point at it or away."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs

from foresight.data.episodes import Episodes
from foresight.envs.base import Episodes as Finished
from foresight.envs.base import Feedback, Spaces

SPACES = Spaces(
    gs.Dict({"image": gs.Box(0, 255, (32, 32, 3), np.uint8), "mission": gs.Box(0, 255, (16,), np.uint8)}),
    gs.Discrete(3),  # the third action is never right
)
MISSIONS = torch.tensor([list(m.ljust(16, b"\0")) for m in (b"point at it", b"point away")], dtype=torch.uint8)
FIELDS: dict[str, Any] = {
    "dim": 16, "layers": 1, "heads": 2, "channels": 8, "patch": 16, "film_layers": 1, "image_tokens": 4, "words": 4,
}  # fmt: skip


def scene(generator: torch.Generator, count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Observations and the right actions, which neither the image nor the mission alone tells."""
    side, said = torch.randint(0, 2, (2, count), generator=generator)
    image = torch.randint(0, 60, (count, 32, 32, 3), generator=generator, dtype=torch.uint8)
    for i in range(count):
        image[i, 8:24, 16 * side[i] : 16 * side[i] + 16] += 180
    return {"image": image, "mission": MISSIONS[said]}, side ^ said


class Pointing:
    """Episodes of one step with the reward 1 for the right action; `same_starts` repeats scenes."""

    name, spaces = "Pointing", SPACES

    def __init__(self, num_envs: int = 8) -> None:
        self.num_envs, self.group = num_envs, 1
        self.finished = Finished()

    def same_starts(self, group: int) -> None:
        """Repeat each scene."""
        self.group = group

    def reset(self, seed: int):
        """Scenes."""
        self.generator = torch.Generator().manual_seed(seed)
        return self._next()

    def _next(self):
        obs, right = scene(self.generator, self.num_envs // self.group)
        self.right = right.repeat_interleave(self.group)
        return {key: x.repeat_interleave(self.group, 0) for key, x in obs.items()}

    def step(self, action: torch.Tensor) -> Feedback:
        """Every step ends an episode."""
        reward = (action == self.right).float()
        final, ones = {k: torch.zeros_like(x) for k, x in self._next().items()}, torch.ones(self.num_envs)
        info = {"episode_return": reward.tolist(), "episode_length": [1] * self.num_envs}
        return Feedback(self._next(), reward, 0 * ones, ones, ones, final, info)

    def render(self) -> None:
        """Nothing to draw."""

    def close(self) -> None:
        """Nothing to close."""


class Touching:
    """`Pointing` by a point of the image: the action is the side that it is on."""

    name, spaces = "Touching", Spaces(SPACES.obs, gs.Box(0, 1, (2,), np.float32))

    def __init__(self, num_envs: int) -> None:
        self.env, self.num_envs = Pointing(num_envs), num_envs
        self.reset, self.same_starts = self.env.reset, self.env.same_starts

    def step(self, action: torch.Tensor) -> Feedback:
        """Left of the middle is 0."""
        return self.env.step((action[:, 0] > 0.5).long())


def demonstrations(count: int = 256) -> Episodes:
    """Right actions."""
    obs, right = scene(torch.Generator().manual_seed(0), count)
    rows = torch.arange(count).repeat_interleave(2)
    return Episodes(
        {key: x[rows] for key, x in obs.items()},
        torch.where(torch.arange(2 * count) % 2 == 0, right[rows], 0),
        torch.tensor([1.0, 0.0]).repeat(count),
        torch.ones(count, dtype=torch.int64),
        torch.ones(count, dtype=torch.bool),
    )
