"""`make`: any environment or task by its name."""

from __future__ import annotations

import importlib
from typing import Any

from foresight import errors

WORLDS = {
    "control": "foresight.envs.control", "mdp": "foresight.envs.grid", "text": "foresight.envs.text",
    "game": "foresight.envs.games",
}  # fmt: skip


def make(name: str, world: str = "control", **options: Any) -> Any:
    """The environment `name`, as the kind of `world` that an algorithm acts in.

    - `"control"`: an `Env`, a batch of worlds behind one contract. Options: see `envs.control.make`
      (`num_envs`, `engine`, `render`, `time_limit`, frame stacks, the Atari set, ...). Names joined by commas
      are several tasks that share the worlds (see `envs.several`);
    - `"mdp"`: an explicit model (P, R, gamma). Options: see `envs.grid.make`;
    - `"text"`: single-use episodes with a grader. Options: see `envs.text.make`;
    - `"game"`: the rules of a game for two. Options: see `envs.games.make`.

    Raises UserError for a name, an option or a space that cannot be used, and for a missing package.
    """
    if world not in WORLDS:
        raise errors.unknown("world", world, WORLDS)
    module = importlib.import_module(WORLDS[world])  # late: a text task must not wait for physics engines
    if world == "control" and "," in name:
        return importlib.import_module("foresight.envs.several").make(name, module.make, **options)
    return module.make(name, **options)
