"""A chain of two states whose action values are a linear system. An `envs.base.Env`."""

from __future__ import annotations

import gymnasium.spaces as gs
import numpy as np
import torch
from torch import Tensor

from foresight.envs.base import Feedback, Spaces

REWARD = torch.tensor([[0.5, 0.0], [0.0, 2.0]])  # of action a in state s; a is also where it leads


class Chain:
    """Action a leads to state a. Every episode starts in state 0 and is cut after 7 steps, which ends nothing.

    With `ends` action 1 in state 1 terminates. With `lost` the row after a cut is one that only resets.
    """

    name, limit = "Chain", 7

    def __init__(self, num_envs: int = 2, ends: bool = False, lost: bool = False) -> None:
        self.num_envs, self.ends, self.lost = num_envs, ends, lost
        self.spaces = Spaces(gs.Box(0, 1, (2,), np.float32), gs.Discrete(2))

    def values(self, gamma: float) -> Tensor:
        """Q*, from the definition: the best of all deterministic policies, each solved exactly."""
        best = torch.full((2, 2), -torch.inf)
        for policy in ((0, 0), (0, 1), (1, 0), (1, 1)):
            transition, reward = torch.zeros(2, 2), torch.stack([REWARD[s, policy[s]] for s in range(2)])
            for s in range(2):
                transition[s, policy[s]] = 0.0 if self._terminates(s, policy[s]) else 1.0
            v = torch.linalg.solve(torch.eye(2) - gamma * transition, reward)
            q = torch.tensor(
                [[REWARD[s, a] + (0 if self._terminates(s, a) else gamma * v[a]) for a in range(2)] for s in range(2)]
            )
            best = torch.maximum(best, q)
        return best

    def reset(self, seed: int) -> Tensor:
        self._state = torch.zeros(self.num_envs, dtype=torch.int64)
        self._time = torch.arange(self.num_envs)  # out of step
        self._resetting = torch.zeros(self.num_envs, dtype=torch.bool)
        self._returns = torch.zeros(self.num_envs)
        return self._see(self._state)

    def step(self, action: Tensor) -> Feedback:
        taken = ~self._resetting
        reward = torch.where(taken, REWARD[self._state, action], 1e3)
        ended = taken & torch.tensor(
            [self._terminates(int(s), int(a)) for s, a in zip(self._state, action, strict=True)]
        )
        self._time = torch.where(taken, self._time + 1, 0)
        cut = taken & (ended | (self._time >= self.limit))
        final = self._see(action)
        self._returns += reward * taken
        info = {}
        if cut.any():
            info = {"episode_return": self._returns[cut].tolist(), "episode_length": [1] * int(cut.sum())}
            self._returns[cut] = 0
        if self.lost:
            self._state = torch.where(taken, action, 0)
            self._resetting, obs = cut, torch.where(taken[:, None], final, self._see(self._state))
            discount = (taken & ~ended).float()
            return Feedback(obs, reward, discount, (cut | ~taken).float(), taken.float(), obs, info)
        self._state = torch.where(cut, 0, action)
        self._time = torch.where(cut, 0, self._time)
        obs, ones = self._see(self._state), torch.ones(self.num_envs)
        return Feedback(obs, reward, 1 - ended.float(), cut.float(), ones, final if cut.any() else obs, info)

    def render(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _terminates(self, state: int, action: int) -> bool:
        return self.ends and state == action == 1

    @staticmethod
    def _see(state: Tensor) -> Tensor:
        return torch.eye(2)[state]
