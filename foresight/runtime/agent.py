"""`Agent`: a trained State that acts on one observation or a batch."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresight.data.trajectory import Tree, tree_map
from foresight.data.trees import first
from foresight.errors import UserError
from foresight.runtime import catalog, environments, kinds, machine
from foresight.runtime.checkpoints import checkpoint, run_state
from foresight.runtime.checkpoints.tree import saved_fields
from foresight.runtime.config import paths
from foresight.runtime.config.settings import Settings
from foresight.runtime.evaluation.evaluate import Evaluation, evaluate
from foresight.training.options import build_config


class Agent:
    """The algorithm of a run with the State of one of its checkpoints.

    `module`, `state`, `config`, `settings`, `spaces` and `step` are public. `act` keeps the carry (the memory
    of a recurrent policy) until `reset`. A replay that is on disk is empty until `read_replay`.
    """

    def __init__(
        self, path: Path, which: str | int = "latest", device: str = "auto", completer: str | None = None
    ) -> None:
        self.path = path
        self.settings = Settings.read(path)
        found = checkpoint.find(path, which)
        machine.require_float32()
        self.module = catalog.module(self.settings.algorithm)
        self.config = build_config(self.module.Config, **self.settings.config)
        self._missing_data: UserError | None = None  # raised by `evaluate`
        try:
            self.env = environments.single(self.settings)
        except UserError as error:
            if not paths.missing(self.settings.paths):
                raise
            self._missing_data, self.env = error, environments.without_data(self.settings)
        self.spaces = environments.spaces(self.env)
        device = machine.pick_device(device, gpu=kinds.get(self.settings.kind).gpu)
        self.state = self.module.build(self.config, self.spaces, device)
        self._unread = found if run_state.on_disk(self.state) else None  # the checkpoint whose replay was not read
        names = {field.name for field in saved_fields(self.state)} - ({"replay"} if self._unread else set())
        self.step: int = checkpoint.restore(found, self.state, device, names)["step"]
        if completer is not None:
            from foresight.planning.generation import server  # late: only language models have one

            server.attach(self.state, completer, report=lambda text: print(text, file=sys.stderr, flush=True))
        self._carry: Tree = None
        self._rows = 0  # observations that `_carry` remembers

    def act(self, obs: Any, explore: bool = False) -> Any:
        """The action for `obs`: one observation or a batch, as arrays, tensors, lists or dicts of these.

        One observation gives one action, in the form that a Gymnasium environment takes (an int, or an array, within
        the bounds of its action space, which is [-1, 1] with `rescale_action`); a batch gives an array `[B, ...]`. For
        text, a prompt (or an example, or a list) gives a completion (or a list); positions of a game (of `agent.env`)
        give an array of actions. Raises UserError if the shape does not match the environment's, or the number of
        observations that of the last ones, which a memory holds until `reset`.
        """
        return kinds.get(self.settings.kind).act(self, obs, explore)

    def act_on(self, batch: Tree, single: bool, explore: bool = False) -> NDArray[Any] | int | bool:
        """The actions for a batch of observations, as an array; only the first if `single`."""
        device = machine.device_of(self.state)
        inputs = tree_map(lambda x: x.to(device), batch)
        self._require_rows(len(first(batch)))
        with torch.no_grad():
            action, _, self._carry = self.module.act(self.state, inputs, self._carry, explore=explore)
        array: NDArray[Any] = self.convert(action.cpu()).numpy()
        if (kind := getattr(self._engine_action, "dtype", None)) is not None:
            array = array.astype(kind, copy=False)
        if not single:
            return array
        only: NDArray[Any] | int | bool = array[0].item() if array.ndim == 1 and array.dtype.kind in "iub" else array[0]
        return only

    @functools.cached_property
    def convert(self) -> Callable[[Tensor], Tensor]:
        """The function from the policy's actions `[B, ...]` to those that a Gymnasium environment takes; see `act`."""
        from foresight.envs.control.vector import action_converter

        return action_converter(self._engine_action)

    @property
    def _engine_action(self) -> Any:
        """The environment's own action space; None for several whose bounds differ."""
        return getattr(self.env, "engine_action", self.spaces.action)

    def reward(self, reward: float | Tensor) -> None:
        """Pass the reward of the last action (`[B]` for a batch) to a policy that acts on it; others ignore it."""
        if self._carry is not None and hasattr(self.module, "rewarded"):
            rewards = torch.as_tensor(reward, dtype=torch.float32)
            self._require_rows(len(rewards) if rewards.ndim else self._rows)
            self._carry = self.module.rewarded(self._carry, rewards)

    def _require_rows(self, count: int) -> None:
        if self._carry is not None and count != self._rows:
            raise UserError(
                f"{count} given, and the memory of {self.settings.algorithm} is of {self._rows}: call reset() before "
                "other episodes begin."
            )
        self._rows = count

    def evaluate(self, episodes: int | None = None, seed: int | None = None, env: str | None = None) -> Evaluation:
        """Evaluate again, see `runtime.evaluation.evaluate`; `episodes` and `seed` default to the run's.

        `env` is one of several environments of the run. Raises UserError if it is none of them.
        """
        if self._missing_data is not None:
            raise self._missing_data
        count = self.settings.episodes if episodes is None else episodes
        settings = dataclasses.replace(self.settings, episodes=count)
        if env is not None:
            settings = kinds.get(settings.kind).only(settings, env)
        made = environments.evaluation(settings, self.env)
        try:
            return evaluate(self.module, self.state, made, count, self.settings.seed if seed is None else seed)
        finally:
            if made is not self.env:
                environments.close(made)

    def read_replay(self) -> None:
        """Read a replay that is on disk, which acting does not need. Raises UserError if the disk has too little."""
        if self._unread is not None:
            run_state.use_disk(self.state, self.path)
            checkpoint.restore(self._unread, self.state, machine.device_of(self.state), ("replay",))
            self._unread = None

    def reset(self) -> None:
        """Clear the carry, at the start of an episode."""
        self._carry = None

    def close(self) -> None:
        """Close the environment."""
        environments.close(self.env)

    def batch(self, obs: Any) -> tuple[Tree, bool]:
        """Observations of a control environment as a batch of tensors, and whether `obs` was a single one."""
        space = self.spaces.obs
        if isinstance(obs, tuple) and len(obs) == 2 and isinstance(obs[1], dict):
            raise UserError("obs is a pair with a dict, as env.reset() returns it: give its first part alone.")
        if not isinstance(space, gymnasium.spaces.Dict):
            return _fit(obs, space, "obs")
        named = space.spaces
        if not isinstance(obs, dict) or (missing := [name for name in named if name not in obs]):
            lacks = f"lacks {', '.join(missing)}" if isinstance(obs, dict) else f"is a {type(obs).__name__}"
            raise UserError(f"obs {lacks}. It must be a dict of {', '.join(named)}.")
        parts = {name: _fit(obs[name], named[name], name) for name in named}
        sizes = {name: "one" if single else str(len(part)) for name, (part, single) in parts.items()}
        if len(set(sizes.values())) > 1:
            counted = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise UserError(f"The parts of obs have different numbers of observations: {counted}.")
        return {name: part for name, (part, _) in parts.items()}, "one" in sizes.values()

    def __repr__(self) -> str:
        return f"Agent({self.settings.algorithm} on {self.settings.env}, {str(self.path)!r} at {self.step:,})"


