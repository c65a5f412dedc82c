"""A linear system with quadratic costs, with its simulator and the best gain, for tests of planners."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.envs.base import Feedback, Spaces

B, R = 0.5, 0.1  # x' = x + B u, reward -x'² - R u²


class Simulator:
    """The true dynamics."""

    def root(self, obs: Tensor) -> Tensor:
        return obs.double()

    def rewards(self, state: Tensor, actions: Tensor) -> Tensor:
        x = state[:, :1] + B * actions[..., 0].double().cumsum(1)
        return (-x.square() - R * actions[..., 0].double().square()).float()


class Integrator:
    """Episodes of `length` steps from starts within ±0.6, cut by a time limit. Actions are in ±`bound`, times that."""

    name = "Integrator"

    def __init__(self, num_envs: int = 4, length: int = 8, bound: float = 1.0, space: gs.Space | None = None) -> None:
        self.num_envs, self.length, self.bound = num_envs, length, bound
        action = space or gs.Box(-bound, bound, (1,), np.float32)
        self.spaces = Spaces(gs.Box(-np.inf, np.inf, (1,), np.float32), action, True, Simulator)

    def reset(self, seed: int) -> Tensor:
        self._random = torch.Generator().manual_seed(seed)
        self._x, self._time, self._total = self._start(), 0, torch.zeros(self.num_envs)
        return self._x

    def step(self, action: Tensor) -> Feedback:
        u = action.clamp(-self.bound, self.bound) / self.bound
        final = self._x + B * u
        reward = (-final.square() - R * u.square()).squeeze(-1)
        self._time, self._total = self._time + 1, self._total + reward
        ones, over = torch.ones(self.num_envs), self._time == self.length
        info = {}
        if over:
            info = {"episode_return": self._total.tolist(), "episode_length": [self.length] * self.num_envs}
            self._time, self._total = 0, torch.zeros(self.num_envs)
        self._x = self._start() if over else final
        return Feedback(self._x, reward, ones, ones * over, ones, final if over else self._x, info)

    def render(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _start(self) -> Tensor:
        return 1.2 * torch.rand(self.num_envs, 1, generator=self._random) - 0.6


def gain(horizon: int) -> float:
    """k of the best first action -k x of `horizon` steps, by the Riccati recursion."""
    value = 0.0
    for _ in range(horizon):
        ahead = 1 + value  # of x'²
        k = B * ahead / (R + B * B * ahead)
        value = ahead * (1 - B * k) ** 2 + R * k * k
    return k


def regret(env: Integrator, policy, episodes: int = 8) -> float:
    """How much less than the best linear policy `policy(obs, carry) -> (action, carry)` earns per episode."""
    found = []
    for chosen in (lambda obs, carry: (-gain(20) * obs * env.bound, None), policy):
        obs, carry, total = env.reset(99), None, 0.0
        for _ in range(episodes * env.length // env.num_envs):
            action, carry = chosen(obs, carry)
            feedback = env.step(action)
            obs, total = feedback.obs, total + feedback.reward.sum().item()
            if feedback.cut.any():
                carry = None
        found.append(total / episodes)
    return found[0] - found[1]
