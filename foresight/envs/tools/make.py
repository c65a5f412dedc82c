"""`make`: a task of conversations with tools, bundled or from a user's file."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from foresight.envs.text.split import split
from foresight.envs.text.task import Example, TextTask
from foresight.envs.tools.calculator import Calculator
from foresight.envs.tools.episode import Episode, Toolbox, scripted
from foresight.envs.tools.orders import Orders
from foresight.errors import UserError

ENVS: dict[str, type[Any]] = {"calculator": Calculator, "orders": Orders}
TURNS = 6  # of the model in an episode


def make(
    name: str, env: type[Any], held_out: int | None = None, seed: int = 0, turns: int = TURNS, **options: Any
) -> TextTask:
    """A `TextTask` whose completions are conversations of at most `turns` turns with `env`.

    `options` go to the env's `questions`. The outcome of an episode is its reward and the metric of evaluations.
    Raises UserError for an unknown option, and for a class without `questions`, `reset`, `reward` or tools.
    """
    missing = [part for part in ("questions", "reset", "reward") if not callable(getattr(env, part, None))]
    if missing:
        raise UserError(f"The class {env.__name__} has no {', '.join(missing)}: see docs/tools.md for an example.")
    if turns < 1:
        raise UserError(f"turns must be at least 1, not {turns}.")
    valid = inspect.signature(env.questions).parameters
    for option in options:
        if option not in valid:
            raise UserError(f"'{name}' has no option '{option}'. Options: {', '.join((*valid, 'held_out', 'turns'))}")
    rows = env.questions(**options, **({"seed": seed} if "seed" in valid else {}))
    examples = [Example(env().reset(row), columns={"row": row}) for row in rows]
    task = split(name, examples, held_out, seed, None)
    return dataclasses.replace(
        task, metric="outcome", episode=functools.partial(_begin, env), turns=turns, grader=_ungraded
    )


def _begin(env: type[Any], example: Example) -> Episode:
    return Toolbox(env(), example.columns["row"], getattr(env, "instruction", ""))


def _ungraded(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """Episodes are graded by their environments, not by their text."""
    if not completions:
        return []
    raise UserError("The outcome of a conversation is known only to its environment: it cannot be graded as text.")


def demonstrations(task: TextTask, count: int) -> list[dict[str, Any]]:
    """`count` scripted episodes of training questions as rows `{"messages": [...]}`.

    Raises UserError for a task whose class has no `script`, or too few questions.
    """
    if task.episode is None:
        raise UserError(f"'{task.name}' is no task with tools.")
    env = task.episode.args[0]  # type: ignore[attr-defined]
    script: Callable[[list[dict[str, str]]], str] | None = getattr(env, "script", None)
    if script is None:
        raise UserError(f"The class {env.__name__} has no script: write one, which plays an episode as it should be.")
    if not 0 < count <= len(task.train):
        raise UserError(f"'{task.name}' has {len(task.train):,} questions to train on, not {count:,}.")
    return [{"messages": scripted(task.episode(example), script, task.turns)} for example in task.train[:count]]
