"""`make` for control: picks the fastest engine that has the environment and applies the options."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import gymnasium

from foresight import errors
from foresight.envs.base import Env
from foresight.envs.control import atari as atari_set
from foresight.envs.control import babyai, engines, metaworld, miniwob, own, simulators, vector, wrappers
from foresight.errors import UserError

ENGINES = ("auto", "native", "envpool", "ale", "gymnasium", "async", "vector")


def make(
    name: str,
    num_envs: int = 8,
    engine: str = "auto",
    render: bool = False,
    time_limit: int | None = None,
    visible: Sequence[int] | None = None,
    frame_stack: int | None = None,
    action_repeat: int = 1,
    flatten: bool = False,
    rescale_action: bool = False,
    clip_reward: bool | None = None,
    image_size: int | None = None,
    gray: bool | None = None,
    pixels: int | None = None,
    autoreset: str = "same_step",
    atari: bool = True,
    **options: Any,
) -> Env:
    """A batch of `num_envs` environments of the id `name` (a Gymnasium, EnvPool or `module:Name-v0` id).

    - `engine`: `native` (our own, for the ids in `engines.NATIVE` and `own.TASKS`), `envpool`, `ale` (ALE's
      own vector engine), `gymnasium` (one process), `async` (one process per environment, for slow ones), `vector` (the
      id's own vectorized form), or `auto`: the fastest that has the id;
    - `render`: make `render()` work; the engine is then always Gymnasium's;
    - `time_limit`: steps before an episode is truncated, each repeat of an action counted; None keeps the id's own;
    - `visible`: the indices of a vector observation to keep, e.g. `[0, 2]` (CartPole without velocities);
    - `frame_stack`: stack the last K observations, `[K, ...]` (default for Atari: 4);
    - `action_repeat`: repeat every action this many times, or until the episode ends, and sum the rewards (Atari has
      `frame_skip`);
    - `flatten`: one float vector: parts of a Dict in the order of their keys, Discrete as one-hot;
    - `rescale_action`: the Box action space becomes [-1, 1], mapped linearly to the environment's bounds;
    - `clip_reward`: clip the reward to its sign (Atari: on). `info["episode_return"]` is never clipped;
    - `image_size`, `gray`: resize images to this many pixels a side, and make them gray (Atari: 84, gray);
    - `pixels`: observe the rendered frame and nothing else, an RGB image of this many pixels a side (see `frames`);
    - `autoreset`: how the engines `gymnasium` and `async` reset: `same_step`, `next_step` or `partial`; with the last
      two, `auto` is `gymnasium`;
    - `atari=False`: an Atari id without the Atari preprocessing (its options: see `atari.Options`);
    - other `options` go to the environment itself (`continuous=True`, `map_name="8x8"`, ...).

    Raises UserError for an unknown id, engine or option, a missing package and an unsupported space.
    """
    if engine not in ENGINES:
        raise errors.unknown("engine", engine, ENGINES)
    if autoreset not in engines.AUTORESET:
        raise errors.unknown("autoreset", autoreset, engines.AUTORESET)
    if autoreset != vector.SAME_STEP and engine not in ("gymnasium", "async"):  # the others have one way
        if engine != "auto" or name in own.TASKS or name.startswith(miniwob.PREFIX):
            which = f"The engine '{engine}'" if engine != "auto" else f"'{name}' is built in and"
            raise UserError(f"{which} takes no autoreset. Leave it out, or use the engine 'gymnasium' or 'async'.")
        engine = "gymnasium"
    counts = {"num_envs": num_envs, "action_repeat": action_repeat, "time_limit": time_limit}
    for label, value in {**counts, "frame_stack": frame_stack, "image_size": image_size, "pixels": pixels}.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserError(f"{label} must be a whole number of at least 1, not {value!r}.")
        if value is not None and value >= 2**31:
            raise UserError(f"{label} must be less than 2**31, not {value}.")
    spec = engines.find_spec(name)
    game = atari and atari_set.is_atari(name, spec)
    if pixels is not None and game:
        raise UserError(f"'{name}' observes images already: leave out pixels, and set their size by image_size.")
    if pixels is not None and image_size is not None:
        raise UserError("pixels is the size of the images already: leave out image_size.")
    if game:
        options |= {key: value for key, value in (("image_size", image_size), ("gray", gray)) if value is not None}
    request = engines.Request(name, num_envs, engine, render, time_limit, action_repeat, autoreset, options, pixels)
    env: Env = atari_set.make(request, spec, frame_stack) if game else _start(request)
    plain = not (flatten or rescale_action or visible or game or pixels or image_size or gray or (frame_stack or 1) > 1)
    simulator = simulators.find(name, action_repeat, options) if plain else None
    continuing = env.spaces.continuing or _continuing(name, options)
    env.spaces = env.spaces._replace(continuing=continuing, simulator=simulator)
    if (pixels is not None or image_size is not None or gray) and not game:
        env = wrappers.picture(env, pixels or image_size, bool(gray))
    if flatten:
        env = wrappers.flatten(env)
    if visible is not None:
        env = wrappers.visible(env, visible)
    if frame_stack is not None and frame_stack > 1 and not game:
        env = wrappers.frame_stack(env, frame_stack)
    if rescale_action:
        env = wrappers.rescale_action(env)
    if clip_reward or (clip_reward is None and game):
        env = wrappers.clip_reward(env)
    return env


# Gymnasium's environments that never terminate.
_ENDLESS = ("Pendulum-", "HalfCheetah-", "Swimmer-", "Reacher-", "Pusher-", "HumanoidStandup-")


def _continuing(name: str, options: dict[str, Any]) -> bool:
    return name.startswith(_ENDLESS) or options.get("terminate_when_unhealthy") is False


def _start(request: engines.Request) -> Env:
    """The environments in the engine requested; `auto` is the fastest that supports the options."""
    name, engine = request.name, request.engine
    if request.pixels is not None and (name in own.TASKS or name.startswith(miniwob.PREFIX)):
        raise UserError(f"'{name}' is not drawn from its state: leave out pixels.")
    plain = not request.render and request.action_repeat == 1 and request.pixels is None
    alone = not request.render and name not in gymnasium.registry  # only EnvPool may have it
    if name in own.TASKS:
        return _own(request)
    if name.startswith(babyai.PREFIX) and "camera" in request.options:
        return _instructed(request)
    if name.startswith(metaworld.PREFIX) and "chunk" in request.options:
        return _chunked(request)
    if name.startswith(miniwob.PREFIX):
        return _page(request)
    native = name in engines.NATIVE and not request.options
    if engine == "auto" and plain and native:  # asked first: EnvPool is slow to import
        engine = "native"
    elif engine == "auto":
        pooled = name in engines.envpool_ids() if alone else plain and engines.in_envpool(request)
        engine = "envpool" if pooled else "gymnasium"
    if engine in ("native", "vector") and not plain:
        raise UserError(f"The engine '{engine}' has no action_repeat, no pixels and no render; use engine='gymnasium'.")
    if engine == "envpool" and request.render:
        raise UserError("The engine 'envpool' has no render; use engine='gymnasium'.")
    if engine == "native":
        if not native:
            what = f"takes no options for '{name}'" if name in engines.NATIVE else f"does not have '{name}'"
            raise UserError(f"The engine 'native' {what}. It has: {', '.join(engines.NATIVE)}. Try engine='auto'.")
        classic: Any = importlib.import_module("foresight.envs.control.classic")  # late: numba
        env: Env = classic.make(name, request.num_envs, request.time_limit)
        return env
    if engine == "ale":
        raise UserError(f"The engine 'ale' has only Atari games with the Atari preprocessing, not '{name}'.")
    return engines.envpool_env(request) if engine == "envpool" else engines.gymnasium_env(request, engine)


def _instructed(request: engines.Request) -> Env:
    """A BabyAI level with images and missions. It has no action repeat."""
    if request.engine not in ("auto", "gymnasium") or request.action_repeat != 1:
        raise UserError(f"'{request.name}' with a camera has engine='gymnasium' and no action_repeat.")
    if request.name not in gymnasium.registry:
        raise engines.unknown(request.name)
    return babyai.make(request.name, request.num_envs, request.time_limit, **request.options)


def _chunked(request: engines.Request) -> Env:
    """A MetaWorld task with an instruction, whose actions are chunks. It has no action repeat."""
    if request.engine not in ("auto", "envpool") or request.action_repeat != 1 or request.render:
        raise UserError(f"'{request.name}' with a chunk has engine='envpool', no action_repeat and no render.")
    if others := [key for key in request.options if key != "chunk"]:
        raise errors.unknown(f"option of '{request.name}'", others[0], ["chunk"])
    return metaworld.make(request.name, request.num_envs, request.time_limit, request.options["chunk"])


def _page(request: engines.Request) -> Env:
    """A page of MiniWoB++ in a browser. It has no action repeat."""
    if request.engine not in ("auto", "native") or request.action_repeat != 1:
        raise UserError(f"'{request.name}' is a page in a browser: it has engine='native' and no action_repeat.")
    return miniwob.make(request.name, request.num_envs, request.time_limit, **request.options)


def _own(request: engines.Request) -> Env:
    """An environment that only this package has. It has no action repeat."""
    if request.engine not in ("auto", "native") or request.action_repeat != 1:
        raise UserError(f"'{request.name}' is built in: it has engine='native' and no action_repeat.")
    return own.make(request.name, request.num_envs, request.time_limit, **request.options)
