"""Small environments with known solutions for tests of policy gradients. All are `envs.base.Env`s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.envs.base import Feedback, Spaces


class Bandit:
    """One-step episodes: obs `see(context)`, reward `reward(context, action)`, contexts cycling through 0..n-1."""

    name = "Bandit"

    def __init__(
        self,
        spaces: Spaces,
        contexts: int,
        see: Callable[[Tensor], Any],
        reward: Callable[[Tensor, Tensor], Tensor],
        num_envs: int = 8,
    ) -> None:
        self.spaces, self.num_envs = spaces, num_envs
        self._contexts, self._see, self._reward = contexts, see, reward

    def reset(self, seed: int) -> Any:
        self._context = torch.arange(self.num_envs) % self._contexts
        return self._see(self._context)

    def step(self, action: Tensor) -> Feedback:
        reward = self._reward(self._context, action).float()
        self._context = (self._context + 1) % self._contexts
        obs, ones = self._see(self._context), torch.ones(self.num_envs)
        info = {"episode_return": reward.tolist(), "episode_length": [1] * self.num_envs}
        return Feedback(obs, reward, 0 * ones, ones, ones, obs, info)

    def render(self) -> None:
        return None

    def close(self) -> None:
        pass


def choice(contexts: int = 4, num_envs: int = 8) -> Bandit:
    """The right action is the context, shown as one-hot. A random policy earns 1 / contexts."""
    spaces = Spaces(gs.Box(0, 1, (contexts,), np.float32), gs.Discrete(contexts))
    return Bandit(spaces, contexts, lambda c: torch.eye(contexts)[c], lambda c, a: a == c, num_envs)


def hidden_choice() -> Bandit:
    """The context is hidden and both actions but the right one are forbidden: only the mask tells what is right."""
    spaces = Spaces(gs.Dict({"x": gs.Box(0, 1, (1,), np.float32), "action_mask": gs.MultiBinary(3)}), gs.Discrete(3))
    masks = torch.eye(3, dtype=torch.int8)
    return Bandit(spaces, 3, lambda c: {"x": torch.zeros(8, 1), "action_mask": masks[c]}, lambda c, a: a == c)


def sides(actions: gs.Space[Any] | None = None, reward: Callable[[Tensor, Tensor], Tensor] | None = None) -> Bandit:
    """Images that are bright on the left or on the right; by default the side is the right action."""
    images = torch.zeros(2, 1, 36, 36, dtype=torch.uint8)
    images[0, :, :, :18], images[1, :, :, 18:] = 255, 255
    spaces = Spaces(gs.Box(0, 255, (1, 36, 36), np.uint8), actions or gs.Discrete(2))
    return Bandit(spaces, 2, lambda c: images[c], reward or (lambda c, a: a == c))


class Clock:
    """States 0, 1, 2, 0, ... whatever is done; every episode starts at 0 and is cut, not ended, after 8 steps.

    `rewards[s]` is what leaving s earns, so the values solve a linear system: see `values`. With `lost` the
    row after a cut is one that only resets, as in an engine with next-step autoreset.
    """

    name, limit = "Clock", 8

    def __init__(self, rewards: tuple[float, ...] = (1.0,), num_envs: int = 8, lost: bool = False) -> None:
        self.rewards, self.num_envs, self.lost = torch.tensor(rewards), num_envs, lost
        self.spaces = Spaces(gs.Box(0, 1, (len(rewards),), np.float32), gs.Discrete(2))

    def values(self, gamma: float) -> Tensor:
        states = len(self.rewards)
        successor = torch.eye(states).roll(1, 1)
        return torch.linalg.solve(torch.eye(states) - gamma * successor, self.rewards)

    def reset(self, seed: int) -> Tensor:
        self._time = torch.arange(self.num_envs) % self.limit  # out of step, so that cuts are everywhere in a segment
        self._resetting = torch.zeros(self.num_envs, dtype=torch.bool)
        return self._see(self._time)

    def step(self, action: Tensor) -> Feedback:
        taken, garbage = ~self._resetting, torch.full((self.num_envs,), 1e3)
        reward = torch.where(taken, self.rewards[self._time % len(self.rewards)], garbage)
        time = torch.where(taken, self._time + 1, 0)
        cut = taken & (time >= self.limit)
        final = self._see(time)
        if self.lost:
            self._resetting, self._time, obs = cut, time, final
            reset = ~taken
            return Feedback(obs, reward, taken.float(), (cut | reset).float(), taken.float(), obs, {})
        self._time = torch.where(cut, 0, time)
        obs = self._see(self._time)
        ones = torch.ones(self.num_envs)
        return Feedback(obs, reward, ones, cut.float(), ones, final if cut.any() else obs, {})

    def render(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _see(self, time: Tensor) -> Tensor:
        return torch.eye(len(self.rewards))[time % len(self.rewards)]


class Gymnasium:
    """Any Gymnasium id as an `Env`, one env after the other: slow and plain, so that these tests need no engine."""

    def __init__(self, name: str, num_envs: int = 8) -> None:
        self.name, self.num_envs = name, num_envs
        self._worlds = [gymnasium.make(name) for _ in range(num_envs)]
        self.spaces = Spaces(self._worlds[0].observation_space, self._worlds[0].action_space)

    def reset(self, seed: int) -> Tensor:
        self._returns = [0.0] * self.num_envs
        return torch.from_numpy(np.stack([w.reset(seed=seed + i)[0] for i, w in enumerate(self._worlds)]))

    def step(self, action: Tensor) -> Feedback:
        rows, ended = [], []
        for i, (env, a) in enumerate(zip(self._worlds, action.numpy(), strict=True)):
            final, reward, terminated, truncated, _ = env.step(a)
            self._returns[i] += float(reward)
            obs = final
            if terminated or truncated:
                obs, _ = env.reset()
                ended.append(self._returns[i])
                self._returns[i] = 0.0
            rows.append((obs, final, reward, not terminated, terminated or truncated))
        obs, final, reward, discount, cut = (torch.from_numpy(np.stack(x)) for x in zip(*rows, strict=True))
        info = {"episode_return": ended, "episode_length": [1] * len(ended)} if ended else {}
        return Feedback(obs, reward.float(), discount.float(), cut.float(), torch.ones(self.num_envs), final, info)

    def render(self) -> None:
        return None

    def close(self) -> None:
        for env in self._worlds:
            env.close()


class Corridor:
    """Cells 0 to 4 in a row; action 1 goes right, 0 left (not from cell 0). Every step costs 1 until cell 5 ends it.

    The best return is -5; a random walk takes 30 steps on average, and a time limit cuts at 40. What an action earned
    shows only at the end: the next step costs the same wherever it leads.
    """

    name, cells, limit = "Corridor", 5, 40
    spaces = Spaces(gs.Box(0, 1, (5,), np.float32), gs.Discrete(2))

    def __init__(self, num_envs: int = 8) -> None:
        self.num_envs = num_envs

    def reset(self, seed: int) -> Tensor:
        self._cell = torch.zeros(self.num_envs, dtype=torch.int64)
        self._time = torch.zeros(self.num_envs, dtype=torch.int64)
        return self._see()

    def step(self, action: Tensor) -> Feedback:
        self._cell = (self._cell + 2 * action - 1).clamp(min=0)
        self._time = self._time + 1
        over = self._cell >= self.cells
        cut = over | (self._time >= self.limit)
        info = {}
        if cut.any():
            info = {"episode_return": (-self._time[cut]).float().tolist(), "episode_length": self._time[cut].tolist()}
        self._cell = torch.where(over, 0, self._cell)
        final = self._see()
        self._cell, self._time = torch.where(cut, 0, self._cell), torch.where(cut, 0, self._time)
        obs, ones = self._see(), torch.ones(self.num_envs)
        return Feedback(obs, -ones, 1 - over.float(), cut.float(), ones, final if cut.any() else obs, info)

    def render(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _see(self) -> Tensor:
        return torch.eye(self.cells)[self._cell]
