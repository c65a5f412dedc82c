"""EnvPool and Gymnasium behind the contract of `envs.base`: the one place that handles autoreset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import spaces as gs
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from foresight.data.trajectory import Tree
from foresight.envs.base import EnvError, Feedback, Frame, Spaces
from foresight.envs.control import faults
from foresight.errors import UserError

Arrays = Any  # what an engine gives for all environments: an array, or a dict of arrays
NEXT_STEP, SAME_STEP, PARTIAL = "next_step", "same_step", "partial"
LIFE_LOST = "foresight/life_lost"  # in an engine's `info`; not a name that environments of others use
_PARTS = (gs.Box, gs.Discrete, gs.MultiDiscrete, gs.MultiBinary)


class Engine(Protocol):
    """What steps the environments: a `gymnasium.vector.VectorEnv`, or an EnvPool."""

    def step(self, actions: Any, /) -> tuple[Arrays, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """`(obs, reward, terminated, truncated, info)`."""

    def close(self) -> None:
        """Free what it holds."""

    @property
    def reset(self) -> Callable[..., tuple[Arrays, dict[str, Any]]]:
        """Resets all environments, or those that the engine's own arguments name: `(obs, info)`."""


class Vector:
    """An `Env` over anything that steps like `gymnasium.vector.VectorEnv`.

    `autoreset` is what the engine does where an episode ends: `same_step` (it resets at once and puts the final
    observation in `info["final_obs"]`), `partial` (nothing: the subset is reset here, by
    `reset_rows(indices, obs) -> obs`) or `next_step` (the next step is the reset, see `Feedback.mask`).

    `engine_action` is the engine's own action space, which may count from another number than 0.

    `limit` truncates an episode here after this many actions, for `partial` engines that may not do it themselves.
    `fresh`: the engine returns new memory at every step; otherwise it is copied here.
    `built`: the engine that `start` returns, if it exists already: it is closed also where there was no reset.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[int], tuple[Engine, Arrays]],
        spaces: Spaces,
        num_envs: int,
        autoreset: str,
        reset_rows: Callable[[Engine, NDArray[np.int64], Arrays], Arrays] | None = None,
        fresh: bool = False,
        render: Callable[[Engine], Frame | None] | None = None,
        limit: int | None = None,
        built: Engine | None = None,
    ) -> None:
        self.name, self.num_envs = name, num_envs
        self.spaces = spaces._replace(obs=observation_space(spaces.obs, name), action=action_space(spaces.action, name))
        self.engine_action = spaces.action
        self._start, self._autoreset, self._reset_rows, self._fresh = start, autoreset, reset_rows, fresh
        self._draw, self._limit = render, limit
        self._keys = tuple(self.spaces.obs.spaces) if isinstance(self.spaces.obs, gs.Dict) else None
        self._convert = _engine_converter(spaces.action)
        self._action_shape = (num_envs, *(self.spaces.action.shape or ()))
        self._engine: Engine | None = None
        self._built = built
        self._resetting = np.zeros(num_envs, dtype=bool)
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, dtype=np.int64)

    def reset(self, seed: int) -> Tree:
        """Reset all environments; equal seeds give equal episodes. Returns obs `[B, ...]`. Raises EnvError."""
        self._resetting[:] = False
        self._returns[:] = 0
        self._lengths[:] = 0
        try:
            self._engine, obs = self._start(seed)
        except UserError:  # a missing package
            raise
        except Exception as error:
            raise self._broken(*faults.failed_env(error), now=0) from error
        self._require_numbers(obs)
        return self._tensors(obs)

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B, ...]` in every environment."""
        if self._engine is None:
            raise RuntimeError(f"Environment '{self.name}': call reset(seed) before step.")
        if action.shape != self._action_shape:  # some engines would read past the end
            raise ValueError(f"'{self.name}' takes actions of shape {self._action_shape}, not {tuple(action.shape)}.")
        try:
            obs, reward, terminated, truncated, extra = self._engine.step(self._convert(action))
        except Exception as error:
            raise self._broken(*faults.failed_env(error)) from error
        if (found := faults.nonfinite_env(obs, reward)) is not None:
            raise self._broken(*found)
        taken = ~self._resetting
        self._returns += np.where(taken, reward, 0.0)
        self._lengths += taken
        if self._limit is not None:
            truncated = truncated | (self._lengths >= self._limit)
        ended = terminated | truncated
        info: dict[str, Any] = {"engine": extra}
        final_obs = None
        if ended.any():
            if self._autoreset == SAME_STEP:
                final = _final(obs, extra["final_obs"], np.flatnonzero(ended))
                self._require_numbers(final)
                final_obs = self._tensors(final, copy=False)
            self._report(info, np.flatnonzero(ended))
            if self._autoreset == PARTIAL:
                assert self._reset_rows is not None
                final_obs = self._tensors(obs)  # not overwritten: `reset_rows` makes new memory
                try:
                    obs = self._reset_rows(self._engine, np.flatnonzero(ended), obs)
                except Exception as error:
                    raise self._broken(*faults.failed_env(error), now=0) from error
                self._require_numbers(obs)
        if LIFE_LOST in extra:  # valued like a termination, though the game continues
            terminated = terminated | extra[LIFE_LOST]
        out = self._tensors(obs)
        feedback = Feedback(
            obs=out,
            reward=torch.from_numpy(np.where(taken, reward, 0).astype(np.float32)),
            discount=torch.from_numpy((taken & ~terminated).astype(np.float32)),
            cut=torch.from_numpy((ended | self._resetting).astype(np.float32)),
            mask=torch.from_numpy(taken.astype(np.float32)),
            final_obs=out if final_obs is None else final_obs,
            info=info,
        )
        if self._autoreset == NEXT_STEP:
            self._resetting = ended
        return feedback

    def render(self) -> Frame | None:
        """One RGB frame of environment 0, `[height, width, 3]` uint8; None if it cannot be rendered."""
        return None if self._draw is None or self._engine is None else self._draw(self._engine)

    def close(self) -> None:
        """Free what the engine holds."""
        engine = self._built if self._engine is None else self._engine
        self._engine = self._built = None
        if engine is not None:
            engine.close()

    def _require_numbers(self, obs: Arrays) -> None:
        if (found := faults.nonfinite_env(obs, None)) is not None:
            raise self._broken(*found, now=0)

    def _broken(self, env: int | None, what: str, now: int = 1) -> EnvError:
        where = "" if env is None else f", env {env} at step {self._lengths[env] + now} of its episode"
        return EnvError(f"Environment '{self.name}'{where}: {what}.")

    def _report(self, info: dict[str, Any], rows: np.ndarray) -> None:
        if len(rows):
            info["episode_return"] = self._returns[rows].tolist()
            info["episode_length"] = self._lengths[rows].tolist()
            self._returns[rows] = 0
            self._lengths[rows] = 0

    def _tensors(self, obs: Arrays, copy: bool = True) -> Tree:
        if self._keys is not None:
            return {key: tensor(obs[key], copy and not self._fresh) for key in self._keys}
        return tensor(obs, copy and not self._fresh)


