"""Control: batches of Gymnasium-style environments."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foresight.errors import UserError
from foresight.runtime import imagined
from foresight.runtime.kinds.kind import Kind, Profiled, fold, make_env

if TYPE_CHECKING:
    from torch import Tensor

    from foresight.data.trajectory import Tree
    from foresight.envs.base import Env
    from foresight.runtime.agent import Agent
    from foresight.runtime.catalog import Algorithm, Entry, State
    from foresight.runtime.config.settings import Settings
    from foresight.runtime.evaluation.evaluate import Evaluation
    from foresight.runtime.monitoring.profile import Profile
    from foresight.runtime.session import Session

EVALUATION_ENVS = 16  # stepped together in an evaluation
GAME = re.compile(r"[a-z][a-z0-9_]*")  # the name of a two-player game; Gymnasium's names have capitals
VERSIONED = re.compile(r"-v\d+$")  # the end of a Gymnasium name


def _resolve_name(name: str, entry: Entry) -> tuple[str | None, str]:
    """The kind "game" and the game's own name, where `name` is that of a game that the algorithm plays.

    Raises UserError for a game that only other algorithms play.
    """
    if (run := imagined.run_of(name)) is not None:
        return None, f"{imagined.PREFIX}{run.absolute()}"  # found from any directory
    folded = fold(name)
    if not GAME.fullmatch(folded) or VERSIONED.search(name):
        return None, name
    from foresight.envs.games.game import TITLES
    from foresight.envs.text.make import TASKS
    from foresight.envs.tools.make import ENVS
    from foresight.runtime import catalog

    if not entry.games and folded in TITLES:
        others = [one.name for one in catalog.algorithms().values() if one.games or one.kind == "game"]
        raise UserError(
            f"{TITLES[folded]} is a two-player game, which {entry.name} does not play: {', '.join(others)} do."
        )
    if name in TASKS or name in ENVS:
        others = [one.name for one in catalog.algorithms().values() if one.kind == "text"]
        raise UserError(f"{name} is a text task, which {entry.name} does not read: {', '.join(others)} do.")
    if not entry.games:
        return None, name
    return ("game", folded) if folded in TITLES or GAME.fullmatch(name) else (None, name)


def _training(settings: Settings) -> Env:
    count = settings.config.get("num_envs")
    if (run := imagined.run_of(settings.env)) is not None:
        return imagined.make(run, count or 1, **settings.env_options)
    return make_env(settings, **({"num_envs": count} if count else {}))


def _evaluation(settings: Settings, env: Env) -> Env:
    from foresight.envs.control import multi_task

    if (run := imagined.run_of(settings.env)) is not None:
        return imagined.evaluation(run, min(EVALUATION_ENVS, settings.episodes or 1))
    count = max(multi_task.least_envs(settings.env), min(EVALUATION_ENVS, settings.episodes or 1))
    return make_env(settings, num_envs=count)


def _only(settings: Settings, env: str) -> Settings:
    """The settings of one of several environments, in the spaces of all. Raises UserError for another one."""
    from foresight.envs.control import multi_task

    each = multi_task.tasks(settings.env)
    if env not in each:
        raise UserError(f"This run has no environment '{env}'. It acts in: {', '.join(each)}.")
    several = len(each) > 1
    return dataclasses.replace(settings, env_options={**settings.env_options, "only": env}) if several else settings


def _single(settings: Settings, render: bool) -> Env:
    from foresight.envs.control import multi_task

    if (run := imagined.run_of(settings.env)) is not None:
        if settings.actors:
            raise UserError("Actors cannot act inside a world model: leave out --actors.")
        return imagined.outside(run, render)
    return make_env(settings, num_envs=multi_task.least_envs(settings.env), render=render)


def _notes(settings: Settings, config: object, env: Env) -> list[str]:
    """Options that the spaces turn off, and how a replay that may not fit into memory is kept on disk."""
    return [*_turned_off(settings, env), *_large_replay(settings, config, env)]


def _turned_off(settings: Settings, env: Env) -> list[str]:
    from gymnasium import spaces

    from foresight.nets import encoders
    from foresight.runtime.config import config_fields

    obs, action, found = env.spaces.obs, env.spaces.action, []
    images = any(encoders.is_image(part) for part in (obs.spaces.values() if isinstance(obs, spaces.Dict) else [obs]))
    defaults = config_fields.fields(settings.algorithm, {})
    for name, on, reason in (
        ("images", images, "observations are no images"),
        ("log_std", isinstance(action, spaces.Box), "actions are not continuous"),
    ):
        if name in defaults and not on and settings.config[name] != defaults[name]:
            found.append(f"{' '.join(config_fields.option(name, settings.config[name]))} has no effect: {reason}")
    return found


def _large_replay(settings: Settings, config: object, env: Env) -> list[str]:
    from gymnasium import spaces

    from foresight.runtime import bench

    if getattr(config, "replay_on_disk", True):
        return []
    parts = env.spaces.obs.spaces.values() if isinstance(env.spaces.obs, spaces.Dict) else [env.spaces.obs]
    row = sum(math.prod(part.shape or ()) * (part.dtype.itemsize if part.dtype else 4) for part in parts)
    wanted, there = settings.config["replay_size"] * row / 2**30, bench.memory()
    if wanted < there / 2:
        return []
    return [f"the replay may grow to {wanted:.0f} of {there:.0f} GiB of memory: --replay-on-disk keeps it in files"]


def _connect(session: Session, state: State) -> None:
    from foresight import distributed
    from foresight.runtime.distributed import torchrun

    if distributed.processes() > 1:
        torchrun.broadcast_(state)


def _verify(state: State) -> None:
    from foresight import distributed
    from foresight.runtime.distributed import torchrun

    if distributed.processes() > 1:
        torchrun.check_equal(state)


def _profile(module: Algorithm, env: Env, times: Profile) -> Profiled[Env]:
    from foresight.runtime.monitoring import profile

    return profile.time_updates(module, times), profile.TimedEnv(env), "inference"


def _evaluate(module: Algorithm, state: State, env: Env, episodes: int | None, seed: int) -> Evaluation:
    from foresight.data.trajectory import tree_map
    from foresight.runtime import machine
    from foresight.runtime.evaluation import returns

    device = machine.device_of(state)

    def act(obs: Tree, carry: Tree) -> tuple[Tensor, Tree]:
        action, _, carry = module.act(state, tree_map(lambda x: x.to(device), obs), carry, explore=False)
        return action.cpu(), carry

    reset_carry, rewarded = getattr(module, "reset_carry", None), getattr(module, "rewarded", None)
    return _inside_and_outside(env, lambda env: returns.evaluate(env, act, episodes or 1, seed, reset_carry, rewarded))


def _inside_and_outside(env: Env, score: Callable[[Env], Evaluation]) -> Evaluation:
    """The evaluation in `env`; of a world model in the true one, with the return inside and the gap between both."""
    true = getattr(env, "outside", None)
    if true is None:
        return score(env)
    result, inside = score(true), score(env).mean
    return dataclasses.replace(result, extra_metrics={"return_inside": inside, "gap": inside - result.mean})


def _baseline(module: Algorithm, state: State, env: Env, episodes: int | None, seed: int) -> Evaluation:
    from foresight.runtime.evaluation import returns

    return _inside_and_outside(
        env, lambda env: returns.evaluate(env, returns.random_policy(env, seed), episodes or 1, seed, None)
    )


def _act(agent: Agent, obs: Any, explore: bool) -> Any:
    return agent.act_on(*agent.batch(obs), explore)


def _record(module: Algorithm, state: State, settings: Settings, path: Path) -> None:
    from foresight.runtime.evaluation import record

    env = _single(settings, render=True)
    try:
        record.write(path, record.episode(module, state, env, settings.seed))
        if imagined.has_model(state):
            _record_model(module, state, settings, env, path.with_name("open-loop"))
    finally:
        env.close()


def _record_model(module: Algorithm, state: State, settings: Settings, env: Env, path: Path) -> None:
    """What the world model predicts, as a video of images, otherwise as a picture."""
    from foresight.runtime.evaluation import open_loop, record

    envs = _evaluation(dataclasses.replace(settings, episodes=EVALUATION_ENVS), env)
    try:
        found = open_loop.observe_and_predict(module, state, envs, settings.seed)
    finally:
        envs.close()
    if found.images:
        record.write(path.with_suffix(".mp4"), open_loop.frames(found), open_loop.FPS)
    else:
        open_loop.draw({settings.algorithm: found}, path.with_suffix(".png"))


KIND = Kind(
    inputs=True,
    actors=True,
    replicas=True,
    resolve_name=_resolve_name,
    training_env=_training,
    evaluation_env=_evaluation,
    only=_only,
    single_env=_single,
    notes=_notes,
    connect=_connect,
    profile=_profile,
    timings=lambda times, due: times.shares() if due else {},
    evaluate=_evaluate,
    baseline=_baseline,
    verify=_verify,
    act=_act,
    record=_record,
    exports=("torchscript", "onnx"),
)
