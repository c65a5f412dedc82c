"""Finds the environment of a batch that raised or returned a bad observation, and what is wrong with it."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
from gymnasium import spaces as gs
from numpy.typing import NDArray

FLOAT32_MAX = float(np.finfo(np.float32).max)
BEYOND = ", which is too large for float32"


def failed_env(error: Exception) -> tuple[int | None, str]:
    """The index of the environment behind an `error` of an engine (None if unknown), and what went wrong.

    Engines of one process keep the last observation of each environment, so one that does not fit its space is found
    there. Otherwise the index is read from Gymnasium's loop over environments or over their processes.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    loops = [f for f in frames if f.f_globals.get("__name__", "").startswith("gymnasium.vector")]
    for frame in loops:
        engine = frame.f_locals.get("self")
        space = getattr(engine, "single_observation_space", None)
        for env, seen in enumerate(getattr(engine, "_env_obs", None) or ()):
            what = None if seen is None or space is None else space_mismatch(seen, space)
            if what is not None:
                return env, what
    resetting = any(frame.f_code.co_name == "reset" for frame in frames)
    what = f"its {'reset' if resetting else 'step'} raised {type(error).__name__}: {error}".rstrip(".: ")
    numbers = [frame.f_locals.get(name) for frame in loops for name in ("index", "i")]
    return next((number for number in numbers if isinstance(number, int)), None), what


def space_mismatch(seen: Any, space: gs.Space[Any]) -> str | None:
    """How an observation of one environment differs from its `space`; None if it fits."""
    if isinstance(space, gs.Dict):
        if not isinstance(seen, dict) or seen.keys() != space.spaces.keys():
            parts = sorted(seen) if isinstance(seen, dict) else type(seen).__name__
            return f"its observation has the parts {parts}, but it declares {sorted(space.spaces)}"
        found = ((key, space_mismatch(seen[key], part)) for key, part in space.spaces.items())
        return next((f"{what} (part '{key}')" for key, what in found if what is not None), None)
    if space.shape is None or space.dtype is None:
        return None
    array = np.asarray(seen)
    if array.shape != space.shape:
        return f"its observation has the shape {array.shape}, but it declares {space.shape}"
    if not np.can_cast(array.dtype, space.dtype, "same_kind"):
        return f"its observation has the dtype {array.dtype}, but it declares {space.dtype}"
    return None


def nonfinite_env(obs: Any, reward: Any) -> tuple[int, str] | None:
    """The first environment with a number in `obs` `[B, ...]` or a `reward` `[B]` that a tensor cannot hold, and which.

    Tensors are float32. An observation may be infinite, but not NaN; a reward must be finite.
    """
    if reward is not None and not (held := np.abs(reward) <= FLOAT32_MAX).all():
        env = int(np.flatnonzero(~held)[0])
        return env, f"its reward is {float(reward[env])}{BEYOND if np.isfinite(reward[env]) else ''}"
    for part in obs.values() if isinstance(obs, dict) else (obs,):
        kind = getattr(part, "dtype", None)
        if kind is None or kind.kind != "f":
            continue
        if np.isnan(part).any():
            return _row(np.isnan(part)), "its observation has a NaN"
        if kind.itemsize > 4 and (large := np.isfinite(part) & (np.abs(part) > FLOAT32_MAX)).any():
            return _row(large), f"its observation has {part[large][0]}{BEYOND}"
    return None


def _row(found: NDArray[np.bool_]) -> int:
    return int(np.flatnonzero(found.reshape(len(found), -1).any(1))[0])
