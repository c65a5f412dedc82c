"""Atari preprocessing (Mnih et al. 2015; Machado et al. 2018): the same options for ALE, EnvPool and Gymnasium."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces as gs
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from foresight import errors
from foresight.envs.base import Env, Spaces
from foresight.envs.control import engines, vector, wrappers
from foresight.errors import UserError

_FRAMES = 108_000  # frames after which ALE truncates a game: 30 minutes at 60 Hz


@dataclasses.dataclass(frozen=True)
class Options:
    """The Atari preprocessing. Observations are `[frame_stack, size, size]` uint8, oldest first."""

    game: str  # the ROM, such as "pong"
    noop_max: int = 30  # a game starts with 1 to this many no-ops, so games differ
    frame_skip: int = 4  # frames per action; the observation is the maximum of the last two
    episodic_life: bool = True  # a lost life has discount 0; the game continues: no cut, and no return
    fire_reset: bool = True  # press FIRE if the game waits for it at its start
    image_size: int = 84  # pixels per side
    gray: bool = True
    frame_stack: int = 4
    repeat_action_probability: float = 0.0  # sticky actions; default from the id: 0.25 for ALE/*-v5
    full_action_space: bool = False  # all 18 actions instead of the game's minimal set
    time_limit: int = _FRAMES // 4  # actions


def is_atari(name: str, spec: EnvSpec | None) -> bool:
    """Whether the id is an Atari game with pixels: `ALE/Pong-v5`, `PongNoFrameskip-v4` or EnvPool's `Pong-v5`."""
    spec = _spec(name, spec)
    return spec is not None and "AtariEnv" in str(spec.entry_point) and spec.kwargs.get("obs_type") != "ram"


def make(request: engines.Request, spec: EnvSpec | None, frame_stack: int | None) -> Env:
    """Atari environments in the engine requested; `auto` is ALE's own vector engine, the fastest measured.

    Raises UserError for options that are not in `Options`.
    """
    if request.action_repeat != 1:
        raise UserError(f"action_repeat is {request.action_repeat}, but Atari games use frame_skip instead.")
    spec = _spec(request.name, spec)
    assert spec is not None  # see `is_atari`
    options = _options(request, spec, frame_stack)
    engine = request.engine
    if engine == "auto":
        engine = "gymnasium" if request.render else "ale"
    if engine not in ("ale", "envpool", "gymnasium", "async"):
        raise UserError(f"The engine '{engine}' does not have '{request.name}'. Use ale, envpool or gymnasium.")
    if request.render and engine in ("ale", "envpool"):
        raise UserError(f"The engine '{engine}' cannot render; use engine='gymnasium'.")
    if engine == "envpool":
        return _envpool(request, options)
    engines.load("ale_py")
    if engine == "ale":
        venv, mode = _ale(options, request.num_envs), vector.SAME_STEP
    else:
        single, mode = functools.partial(Preprocessed, options, request.render), request.autoreset
        venv = engines.batched(single, request, engine)
    return engines.gymnasium_vector(request.name, Lives(venv, options.episodic_life), mode, fresh=True)


def _spec(name: str, spec: EnvSpec | None) -> EnvSpec | None:
    """The spec of an Atari id; EnvPool's `Pong-v5` is Gymnasium's `ALE/Pong-v5`."""
    if spec is None and name.endswith("-v5") and "/" not in name:
        try:
            spec = engines.find_spec(f"ALE/{name}")
        except UserError:  # no ale_py, so no Atari; the caller reports an unknown id
            return None
    return spec


def _options(request: engines.Request, spec: EnvSpec, frame_stack: int | None) -> Options:
    valid = [f.name for f in dataclasses.fields(Options) if f.name not in ("game", "frame_stack", "time_limit")]
    for key in request.options:
        if key not in valid:
            raise errors.unknown("Atari option", key, valid)
    values = dict(request.options)
    values.setdefault("repeat_action_probability", spec.kwargs.get("repeat_action_probability", 0.0))
    if request.name.endswith("-v5") and not request.name.startswith("ALE/"):
        values["repeat_action_probability"] = request.options.get("repeat_action_probability", 0.0)  # EnvPool's id
    skip = values.get("frame_skip", 4)
    if not isinstance(skip, int) or skip < 1:
        raise UserError(f"frame_skip must be a whole number of at least 1, not {skip!r}.")
    limit = request.time_limit or _FRAMES // skip
    return Options(game=spec.kwargs["game"], frame_stack=frame_stack or 4, time_limit=limit, **values)


def _ale(options: Options, num_envs: int) -> engines.VectorEnv:
    from ale_py.vector_env import AtariVectorEnv  # late: optional

    # Its own `episodic_life` restarts the whole game at every lost life: `Lives` counts lives instead.
    return AtariVectorEnv(
        options.game,
        num_envs,
        max_num_frames_per_episode=options.time_limit * options.frame_skip,
        repeat_action_probability=options.repeat_action_probability,
        full_action_space=options.full_action_space,
        img_height=options.image_size,
        img_width=options.image_size,
        grayscale=options.gray,
        stack_num=options.frame_stack,
        frameskip=options.frame_skip,
        noop_max=options.noop_max,
        use_fire_reset=options.fire_reset,
        reward_clipping=False,
        autoreset_mode=engines.AUTORESET[vector.SAME_STEP],
    )