def tensor(array: Any, copy: bool) -> Tensor:
    """A tensor of `array`, float64 as float32 and other integers as int64; `copy` where the engine owns the memory."""
    array = np.asarray(array)
    wanted = dtype(array.dtype)
    if array.dtype != wanted:
        array = array.astype(wanted)
    elif copy or not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)


def dtype(given: DTypeLike) -> np.dtype[Any]:
    """The tensor dtype for an environment's dtype: float32, uint8, int8, bool or int64."""
    kind = np.dtype(given)
    if kind.kind == "f":
        return np.dtype(np.float32)
    return kind if kind in (np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.bool_)) else np.dtype(np.int64)


def observation_space(space: gs.Space[Any], name: str) -> gs.Space[Any]:
    """The space of observation tensors for `space`: Dicts lose parts that are text (a mission).

    Raises UserError for another part that is no tensor, and if nothing is left.
    """
    if isinstance(space, gs.Dict):
        parts = {key: part for key, part in space.spaces.items() if not _is_text(part)}
        for key, part in parts.items():
            if not isinstance(part, _PARTS):
                raise UserError(
                    f"Environment '{name}' has the space {type(part).__name__} for the part '{key}' of its "
                    "observation; supported are Box, Discrete, MultiDiscrete and MultiBinary, and text is left out. "
                    "Wrap it so that its parts are not nested."
                )
        if parts:
            return gs.Dict({key: observation_space(part, name) for key, part in parts.items()})
    _check_size(space, name, "observation")
    if isinstance(space, gs.Box):
        return space if space.dtype == dtype(space.dtype) else _box(space)
    if isinstance(space, _PARTS):
        return space
    raise UserError(
        f"Environment '{name}' has the observation space {type(space).__name__}; supported are Box, Discrete, "
        "MultiDiscrete, MultiBinary and a Dict of these. Wrap it so that it has one of them."
    )


