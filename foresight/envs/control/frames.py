"""Rendered frames as observations: the option `pixels` of `build.make`.

Gymnasium's environments draw themselves (`AddRenderObservation`); EnvPool draws those of MuJoCo, DeepMind Control's
among them. MuJoCo draws with OpenGL, which needs no display where there is EGL; pygame needs none.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces as gs
from gymnasium.wrappers import AddRenderObservation
from numpy.typing import NDArray

from foresight.errors import UserError

EGL = "libEGL.so.1"
PROBE = """
import ctypes, sys
ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
import envpool
envpool.make(sys.argv[1], "gymnasium", num_envs=1, from_pixels=True, render_width=8, render_height=8).reset()
"""  # what a process can end with, not an exception


_ADVICE = (
    "MuJoCo draws by OpenGL. Without a display install EGL (on Debian: apt-get install libegl1 libgl1-mesa-dri) and "
    "set MUJOCO_GL=egl; Gymnasium's environments also draw by libosmesa6 and MUJOCO_GL=osmesa."
)


def space(side: int) -> gs.Box:
    """RGB images of `side` pixels a side, bytes `[side, side, 3]`."""
    return gs.Box(0, 255, (side, side, 3), np.uint8)


# ------------------------------------------------------------------ Gymnasium


def options(name: str, side: int | None) -> dict[str, Any]:
    """The options of Gymnasium's environment `name` that make it draw without a display, of `side` where it can."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame must not open a window
    found: dict[str, Any] = {"render_mode": "rgb_array"}
    if _mujoco(name):
        if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            os.environ.setdefault("MUJOCO_GL", "egl")
        found |= {"width": side, "height": side} if side else {}
    return found


def rendered(make: Callable[[], gymnasium.Env[Any, Any]], name: str, side: int) -> gymnasium.Env[Any, Any]:
    """What `make` makes, with its frames as observations, of any size. Raises UserError if it cannot be drawn."""
    try:
        env = make()
        inner: Any = env.unwrapped
        if isinstance(getattr(inner, "screen_dim", None), int):
            inner.screen_dim = 2 * side  # of Pendulum: a fifth of the time of its 500 pixels
        return AddRenderObservation(env, render_only=True)
    except (gymnasium.error.Error, UserError):  # a missing package
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "keyword argument" in str(error):  # an option that it does not take
            raise
        advice = _ADVICE if _mujoco(name) else "Leave out pixels."
        raise UserError(f"Environment '{name}' cannot be drawn: {error}. {advice}") from error


def _mujoco(name: str) -> bool:
    spec = gymnasium.registry.get(name)
    return spec is not None and "mujoco" in str(spec.entry_point)


# -------------------------------------------------------------------- EnvPool


def preload() -> None:
    """Load the library that EnvPool draws with, if it is there: drawing only works if it was loaded before EnvPool."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ctypes.CDLL(EGL, mode=ctypes.RTLD_GLOBAL)


def require_pool(name: str, spec: Any) -> None:
    """Raises UserError if EnvPool does not draw `name`, whose specification is `spec`, or cannot draw here."""
    if not any(base.__module__.startswith("envpool.mujoco") for base in type(spec).__mro__):
        raise UserError(f"EnvPool draws only MuJoCo's environments, not '{name}': use engine='gymnasium'.")
    if sys.platform == "linux" and (error := _broken(name)):
        raise UserError(f"Environment '{name}' cannot be drawn: {error}. {_ADVICE}")


@functools.cache
def _broken(name: str) -> str:
    """Why EnvPool cannot draw `name` here, tried in another process, which MuJoCo would end; "" if it can."""
    done = subprocess.run([sys.executable, "-c", PROBE, name], capture_output=True, text=True)
    lines = done.stderr.strip().splitlines()
    return "" if not done.returncode else (lines[-1].strip() if lines else f"exit status {done.returncode}")


class PixelPool:
    """An EnvPool whose images `[B, 3, H, W]` become `[B, H, W, 3]`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.close = engine.close

    def reset(self, *rows: Any) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Reset all environments, or `rows`."""
        obs, info = self._engine.reset(*rows)
        return _last(obs), info

    def step(
        self, actions: Any, *rows: Any
    ) -> tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """One action in all environments, or in `rows`."""
        obs, *rest = self._engine.step(actions, *rows)
        return (_last(obs), *rest)


def _last(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.moveaxis(images, 1, -1))