def _envpool(request: engines.Request, options: Options) -> Env:
    envpool = engines.load("envpool")
    name = "".join(part.capitalize() for part in options.game.split("_")) + "-v5"
    if name not in engines.envpool_ids():
        raise UserError(f"EnvPool does not have '{name}'. engine='auto' picks another engine.")
    config = {
        "max_episode_steps": options.time_limit,
        "repeat_action_probability": options.repeat_action_probability,
        "full_action_space": options.full_action_space,
        "img_height": options.image_size,
        "img_width": options.image_size,
        "gray_scale": options.gray,
        "stack_num": options.frame_stack,
        "frame_skip": options.frame_skip,
        "noop_max": max(options.noop_max, 1),
        "use_fire_reset": options.fire_reset,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        declared = envpool.make_spec(name, **config)
    spaces = Spaces(declared.gymnasium_observation_space, declared.gymnasium_action_space)
    n, count = request.num_envs, options.episodic_life

    def build(seed: int) -> Lives:
        return Lives(envpool.make(name, "gymnasium", num_envs=n, seed=seed, **config), count)

    return engines.pool(request.name, n, spaces, build)


class Lives:
    """Marks the steps where a life was lost and the game continues; everything else is the engine's."""

    def __init__(self, engine: vector.Engine, count: bool) -> None:
        self._engine, self._count = engine, count
        self._lives: np.ndarray = np.zeros(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def reset(self, *args: Any, **keywords: Any) -> tuple[vector.Arrays, dict[str, Any]]:
        """Reset all environments or some."""
        obs, info = self._engine.reset(*args, **keywords)
        if not args and "options" not in keywords:  # after a partial reset the next step can only gain lives
            self._lives = np.array(info["lives"])
        return obs, info

    def step(self, action: Any, /) -> tuple[vector.Arrays, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step all environments; `info[vector.LIFE_LOST]` `[B]`."""
        obs, reward, terminated, truncated, info = self._engine.step(action)
        lives = np.array(info["lives"])
        if self._count:
            info[vector.LIFE_LOST] = (lives < self._lives) & ~(terminated | truncated)
        self._lives = lives
        return obs, reward, terminated, truncated, info


class Preprocessed(gymnasium.Env[np.ndarray, Any]):
    """One Gymnasium Atari game with the preprocessing; slower than the vector engines, but it can be rendered."""

    def __init__(self, options: Options, render: bool) -> None:
        self.options = options
        env_id = "ALE/" + "".join(part.capitalize() for part in options.game.split("_")) + "-v5"
        self._env = gymnasium.make(
            env_id,
            obs_type="grayscale" if options.gray else "rgb",
            frameskip=1,
            repeat_action_probability=options.repeat_action_probability,
            full_action_space=options.full_action_space,
            render_mode="rgb_array" if render else None,
            disable_env_checker=True,
        )
        self.render_mode = self._env.render_mode
        self.action_space = self._env.action_space
        raw = self._env.observation_space.shape or ()
        size = options.image_size
        shape = (options.frame_stack, size, size, *raw[2:])
        self.observation_space = gs.Box(0, 255, shape, np.uint8)
        self._rows, self._columns = wrappers.area(raw[0], size), wrappers.area(raw[1], size).T
        self._stack = np.zeros(shape, dtype=np.uint8)
        self._steps = 0
        unwrapped: Any = self._env.unwrapped
        self._fire = options.fire_reset and unwrapped.get_action_meanings()[1] == "FIRE"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """A new game after some no-ops; FIRE is pressed if the game waits for it."""
        frame, info = self._env.reset(seed=seed)
        most = self.options.noop_max
        noops = int(self._env.unwrapped.np_random.integers(1, most + 1)) if most else 0
        for action in [0] * (noops - self._fire) + [1] * self._fire:
            frame, _, terminated, truncated, info = self._env.step(action)
            if terminated or truncated:
                frame, info = self._env.reset()
        self._steps = 0
        self._stack[:] = self._resize(frame)
        return self._stack.copy(), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """`frame_skip` frames with the same action."""
        total, frames = 0.0, []
        for _ in range(self.options.frame_skip):
            frame, reward, terminated, truncated, info = self._env.step(action)
            total += float(reward)
            frames.append(frame)
            if terminated or truncated:
                break
        self._steps += 1
        self._stack[:-1] = self._stack[1:]
        self._stack[-1] = self._resize(np.maximum(frames[-1], frames[-2]) if len(frames) > 1 else frames[-1])
        truncated = not terminated and (truncated or self._steps >= self.options.time_limit)
        return self._stack.copy(), total, terminated, truncated, info

    def render(self) -> Any:
        """The screen in color."""
        return self._env.render()

    def close(self) -> None:
        """Free the emulator."""
        self._env.close()

    def _resize(self, frame: np.ndarray) -> np.ndarray:
        """Mean over the area of each new pixel."""
        planes = np.moveaxis(frame.astype(np.float32), -1, 0) if frame.ndim == 3 else frame.astype(np.float32)
        small = np.rint(self._rows @ planes @ self._columns).astype(np.uint8)
        return np.moveaxis(small, 0, -1) if frame.ndim == 3 else small
