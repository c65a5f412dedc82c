"""The environments that only this package has: one `Env` over the rules of each, batched in torch."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from foresight import errors
from foresight.data.trajectory import Tree
from foresight.envs.base import Feedback, Frame, Spaces
from foresight.errors import UserError


class Rules(Protocol):
    """The rules of one task for B environments. Its tensors without a leading underscore are what is saved."""

    spaces: Spaces
    limit: int  # actions before an episode is truncated

    def begin(self, rows: Tensor, generator: torch.Generator) -> None:
        """Start a new episode in the environments `rows` `[B]` (bool)."""

    def move(self, action: Tensor, time: Tensor, generator: torch.Generator) -> Tensor:
        """Take `action` `[B, ...]`, the `time`-th of its episode (from 1); returns the reward `[B]`."""

    def over(self, time: Tensor) -> Tensor:
        """Where the episode has terminated after `time` `[B]` actions, `[B]` bool."""

    def show(self, time: Tensor) -> Tree:
        """The observation after `time` `[B]` actions of the episode."""


class Task(NamedTuple):
    """Where the rules are, the defaults of their options, and the least value of each."""

    module: str
    rules: str
    defaults: dict[str, int]
    least: dict[str, int]


TASKS = {
    "TMazePassive-v0": Task("memory_tasks", "TMaze", {"length": 10}, {"length": 1}),
    "RepeatFirst-v0": Task("memory_tasks", "RepeatFirst", {"length": 51, "suits": 4}, {"length": 2, "suits": 2}),
    "TwoRoom-v0": Task("two_room", "TwoRoom", {"ahead": 25}, {"ahead": 0}),
    "TwoRoutes-v0": Task("two_routes", "TwoRoutes", {}, {}),
    "PushT-v0": Task("pusht", "PushT", {}, {}),
    "ErrandPoints-v0": Task("errands.points", "Points", {"held_out": 0}, {"held_out": 0}),
    "Glide-v0": Task("errands.glide", "Glide", {}, {}),
    "KeyDoor-v0": Task("key_door", "KeyDoor", {"size": 6, "view": 5}, {"size": 2, "view": 3}),
}


def make(name: str, num_envs: int, time_limit: int | None = None, **options: Any) -> Own:
    """A batch of `name` with its `options` (`length`, ...); `time_limit` truncates episodes.

    Raises UserError for an unknown option, or a value that is too small.
    """
    task = TASKS[name]
    for key, value in options.items():
        if key not in task.defaults:
            raise errors.unknown(f"option of '{name}'", key, task.defaults)
        if not isinstance(value, int) or value < task.least[key]:
            raise UserError(f"{key} of '{name}' must be a whole number of at least {task.least[key]}, not {value}.")
    module = importlib.import_module(f"foresight.envs.control.{task.module}")
    rules: Rules = getattr(module, task.rules)(num_envs=num_envs, **{**task.defaults, **options})
    return Own(name, num_envs, rules, time_limit)


class Own:
    """An `Env` over one set of rules; see the module."""

    def __init__(self, name: str, num_envs: int, rules: Rules, time_limit: int | None) -> None:
        self.name, self.num_envs, self.spaces = name, num_envs, rules.spaces
        self._rules, self._limit = rules, time_limit or rules.limit
        self._generator: torch.Generator | None = None
        self._time = torch.zeros(num_envs, dtype=torch.int64)
        self._returns = torch.zeros(num_envs)
        self._mask = torch.ones(num_envs)
        if hasattr(rules, "expert"):
            self.expert = self._expert

    def _expert(self) -> Tensor:
        """What the rules' own demonstrator does next, `[B, ...]`. Only where the rules have one."""
        actions: Tensor = self._rules.expert(self._generator)  # type: ignore[attr-defined]
        return actions

    def reset(self, seed: int) -> Tree:
        """Reset all environments; equal seeds give equal episodes. Returns obs `[B, ...]`."""
        self._generator = torch.Generator().manual_seed(seed)
        self._time.zero_()
        self._returns.zero_()
        self._rules.begin(torch.ones(self.num_envs, dtype=torch.bool), self._generator)
        return self._rules.show(self._time)

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B, ...]` in every environment."""
        wanted = (self.num_envs, *(self.spaces.action.shape or ()))
        if action.shape != wanted:
            raise ValueError(f"'{self.name}' takes actions of shape {wanted}, not {tuple(action.shape)}.")
        if self._generator is None:
            raise RuntimeError(f"Environment '{self.name}': call reset(seed) before step.")
        self._time = self._time + 1
        reward = self._rules.move(action, self._time, self._generator)
        self._returns = self._returns + reward
        terminated = self._rules.over(self._time)
        cut, discount = terminated | (self._time >= self._limit), 1 - terminated.float()
        final = obs = self._rules.show(self._time)
        info: dict[str, Any] = {}
        if cut.any():
            info = {"episode_return": self._returns[cut].tolist(), "episode_length": self._time[cut].tolist()}
            self._rules.begin(cut, self._generator)
            self._time = self._time.masked_fill(cut, 0)
            self._returns = self._returns.masked_fill(cut, 0.0)
            obs = self._rules.show(self._time)
        return Feedback(obs, reward, discount, cut.float(), self._mask, final, info)

    def render(self) -> Frame | None:
        """One RGB frame of environment 0; None if the rules draw none."""
        return self._rules.picture() if hasattr(self._rules, "picture") else None

    def close(self) -> None:
        """Nothing to close."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on."""
        held = vars(self._rules).items()
        rules = {key: value for key, value in held if isinstance(value, Tensor) and key[0] != "_"}
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
