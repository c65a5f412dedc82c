"""Gymnasium and EnvPool environments by their ids, with errors that say what to do."""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces as gs
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from foresight import errors
from foresight.envs.base import Env, Frame, Spaces
from foresight.envs.control import frames, own, vector
from foresight.errors import UserError

NATIVE = ("CartPole-v1", "Pendulum-v1")  # in `classic`; listed here because numba is slow to import

Made = TypeVar("Made")
VectorEnv = gymnasium.vector.VectorEnv[Any, Any, Any]

# Prefix of an id: the module that registers it, and our extra that installs it.
_PLUGINS = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid", "MinAtar/": "minatar.gym"}
_EXTRAS = {
    "ale_py": "atari", "ale-py": "atari", "minigrid": "minigrid", "minatar.gym": "minatar", "box2d": "box2d",
    "mujoco": "mujoco",
}  # fmt: skip
AUTORESET = {
    vector.SAME_STEP: AutoresetMode.SAME_STEP,
    vector.NEXT_STEP: AutoresetMode.NEXT_STEP,
    vector.PARTIAL: AutoresetMode.DISABLED,
}


class Request(NamedTuple):
    """The environment, engine and options that `control.build.make` was called with."""

    name: str
    num_envs: int
    engine: str
    render: bool
    time_limit: int | None
    action_repeat: int
    autoreset: str
    options: dict[str, Any]
    pixels: int | None = None


def find_spec(name: str) -> EnvSpec | None:
    """Gymnasium's spec of `name`, or None. Imports the package that registers the id, if there is one."""
    for prefix, module in _PLUGINS.items():
        if name.startswith(prefix):
            package = load(module)
            if module == "minatar.gym" and name not in gymnasium.registry:
                package.register_envs()  # the only one whose import does not register
    if ":" in name:
        module, _, rest = name.partition(":")
        if not all(part.isidentifier() for part in module.split(".")):
            raise UserError(f"Environment '{name}': '{module}' is not the name of a module, as in mine:Env-v0.")
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(f"Environment '{name}': cannot import the module '{module}' ({error}).") from error
        name = rest
    return gymnasium.registry.get(name)


def load(module: str) -> Any:
    """Import an optional package. Raises UserError with the command that installs it."""
    if module == "envpool":
        frames.preload()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(module) from error


def missing(package: str) -> UserError:
    """The error for an optional package that is not installed."""
    what = f"'foresight[{_EXTRAS[package]}]'" if package in _EXTRAS else package
    return UserError(f"This environment needs the package '{package}'. Install it with: pip install {what}")


# ------------------------------------------------------------------ Gymnasium


def gymnasium_env(request: Request, engine: str) -> Env:
    """Gymnasium's environments: in this process, in subprocesses (`async`), or the id's vectorized form."""
    if engine == "vector":
        venv = user_errors(request, lambda: _vector_form(request))
        mode = vector.gymnasium_autoreset(venv)
    else:
        single = functools.partial(_single, request)
        venv, mode = user_errors(request, lambda: batched(single, request, engine)), request.autoreset
    return gymnasium_vector(request.name, venv, mode, fresh=engine != "vector")


def batched(single: Callable[[], gymnasium.Env[Any, Any]], request: Request, engine: str) -> VectorEnv:
    """The environments that `single` makes: in this process, or each in one of its own (`async`)."""
    mode = AUTORESET[request.autoreset]
    if mode == AutoresetMode.SAME_STEP:
        single = functools.partial(_with_own_end, single)
    if engine == "async":
        makers = [functools.partial(_in_process, single, os.getpid())] * request.num_envs
        return Processes(makers, autoreset_mode=mode)
    return SyncVectorEnv([single] * request.num_envs, autoreset_mode=mode)


def _with_own_end(single: Callable[[], gymnasium.Env[Any, Any]]) -> gymnasium.Env[Any, Any]:
    return OwnEnd(single())


