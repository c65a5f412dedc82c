"""Push-T: a round finger pushes a T-shaped block onto its goal. The physics are those of the package gym-pusht.

The task of Florence et al. 2021 (IBC, arXiv:2109.00137) as Chi et al. 2023 (arXiv:2303.04137) score it: by the highest
share of the goal that the block covers during an episode, over 0.95. `expert` makes demonstrations, see `pusher`.
"""

from __future__ import annotations

import importlib
import math
import os
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from numpy.typing import NDArray
from torch import Tensor

from foresight.envs.base import Frame, Spaces
from foresight.envs.control.pusher import Pusher
from foresight.errors import UserError

SIZE = 512.0  # side of the table, in the package's units
ENOUGH = 0.95  # of the goal that is to be covered
Doubles = NDArray[np.float64]


class PushT:
    """The package's environment, 10 actions a second, an episode of 300.

    Observations `[18]` are the eight corners of the block's two rectangles and the place of the finger, x and y each;
    an action `[2]` is where the finger is drawn to, from 0 to 512. A reward is by how much the best score of the
    episode rises, so the return is the score of the paper, at most 1. The episode ends when it is 1.
    """

    spaces = Spaces(gs.Box(0.0, SIZE, (18,), np.float32), gs.Box(0.0, SIZE, (2,), np.float32))

    def __init__(self, num_envs: int) -> None:
        self.limit = 300
        env = _package().PushTEnv
        self._envs = [env(obs_type="environment_state_agent_pos", render_mode="rgb_array") for _ in range(num_envs)]
        self._pushers = [Pusher() for _ in range(num_envs)]
        self.best = torch.zeros(num_envs)
        self.state = torch.zeros(num_envs, 10, dtype=torch.float64)  # of the finger and the block, see `_get`
        self._set_to = self.state  # what the physics are at

    def begin(self, rows: Tensor, generator: torch.Generator) -> None:
        """Start a new episode in the environments `rows` (bool): the package's distribution of places and angles."""
        share = torch.rand(len(rows), 5, generator=generator, dtype=torch.float64)
        low = torch.tensor([50.0, 50, 100, 100, -math.pi], dtype=torch.float64)
        high = torch.tensor([450.0, 450, 400, 400, math.pi], dtype=torch.float64)
        start = low + share * (high - low)
        for i in rows.nonzero().flatten().tolist():
            self._envs[i].reset(options={"reset_to_state": start[i].numpy()})
            self._pushers[i] = Pusher()
        self.best = torch.where(rows, 0.0, self.best)
        self._record()

    def move(self, action: Tensor, time: Tensor, generator: torch.Generator) -> Tensor:
        """Take `action` `[B, 2]`; returns the reward `[B]`."""
        if self.state is not self._set_to:  # a checkpoint was loaded
            for env, state in zip(self._envs, self.state.tolist(), strict=True):
                _set(env, state)
        targets = action.double().clamp(0, SIZE).numpy()
        scores = [env.step(target)[1] for env, target in zip(self._envs, targets, strict=True)]
        found = torch.tensor(scores, dtype=torch.float32)
        gain = (found - self.best).clamp(min=0)
        self.best = torch.maximum(self.best, found)
        self._record()
        return gain

    def over(self, time: Tensor) -> Tensor:
        """Where the goal is covered, `[B]` bool."""
        return self.best >= 1

    def show(self, time: Tensor) -> Tensor:
        """The observation `[B, 18]`."""
        return torch.stack([torch.from_numpy(_observe(env)) for env in self._envs]).float()

    def expert(self, generator: torch.Generator) -> Tensor:
        """What the scripted controller does next, `[B, 2]`."""
        actions = []
        for env, pusher in zip(self._envs, self._pushers, strict=True):
            pose = np.array([*env.block.position, env.block.angle])
            actions.append(pusher.act(pose, np.array(env.agent.position), generator))
        return torch.from_numpy(np.stack(actions)).float()

    def picture(self) -> Frame:
        """The picture of environment 0."""
        frame: Frame = self._envs[0].render()
        return frame

    def _record(self) -> None:
        self.state = self._set_to = torch.tensor([_get(env) for env in self._envs], dtype=torch.float64)


def _get(env: Any) -> list[float]:
    finger, block = env.agent, env.block
    return [*finger.position, *finger.velocity, *block.position, block.angle, *block.velocity, block.angular_velocity]


def _set(env: Any, state: list[float]) -> None:
    env.reset(options={"reset_to_state": [*state[:2], *state[4:7]]})
    env.agent.position, env.agent.velocity = tuple(state[:2]), tuple(state[2:4])
    env.block.angle, env.block.position = state[6], tuple(state[4:6])
    env.block.velocity, env.block.angular_velocity = tuple(state[7:9]), state[9]


def _observe(env: Any) -> Doubles:
    found = env.get_obs()
    return np.concatenate([found["environment_state"], found["agent_pos"]])


def _package() -> Any:
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame must not open a window
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        return importlib.import_module("gym_pusht.envs.pusht")
    except ImportError as error:
        raise UserError(
            f"'PushT-v0' needs the package gym-pusht and what it is built on ({error}). Install them with: "
            "pip install 'foresight[pusht]' && pip install --no-deps gym-pusht"
        ) from error
