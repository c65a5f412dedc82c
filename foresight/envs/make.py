"""`make`: any environment or task by its name."""

from __future__ import annotations

import importlib
from typing import Any

from foresight import errors

ENVS = {
    "control": "foresight.envs.control.build", "tabular": "foresight.envs.tabular.grid", "text":
    "foresight.envs.text.make", "game": "foresight.envs.games.make", "images": "foresight.envs.images.make",
}  # fmt: skip


def make(name: str, kind: str = "control", **options: Any) -> Any:
    """The environment `name` of a `kind`.

    - `"control"`: an `Env`, a batch of environments. Options: see `envs.control.build.make`
      (`num_envs`, `engine`, `render`, `time_limit`, frame stacks, the Atari set, ...). Names joined by commas
      are several tasks that share `num_envs` (see `envs.control.multi_task`);
    - `"tabular"`: an explicit model (P, R, gamma). Options: see `envs.tabular.grid.make`;
    - `"text"`: single-use episodes with a grader. Options: see `envs.text.make.make`;
    - `"game"`: the rules of a two-player game. Options: see `envs.games.make.make`;
    - `"images"`: labeled images. Options: see `envs.images.make.make`.

    Raises UserError for an unknown name or option, an unsupported space and a missing package.
    """
    if kind not in ENVS:
        raise errors.unknown("kind of environment", kind, ENVS)
    module = importlib.import_module(ENVS[kind])  # late: a text task must not wait for physics engines
    if kind == "control" and "," in name:
        return importlib.import_module("foresight.envs.control.multi_task").make(name, module.make, **options)
    return module.make(name, **options)