def _fit(obs: Any, space: gymnasium.Space[Any], name: str) -> tuple[Tensor, bool]:
    """A batched tensor in the dtype of the environment's observations, and whether `obs` was a single one."""
    from foresight.envs.control.vector import tensor

    if isinstance(space, gymnasium.spaces.Discrete):
        array = choices(obs, int(space.start), int(space.start + space.n) - 1, name)
    else:
        array = numbers(obs, name)
    value = tensor(array, copy=True)
    shape = tuple(space.shape or ())
    if np.dtype(space.dtype).kind == "f":
        value = value.to(torch.float32)
    if tuple(value.shape) == shape:
        return value[None], True
    if tuple(value.shape[1:]) == shape and value.ndim == len(shape) + 1:
        return value, False
    raise UserError(f"{name} has shape {tuple(value.shape)}. It must be {shape}, or a batch of these.")


def numbers(obs: Any, name: str = "obs") -> NDArray[Any]:
    """Observations as an array. Raises UserError unless all are finite numbers."""
    array = obs.detach().cpu().numpy() if isinstance(obs, Tensor) else np.asarray(obs)
    if array.dtype.kind not in "biuf":
        raise UserError(f"{name} must be numbers, not {repr(obs)[:80]}.")
    if not np.isfinite(array).all():
        raise UserError(f"{name} has a number that is not finite.")
    return array


def choices(obs: Any, first: int, last: int, name: str = "obs") -> NDArray[Any]:
    """As `numbers`, for states of a table. Raises UserError unless all are whole and from `first` to `last`."""
    array = numbers(obs, name)
    if (array != np.floor(array)).any() or (array < first).any() or (array > last).any():
        raise UserError(f"{name} must be a whole number from {first} to {last}, not {repr(obs)[:80]}.")
    return array
