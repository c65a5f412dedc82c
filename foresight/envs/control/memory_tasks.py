"""Batched tasks that test memory alone: the passive T-maze and repeat-first.

Both show the deciding cue at the first step only; a policy without memory can only guess.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight import errors
from foresight.envs.base import Feedback, Spaces
from foresight.errors import UserError

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
        self.length, self.last, self.suits = length, length, suits
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

    def show(self, time: Tensor) -> Tensor:
        """The current card."""
        return self.card


# The rules, the defaults of their options, and the least value of each.
ENVS: dict[str, tuple[Any, dict[str, int], dict[str, int]]] = {
    "TMazePassive-v0": (TMaze, {"length": 10}, {"length": 1}),
    "RepeatFirst-v0": (RepeatFirst, {"length": 51, "suits": 4}, {"length": 2, "suits": 2}),
}


def make(name: str, num_envs: int, time_limit: int | None = None, **options: Any) -> MemoryTask:
    """A batch of `name` with its `options` (`length`, ...); `time_limit` truncates episodes.

    Raises UserError for an unknown option, or a value that is too small.
    """
    rules, defaults, least = ENVS[name]
    for key, value in options.items():
        if key not in defaults:
            raise errors.unknown(f"option of '{name}'", key, defaults)
        if not isinstance(value, int) or value < least[key]:
            raise UserError(f"{key} of '{name}' must be a whole number of at least {least[key]}, not {value}.")
    chosen = {**defaults, **options}
    return MemoryTask(name, num_envs, rules(num_envs=num_envs, **chosen), time_limit)


class MemoryTask:
    """An `Env` over one set of rules; see the module."""

    def __init__(self, name: str, num_envs: int, rules: Any, time_limit: int | None) -> None:
        self.name, self.num_envs, self.spaces = name, num_envs, rules.spaces
        self._rules, self._limit = rules, time_limit or rules.last
        self._generator: torch.Generator | None = None
        self._time = torch.zeros(num_envs, dtype=torch.int64)
        self._returns = torch.zeros(num_envs)
        self._mask = torch.ones(num_envs)

    def reset(self, seed: int) -> Tensor:
        """Reset all environments; equal seeds give equal episodes. Returns obs `[B, ...]`."""
        self._generator = torch.Generator().manual_seed(seed)
        self._time.zero_()
        self._returns.zero_()
        self._rules.begin(torch.ones(self.num_envs, dtype=torch.bool), self._generator)
        return self._rules.show(self._time)

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B]` in every environment."""
        if action.shape != (self.num_envs,):
            raise ValueError(f"'{self.name}' takes actions of shape {(self.num_envs,)}, not {tuple(action.shape)}.")
        if self._generator is None:
            raise RuntimeError(f"Environment '{self.name}': call reset(seed) before step.")
        self._time = self._time + 1
        reward = self._rules.move(action, self._time, self._generator)
        self._returns = self._returns + reward
        terminated, cut = self._time == self._rules.last, self._time >= min(self._limit, self._rules.last)
        discount = 1 - terminated.float()
        final = obs = self._rules.show(self._time)
        info: dict[str, Any] = {}
        if cut.any():
            info = {"episode_return": self._returns[cut].tolist(), "episode_length": self._time[cut].tolist()}
            self._rules.begin(cut, self._generator)
            self._time = self._time.masked_fill(cut, 0)
            self._returns = self._returns.masked_fill(cut, 0.0)
            obs = self._rules.show(self._time)
        return Feedback(obs, reward, discount, cut.float(), self._mask, final, info)

    def render(self) -> None:
        """None: there is nothing to render."""

    def close(self) -> None:
        """Nothing to close."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on."""
        rules = {key: value for key, value in vars(self._rules).items() if isinstance(value, Tensor)}
        generator = None if self._generator is None else self._generator.get_state()
        return {"rules": rules, "time": self._time, "returns": self._returns, "generator": generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        for key, value in state["rules"].items():
            setattr(self._rules, key, value.clone())
        self._time, self._returns = state["time"].clone(), state["returns"].clone()
        if state["generator"] is not None:
            self._generator = torch.Generator()
            self._generator.set_state(state["generator"])
