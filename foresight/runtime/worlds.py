"""The worlds of a run: one to train in, one apart from it to be measured in, one to be looked at."""

from __future__ import annotations

from typing import Any

from foresight.envs import several
from foresight.envs.make import make
from foresight.runtime.settings import Settings

TOGETHER = 16  # control environments of an evaluation that are stepped together


def training(resolved: Settings) -> Any:
    """The world to train in. A Config that has `num_envs` says how many there are.

    Raises UserError as `envs.make`, and for a game whose opponent does not exist.
    """
    count = resolved.config.get("num_envs")
    world = _make(resolved, **({"num_envs": count} if resolved.world == "control" and count else {}))
    if resolved.world == "game":
        from foresight.planning import opponents  # late: they need the compiled rules, which other worlds do not

        opponents.make(world.opponent, world)  # evaluations meet it: if there is none, this is the time to say so
    return world


def evaluation(resolved: Settings, world: Any) -> Any:
    """The world for evaluations: its own where acting changes it, `world` itself where it is a table or a text task."""
    if resolved.world == "game":
        return _make(resolved)  # a game may hold the positions that are played, and forget those of another player
    if resolved.world != "control":
        return world
    return _make(resolved, num_envs=max(len(several.tasks(resolved.env)), min(TOGETHER, resolved.episodes or 1)))


def single(resolved: Settings, render: bool = False) -> Any:
    """One world (of each task), to act in by hand or to draw."""
    control = resolved.world == "control"
    return _make(resolved, **({"num_envs": len(several.tasks(resolved.env)), "render": render} if control else {}))


def spaces(world: Any) -> Any:
    """What `build` is given: the spaces of a control environment; an MDP or a text task is its own."""
    return getattr(world, "spaces", world)


def close(world: Any) -> None:
    """Free what a world holds, if it holds anything."""
    if hasattr(world, "close"):
        world.close()


def _make(resolved: Settings, **options: Any) -> Any:
    return make(resolved.env, resolved.world, **{**resolved.env_options, **options})