class OwnEnd(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Copies the last observation of an episode.

    With same-step autoreset Gymnasium resets before it hands that observation on, and some environments reuse its
    memory for the first observation of the next episode. What an environment itself reports under Gymnasium's names
    for that observation is left out.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, _without_final(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            obs = copy.deepcopy(obs)
        return obs, reward, terminated, truncated, _without_final(info)


def _without_final(info: dict[str, Any]) -> dict[str, Any]:
    if info.keys().isdisjoint(("final_obs", "final_info")):
        return info
    return {key: value for key, value in info.items() if key not in ("final_obs", "final_info")}


def _in_process(single: Callable[[], gymnasium.Env[Any, Any]], parent: int) -> gymnasium.Env[Any, Any]:
    """The environment of `single`. Its process leaves signals to the `parent`, which ends it when it has saved.

    A scheduler sends SIGTERM to both.
    """
    if os.getpid() != parent:  # Gymnasium makes one there too, for its spaces
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return single()


class Processes(AsyncVectorEnv):
    """Environments in processes, which can be closed after one of them was killed."""

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the processes: at once if an answer is due, which may never come."""
        idle = type(self._state).DEFAULT  # not imported: Python may be exiting
        terminate = terminate or self._state != idle
        self._state = idle  # otherwise Gymnasium waits for the answer
        try:
            self._end(timeout, terminate)
        except (EOFError, OSError):  # one of them has ended already
            self._end(timeout, True)

    def _end(self, timeout: float | None, terminate: bool) -> None:
        for process in self.processes if terminate else ():
            process.kill()  # they ignore SIGTERM
        super().close_extras(timeout, terminate)


def gymnasium_vector(name: str, venv: Any, mode: str, fresh: bool) -> Env:
    """An `Env` over a `gymnasium.vector.VectorEnv` with the autoreset `mode`."""

    def start(seed: int) -> tuple[vector.Engine, vector.Arrays]:
        return venv, venv.reset(seed=seed)[0]

    def reset_rows(engine: vector.Engine, rows: NDArray[np.int64], obs: vector.Arrays) -> vector.Arrays:
        chosen = np.zeros(venv.num_envs, dtype=bool)
        chosen[rows] = True
        return engine.reset(options={"reset_mask": chosen})[0]

    spaces = Spaces(venv.single_observation_space, venv.single_action_space)
    return vector.Vector(name, start, spaces, venv.num_envs, mode, reset_rows, fresh, _draw, built=venv)


def _single(request: Request) -> gymnasium.Env[Any, Any]:
    """One Gymnasium environment with its options."""
    keywords, limit = dict(request.options), request.time_limit
    if request.render or request.pixels is not None:
        keywords |= frames.options(request.name, request.pixels)

    def make() -> gymnasium.Env[Any, Any]:
        try:
            env = gymnasium.make(request.name, max_episode_steps=limit, disable_env_checker=True, **keywords)
        except TypeError as error:
            only = set(keywords) == {"render_mode"} and "takes no arguments" in str(error)
            if only or "keyword argument 'render_mode'" in str(error):
                raise UserError(
                    f"Environment '{request.name}' cannot be drawn: its constructor takes no render_mode. Let it take "
                    "render_mode='rgb_array' and return RGB images from render."
                ) from error
            raise
        return env if request.action_repeat == 1 else Repeat(env, request.action_repeat)

    return make() if request.pixels is None else frames.rendered(make, request.name, request.pixels)


def _vector_form(request: Request) -> VectorEnv:
    keywords: dict[str, Any] = dict(request.options)
    if request.time_limit is not None:
        keywords["max_episode_steps"] = request.time_limit
    return gymnasium.make_vec(
        request.name, num_envs=request.num_envs, vectorization_mode="vector_entry_point", **keywords
    )


def _draw(engine: Any) -> Frame | None:
    envs = getattr(engine, "envs", None)
    if envs is not None:
        return envs[0].render() if envs[0].render_mode == "rgb_array" else None
    if getattr(engine, "render_mode", None) != "rgb_array":
        return None
    return engine.call("render")[0]


class Repeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Take every action `count` times, or until the episode ends; rewards are summed."""

    def __init__(self, env: gymnasium.Env[Any, Any], count: int) -> None:
        super().__init__(env)
        self._count = count

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One action, repeated."""
        total = 0.0
        for _ in range(self._count):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


def user_errors(request: Request, build: Callable[[], Made]) -> Made:
    """Run `build`, and turn Gymnasium's errors for user mistakes into a UserError."""
    name = request.name
    try:
        return build()
    except gymnasium.error.DependencyNotInstalled as error:
        text = str(error).lower()
        package = next((p for p in _EXTRAS if p in text), None)
        if package is not None:
            raise missing(package) from error
        raise UserError(f"Environment '{name}' needs a package that is not installed: {error}") from error
    except gymnasium.error.UnregisteredEnv as error:
        if name in envpool_ids():
            raise UserError(f"Only EnvPool has '{name}', and it draws no frames: use engine='envpool'.") from error
        raise unknown(name) from error
    except gymnasium.error.Error as error:
        raise UserError(f"Environment '{name}': {error}") from error
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        about_options = any(text in str(error) for text in ("keyword argument", "takes no arguments"))
        if not request.options or (isinstance(error, TypeError) and not about_options):
            raise
        raise errors.options(name, request.options, error) from error


def unknown(name: str) -> UserError:
    """The error for an unknown id, with the nearest ids."""
    everything = {*NATIVE, *own.TASKS, *gymnasium.registry, *envpool_ids()}
    near = difflib.get_close_matches(name, sorted(everything), n=8, cutoff=0.5)
    return errors.unknown("environment", name, near or ["CartPole-v1", "Pendulum-v1", "LunarLander-v3", "ALE/Pong-v5"])


# -------------------------------------------------------------------- EnvPool


@functools.cache
def envpool_ids() -> frozenset[str]:
    """All ids that EnvPool has; none if it is not installed."""
    try:
        envpool = load("envpool")
    except UserError:
        return frozenset()
    return frozenset(envpool.list_all_envs())


def in_envpool(request: Request) -> bool:
    """Whether EnvPool has the id, takes the options, and its spaces are supported."""
    if request.name not in envpool_ids():
        return False
    try:
        spec = _declared(request.name)
    except UserError:
        if request.name in gymnasium.registry:  # Gymnasium may not need what is missing
            return False
        raise
    if not set(request.options) <= set(spec._config_keys):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it declares bounds in a wider type than its arrays
        try:  # several players and nested actions are not supported
            vector.observation_space(spec.gymnasium_observation_space, request.name)
            vector.action_space(spec.gymnasium_action_space, request.name)
        except (UserError, NotImplementedError):
            return False
    return True


def _declared(name: str, **config: Any) -> Any:
    """EnvPool's spec of `name`, whose spaces may depend on `config`, as those of Catch-v0 do on its width.

    Raises UserError for a missing system library, such as Procgen's, and for an option of another type.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it declares bounds in a wider type than its arrays
        try:
            return load("envpool").make_spec(name, **config)
        except ImportError as error:
            raise UserError(f"Environment '{name}': {error}") from error
        except (TypeError, RuntimeError) as error:
            defaults = load("envpool").make_spec(name).config
            given = ", ".join(f"{key}={value!r} (default: {getattr(defaults, key)!r})" for key, value in config.items())
            raise UserError(f"EnvPool's '{name}' does not accept {given}.") from error


def envpool_env(request: Request) -> Env:
    """EnvPool, which resets some of its environments on demand: no step is lost.

    Not all of its environments apply `max_episode_steps`, and none distinguishes a termination at the step of the
    limit from the limit. So time limits are applied here: the caller's, else that of Gymnasium's id. Only ids without
    a limit in Gymnasium keep EnvPool's own (MiniGrid's is part of its reward).
    """
    envpool = load("envpool")
    registered = gymnasium.registry.get(request.name)
    if request.name not in envpool_ids():
        if registered is None:
            raise unknown(request.name)
        raise UserError(f"EnvPool does not have '{request.name}'. engine='auto' picks another engine.")
    config = dict(request.options)
    spec = _declared(request.name)
    limit = request.time_limit or (registered.max_episode_steps if registered is not None else None)
    repeat = request.action_repeat
    if limit is not None and limit % repeat:
        raise UserError(
            f"The time limit of '{request.name}' is {limit} steps, no multiple of action_repeat {repeat}. Set a "
            "time_limit that is one, or use engine='gymnasium'."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it declares bounds in a wider type than its arrays
        unused = set(config) - set(spec._config_keys)
        if unused:
            raise UserError(f"EnvPool's '{request.name}' does not take these options: {', '.join(sorted(unused))}.")
        spec = _declared(request.name, **config)
        spaces = Spaces(_unbounded(spec.gymnasium_observation_space), spec.gymnasium_action_space, _never_ends(spec))
    if request.pixels is not None:
        frames.require_pool(request.name, spec)
        config |= {"from_pixels": True, "render_width": request.pixels, "render_height": request.pixels}
        spaces = spaces._replace(obs=frames.space(request.pixels))
    if spec.config.max_num_players > 1:
        raise UserError(f"EnvPool's '{request.name}' is for several players; only one player is supported.")
    if limit is not None:
        config["max_episode_steps"] = max(limit + 1, spec.config.max_episode_steps)
    n = request.num_envs

    def build(seed: int) -> vector.Engine:
        engine: vector.Engine = envpool.make(request.name, "gymnasium", num_envs=n, seed=seed, **config)
        engine = engine if request.pixels is None else frames.PixelPool(engine)
        return engine if repeat == 1 else RepeatPool(engine, repeat)

    return pool(request.name, n, spaces, build, limit and limit // repeat)


def _never_ends(spec: Any) -> bool:
    """Whether `spec` is of DeepMind Control, where only the linear-quadratic regulators terminate."""
    kind = type(spec).__name__
    return kind.startswith("Dmc") and not kind.startswith("DmcLqr")


class RepeatPool:
    """An EnvPool that takes every action `count` times, or until the episode ends; rewards are summed."""

    def __init__(self, engine: Any, count: int) -> None:
        self._engine, self._count = engine, count
        self.reset, self.close = engine.reset, engine.close

    def step(self, actions: Any, /) -> tuple[vector.Arrays, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """One action, repeated in the environments that have not ended."""
        obs, total, terminated, truncated, info = self._engine.step(actions)
        total, terminated, truncated = total.copy(), terminated.copy(), truncated.copy()
        for _ in range(self._count - 1):
            going = np.flatnonzero(~(terminated | truncated)).astype(np.int32)
            if not len(going):
                break
            obs_of, reward, ended, cut, more = self._engine.step(actions[going], going)
            rows = more["env_id"]
            obs = _place(obs, obs_of, rows)
            total[rows] += reward
            terminated[rows], truncated[rows] = ended, cut
        return obs, total, terminated, truncated, info


def pool(
    name: str, num_envs: int, spaces: Spaces, build: Callable[[int], vector.Engine], limit: int | None = None
) -> Env:
    """An `Env` over an EnvPool, which is rebuilt for every seed because it takes seeds only then."""

    def start(seed: int) -> tuple[vector.Engine, vector.Arrays]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it declares bounds in a wider type than its arrays
            try:
                engine = build(seed)
            except ImportError as error:  # some of its environments need system libraries
                raise UserError(f"Environment '{name}': {error}") from error
            return engine, engine.reset()[0]

    def reset_rows(engine: vector.Engine, rows: NDArray[np.int64], obs: vector.Arrays) -> vector.Arrays:
        first, info = engine.reset(rows.astype(np.int32))
        return _place(obs, first, info["env_id"])

    # Every step returns new arrays, see tests/envs/test_base.py.
    return vector.Vector(name, start, spaces, num_envs, vector.PARTIAL, reset_rows, fresh=True, limit=limit)


def _place(obs: vector.Arrays, rows: vector.Arrays, index: NDArray[np.int64]) -> vector.Arrays:
    if isinstance(obs, dict):
        return {key: _place(obs[key], rows[key], index) for key in obs}
    out = obs.copy()
    out[index] = rows
    return out


def _unbounded(space: gs.Space[Any]) -> gs.Space[Any]:
    """Drop the float bounds of EnvPool, which are unreliable (LunarLander's are all positive)."""
    if isinstance(space, gs.Dict):
        # The text of a grid mission is bytes; Gymnasium's engine drops it too.
        return gs.Dict({key: _unbounded(part) for key, part in space.spaces.items() if key != "mission"})
    if isinstance(space, gs.Box) and np.dtype(space.dtype).kind == "f":
        return gs.Box(-np.inf, np.inf, space.shape, np.float32)
    return space
