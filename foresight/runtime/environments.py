"""The environments of a run: for training, for evaluation, and a single one to act in or render."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foresight.runtime import kinds
from foresight.runtime.config.settings import Settings

if TYPE_CHECKING:
    from foresight.envs.text.task import TextTask
    from foresight.runtime.evaluation.evaluate import Environment


def training(resolved: Settings) -> Any:
    """The environment to train in, with `num_envs` of them where the Config has that field.

    Raises UserError as `envs.make` does, and for a game whose opponent does not exist.
    """
    return kinds.get(resolved.kind).training_env(resolved)


def evaluation(resolved: Settings, env: Environment) -> Any:
    """The environment for evaluations: a new one if acting changes it, else `env` itself (an MDP, a text task)."""
    return kinds.get(resolved.kind).evaluation_env(resolved, env)


def single(resolved: Settings, render: bool = False) -> Any:
    """One environment (per task), to act in by hand or to render."""
    return kinds.get(resolved.kind).single_env(resolved, render)


def without_data(resolved: Settings) -> TextTask:
    """A text task without its data, which were moved or deleted. The model can be prompted but not evaluated."""
    from foresight.envs.text.task import TextTask  # late: only text tasks need it

    return TextTask(resolved.typed().env, [], [], None, traced=bool(resolved.env_options.get("trace")))


def spaces(env: Environment) -> Any:
    """The argument `spaces` of `build`: the spaces of a control environment; an MDP or a text task itself."""
    return getattr(env, "spaces", env)


def close(env: object) -> None:
    """Close an environment, if it has `close`."""
    if hasattr(env, "close"):
        env.close()
