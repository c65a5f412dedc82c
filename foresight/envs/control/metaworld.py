"""MetaWorld with an instruction and a sparse reward: a robot arm, and actions that are chunks of several movements.

Source: Yu et al. 2019 (arXiv:1910.10897); the simulation is EnvPool's. The reward is as in RL4VLA (arXiv:2505.19789): 1
for a success. A chunk is taken movement by movement, without a look in between, as VLAs act (arXiv:2304.13705).
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from numpy.typing import NDArray
from torch import Tensor

from foresight.data.text import encoded
from foresight.envs.base import Env, Spaces
from foresight.envs.control import engines, vector
from foresight.errors import UserError

PREFIX = "MetaWorld/"
REACH = "MetaWorld/Reach-v3"  # the task with an expert
MOVEMENTS = 100  # of an episode; the hand crosses its space in about 50
NUMBERS, MOVES = 39, 4  # of an observation and of a movement: x, y, z of the hand, and the gripper
LETTERS = 32  # bytes of an instruction, padded with zeros
SPEED = 0.01  # the longest movement of the hand along each axis, in meters
GAIN = 10.0  # of the expert, in movements per meter: MetaWorld's own controllers have 5 to 25


def make(name: str, num_envs: int, time_limit: int | None = None, chunk: int = 1) -> Env:
    """A batch of the MetaWorld task `name`, whose actions are chunks `[chunk, 4]` in [-1, 1].

    Observations are a dict: `state` `[39]`, MetaWorld's own with the goal in sight, and `mission` `[32]`, the name of
    the task in words as UTF-8 bytes. The reward is 1 for a success, which ends the episode, and 0 otherwise. An episode
    has at most `time_limit` chunks, by default 100 movements. Reach has an expert. Raises UserError for other options.
    """
    if not isinstance(chunk, int) or not 1 <= chunk <= MOVEMENTS:
        raise UserError(f"chunk of '{name}' must be a whole number of movements from 1 to {MOVEMENTS}, not {chunk!r}.")
    if name not in engines.envpool_ids():
        raise engines.unknown(name)
    limit = time_limit or max(1, MOVEMENTS // chunk)
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", name.removeprefix(PREFIX).rpartition("-")[0]).lower()
    built: list[Instructed] = []

    def build(seed: int) -> vector.Engine:
        engine = engines.load("envpool").make(
            name, "gymnasium", num_envs=num_envs, seed=seed, partially_observable=False,
            max_episode_steps=limit * chunk + 1,
        )  # fmt: skip
        built[:] = [Instructed(engine, words)]
        return built[0]

    spaces = Spaces(
        gs.Dict(
            {
                "state": gs.Box(-np.inf, np.inf, (NUMBERS,), np.float32),
                "mission": gs.Box(0, 255, (LETTERS,), np.uint8),
            }
        ),
        gs.Box(-1.0, 1.0, (chunk, MOVES), np.float32),
    )
    env: Any = engines.pool(name, num_envs, spaces, build, limit)
    if name == REACH:
        env.expert = lambda: expert(torch.from_numpy(built[0].state).float(), chunk)
    return env


class Instructed:
    """An EnvPool of MetaWorld that takes chunks of movements, and shows the instruction; see `make`."""

    def __init__(self, engine: Any, words: str) -> None:
        self._engine, self.close = engine, engine.close
        self._text = encoded(words, LETTERS)
        self.state: NDArray[np.float64] = np.zeros((0, NUMBERS))  # of all environments

    def reset(self, *rows: NDArray[np.int32]) -> tuple[vector.Arrays, dict[str, Any]]:
        """Reset all environments, or the `rows`."""
        state, info = self._engine.reset(*rows)
        if rows:
            self.state[info["env_id"]] = state
        else:
            self.state = state.copy()
        return self._shown(state), info

    def step(self, actions: Any, /) -> tuple[vector.Arrays, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """The movements of `actions` `[B, chunk, 4]`, one after the other."""
        steps = [self._engine.step(np.ascontiguousarray(movement)) for movement in actions.swapaxes(0, 1)]
        success = functools.reduce(np.logical_or, (info["success"] > 0 for *_, info in steps))
        state, *_, info = steps[-1]
        self.state = state.copy()
        return self._shown(state), success.astype(np.float32), success, np.zeros_like(success), info

    def _shown(self, state: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
        return {"state": state.astype(np.float32), "mission": np.tile(self._text, (len(state), 1))}


def expert(state: Tensor, chunk: int) -> Tensor:
    """Chunks `[B, chunk, 4]` that bring the hand of `state` `[B, 39]` to the goal: proportional to the distance."""
    hand, goal, found = state[:, :3], state[:, -3:], []
    for _ in range(chunk):
        move = (GAIN * (goal - hand)).clamp(-1, 1)
        found.append(torch.cat([move, torch.zeros_like(move[:, :1])], 1))
        hand = hand + SPEED * move
    return torch.stack(found, 1)