def _check_size(space: gs.Space[Any], name: str, what: str) -> None:
    if isinstance(space, gs.Box) and 0 in space.shape:
        raise UserError(
            f"Environment '{name}' has the {what} space {space}, which holds no number. Wrap it so that it has at "
            "least one, such as a constant."
        )


def _is_text(space: gs.Space[Any]) -> bool:
    return space.dtype is not None and np.dtype(space.dtype).kind in "US"


def action_space(space: gs.Space[Any], name: str) -> gs.Space[Any]:
    """The space of action tensors for `space`: Discrete counts from 0. Raises UserError for other kinds."""
    _check_size(space, name, "action")
    if isinstance(space, gs.Discrete):
        return gs.Discrete(int(space.n))
    if isinstance(space, gs.MultiDiscrete) and space.nvec.ndim == 1:
        return gs.MultiDiscrete(space.nvec)
    if isinstance(space, gs.Box) and np.dtype(space.dtype).kind == "f":
        return _box(space)
    if isinstance(space, gs.MultiBinary):
        return space
    raise UserError(
        f"Environment '{name}' has the action space {space}; supported are Discrete, MultiDiscrete of one dimension, "
        "MultiBinary and Box of floating-point numbers. Wrap it so that it has one of them."
    )


def _box(space: gs.Box) -> gs.Box:
    """`space` in the dtype of its tensors; bounds beyond that dtype become infinite."""
    kind: Any = dtype(space.dtype).type
    with np.errstate(over="ignore"):  # float64's largest number becomes infinity
        return gs.Box(space.low.astype(kind), space.high.astype(kind), space.shape, kind)


def _inner(space: gs.Box) -> tuple[Tensor, Tensor]:
    """The bounds of `_box`, where they are finite moved inside those of `space`: float32(0.1) is above 0.1."""
    box = _box(space)
    low = np.where(np.isfinite(box.low) & (box.low < space.low), np.nextafter(box.low, np.inf), box.low)
    high = np.where(np.isfinite(box.high) & (box.high > space.high), np.nextafter(box.high, -np.inf), box.high)
    return torch.from_numpy(low.astype(box.low.dtype)), torch.from_numpy(high.astype(box.high.dtype))


def action_converter(space: gs.Space[Any] | None) -> Callable[[Tensor], Tensor]:
    """The function from action tensors to those in `space`: clipped to the bounds of a Box, counted from its start.

    None: actions stay as they are.
    """
    if isinstance(space, gs.Box):
        low, high = _inner(space)
        bounded = low.isfinite().any() or high.isfinite().any()
        return (lambda action: action.clamp(low, high)) if bounded else lambda action: action
    start = torch.from_numpy(np.asarray(getattr(space, "start", 0), np.int64))
    return (lambda action: action + start) if start.any() else lambda action: action


def _engine_converter(space: gs.Space[Any]) -> Callable[[Tensor], np.ndarray]:
    """The function from an action tensor to the engine's action."""
    convert, kind = action_converter(space), space.dtype or np.dtype(np.int64)
    return lambda action: convert(action.detach()).numpy().astype(kind, copy=False)


def _final(obs: Arrays, given: Arrays, rows: NDArray[np.int64]) -> Arrays:
    """`obs` with the final observations of the environments that ended."""
    if isinstance(obs, dict):
        parts = {
            key: given[key] if isinstance(given, dict) else [None if row is None else row[key] for row in given]
            for key in obs
        }
        return {key: _final(obs[key], parts[key], rows) for key in obs}
    final = np.array(obs)
    for i in rows:
        final[i] = given[i]
    return final


def gymnasium_autoreset(engine: gymnasium.vector.VectorEnv[Any, Any, Any]) -> str:
    """The autoreset mode in the metadata of `engine`; next-step if it has none, as in Gymnasium."""
    mode = engine.metadata.get("autoreset_mode", gymnasium.vector.AutoresetMode.NEXT_STEP)
    return {"SAME_STEP": SAME_STEP, "DISABLED": PARTIAL}.get(mode.name, NEXT_STEP)
