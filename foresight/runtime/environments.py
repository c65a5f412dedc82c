"""The worlds of a run: one to train in, one apart from it to be measured in, one to be looked at."""

from __future__ import annotations

from typing import Any

from foresight.envs.control import multi_task
from foresight.envs.make import make
from foresight.runtime.settings import Settings

EVALUATION_ENVS = 16  # control environments of an evaluation that are stepped together


def training(resolved: Settings) -> Any:
    """The world to train in. A Config that has `num_envs` says how many there are.

    Raises UserError as `envs.make`, and for a game whose opponent does not exist.
    """
    count = resolved.config.get("num_envs")
    env = _make(resolved, **({"num_envs": count} if resolved.kind == "control" and count else {}))
    if resolved.kind == "game":
        from foresight.planning.games import opponents  # late: they need the compiled rules, which other worlds do not

        opponents.make(env.opponent, env)  # evaluations meet it: if there is none, this is the time to say so
    return env


def evaluation(resolved: Settings, env: Any) -> Any:
    """The world for evaluations: its own where acting changes it, `world` itself where it is a table or a text task."""
    if resolved.kind == "game":
        return _make(resolved)  # a game may hold the positions that are played, and forget those of another player
    if resolved.kind != "control":
        return env
    return _make(
        resolved, num_envs=max(len(multi_task.tasks(resolved.env)), min(EVALUATION_ENVS, resolved.episodes or 1))
    )


def single(resolved: Settings, render: bool = False) -> Any:
    """One world (of each task), to act in by hand or to draw."""
    control = resolved.kind == "control"
    return _make(resolved, **({"num_envs": len(multi_task.tasks(resolved.env)), "render": render} if control else {}))


def silent(resolved: Settings) -> Any:
    """A text task whose data are gone: it asks nothing, and whoever is asked answers in its words all the same."""
    from foresight.envs.text.task import TextTask  # late: an MDP must not wait for it

    return TextTask(resolved.typed().env, [], [], None, traced=bool(resolved.env_options.get("trace")))


def spaces(env: Any) -> Any:
    """What `build` is given: the spaces of a control environment; an MDP or a text task is its own."""
    return getattr(env, "spaces", env)


def close(env: Any) -> None:
    """Free what a world holds, if it holds anything."""
    if hasattr(env, "close"):
        env.close()


def _make(resolved: Settings, **options: Any) -> Any:
    return make(resolved.env, resolved.kind, **{**resolved.env_options, **options})
