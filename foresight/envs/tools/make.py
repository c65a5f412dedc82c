"""`make`: a task of conversations with tools, bundled or from a user's file."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from foresight import errors
from foresight.envs.text import composite
from foresight.envs.text.split import split
from foresight.envs.text.task import Example, TextTask
from foresight.envs.tools import tool
from foresight.envs.tools.babyai import BabyAI
from foresight.envs.tools.calculator import Calculator
from foresight.envs.tools.delegation import Delegation
from foresight.envs.tools.episode import Episode, Toolbox, close, in_time, scripted, tools_of
from foresight.envs.tools.notebook import Notebook
from foresight.envs.tools.orders import Orders
from foresight.envs.tools.python import Python
from foresight.envs.tools.search import Search
from foresight.envs.tools.shell import Shell
from foresight.envs.tools.web import Web
from foresight.errors import UserError

ENVS: dict[str, type[Any]] = {
    "calculator": Calculator, "orders": Orders, "python": Python, "notebook": Notebook, "search": Search,
    "babyai": BabyAI, "delegation": Delegation, "shell": Shell, "miniwob": Web,
}  # fmt: skip
OWN = ("turns", "episode_seconds", "weights")  # fields that each of several tasks has for itself
PARTS = ("outcome", "process", "time")  # of a composite reward
TURNS = 6  # of the model in an episode, unless the class has its own `turns`


def make(
    name: str,
    env: type[Any],
    held_out: int | None = None,
    seed: int = 0,
    turns: int | None = None,
    tool_seconds: float = tool.SECONDS,
    episode_seconds: float = math.inf,
    without: str | Sequence[str] = (),
    rewards: dict[str, float] | None = None,
    **options: Any,
) -> TextTask:
    """A `TextTask` whose completions are conversations of at most `turns` turns with `env`.

    `env` is a `ToolEnv`, or with a method `turn` an `Episode` of its own. A call takes at most `tool_seconds`, and the
    environment of an episode, with its beginning and its reward, at most `episode_seconds`.
    The tools named in `without` are not offered, to see what they are worth. `options` go to the env's `questions`. The
    outcome of an episode is its reward and the metric of evaluations. With `rewards`, the reward is the weighted sum of
    these `PARTS`: the outcome, the number of failed calls or actions (`process`), and the seconds that the episode took
    (`time`).
    Raises UserError for an unknown option or tool, and for a class without `questions`, `reset`, `reward` or tools.
    """
    own = callable(getattr(env, "turn", None))
    needed = ("questions", "reset", *(("messages", "parts") if own else ("reward",)))
    missing = [part for part in needed if not callable(getattr(env, part, None))]
    if missing:
        raise UserError(f"The class {env.__name__} has no {', '.join(missing)}: see docs/tools.md for an example.")
    turns = getattr(env, "turns", TURNS) if turns is None else turns
    if not isinstance(turns, int) or turns < 1:
        raise UserError(f"turns must be a whole number of at least 1, not {turns}.")
    for limit, seconds in (("tool_seconds", tool_seconds), ("episode_seconds", episode_seconds)):
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise UserError(f"{limit} must be more than 0, not {seconds}.")
    valid = inspect.signature(env.questions).parameters
    for option in options:
        if option not in valid:
            known = ", ".join((*valid, "held_out", "turns", "tool_seconds", "episode_seconds", "without", "rewards"))
            raise UserError(f"'{name}' has no option '{option}'. Options: {known}")
    without = [without] if isinstance(without, str) else without
    if not isinstance(without, list | tuple):
        raise UserError(f"without must be names of tools, such as [calculate], not {without!r}.")
    weights = {} if rewards is None else dict(composite.parse_weights(rewards, "{outcome: 1, process: -0.1}"))
    for part in weights:
        if part not in PARTS:
            raise errors.unknown("part of a reward", part, PARTS)
    rows = env.questions(**options, **({"seed": seed} if "seed" in valid else {}))
    if without and rows:
        known_tools = [] if own else in_time(episode_seconds, name, functools.partial(_tools, env, rows[0]))
        for one in without:
            if one not in known_tools:
                raise errors.unknown("tool in without", one, known_tools)
    examples = [
        Example(in_time(episode_seconds, name, functools.partial(_question, env, row)), columns={"row": row})
        for row in rows
    ]
    alike = len({str(example.prompt) for example in examples}) < 2  # as of a game, which begins alike
    keys = [repr(row) for row in rows] if alike else None
    task = split(name, examples, held_out, seed, None, keys)
    begin = functools.partial(_begin, env, seconds=tool_seconds, without=tuple(without))
    return dataclasses.replace(
        task, metric="outcome", episode=begin, turns=turns, grader=_ungraded, episode_seconds=episode_seconds,
        weights=weights,
    )  # fmt: skip


def mix(name: str, make: Callable[..., TextTask], options: dict[str, Any]) -> TextTask:
    """Several tasks of conversations as one, `name` being theirs, joined by commas: equal shares of their questions.

    `options` are for all, or for one: `calculator.high=99`. An example has the columns `task` and `OWN` of its
    own task. Raises UserError for one task, a task twice, a task without conversations, and as `make` does.
    """
    names = [one.strip() for one in name.split(",")]
    if len(names) != len(set(names)) or not all(names) or len(names) < 2:
        raise UserError(f"'{name}' does not name several different tasks: write them as in --task calculator,notebook.")
    for option in options:
        if "." in option and option.rpartition(".")[0] not in names:
            raise UserError(f"The option '{option}' is of none of the tasks {', '.join(names)}.")
    tasks = []
    for one in names:
        own = {key.rpartition(".")[2]: x for key, x in options.items() if key.rpartition(".")[0] in ("", one)}
        tasks.append(make(one, **own))
        if tasks[-1].episode is None:
            raise UserError(f"'{one}' has no conversations: only tasks with tools can be trained on together.")
    by_name = dict(zip(names, tasks, strict=True))

    def side(examples: Callable[[TextTask], Sequence[Example]]) -> list[Example]:
        count = min(len(examples(task)) for task in tasks)
        drawn = [random.Random(f"mix {count}").sample(examples(task), count) for task in tasks]
        return [
            dataclasses.replace(example, columns={**example.columns, "task": one, **{n: getattr(task, n) for n in OWN}})
            for row in zip(*drawn, strict=True)  # in turn, so that the first ones are of all tasks
            for one, task, example in zip(names, tasks, row, strict=True)
        ]

    def begin(example: Example) -> Episode:
        found: Callable[[Example], Episode] | None = by_name[example.columns["task"]].episode
        assert found is not None
        return found(example)

    turns = max(task.turns for task in tasks)
    first = tasks[0]
    return dataclasses.replace(
        first, name=name, train=side(lambda t: t.train), test=side(lambda t: t.test), episode=begin, turns=turns
    )


def _question(env: type[Any], row: dict[str, Any]) -> Any:
    """What an episode begins with. The environment is closed, as a task has hundreds of them."""
    made = env()
    first = made.reset(row)
    close(made)
    return first


def _tools(env: type[Any], row: dict[str, Any]) -> list[str]:
    """The names of the tools of an episode: environments of other libraries have them only after `reset`."""
    made = env()
    made.reset(row)
    found = [one.name for one in tools_of(made)]
    close(made)
    return found


def _begin(env: type[Any], example: Example, seconds: float, without: Sequence[str]) -> Episode:
    made = env()
    if not callable(getattr(made, "turn", None)):
        return Toolbox(made, example.columns["row"], getattr(env, "instruction", ""), seconds, without=without)
    made.reset(example.columns["row"])
    episode: Episode = made
    return episode


def _ungraded(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """Episodes are graded by their environments, not by their text."""
    if not completions:
        return []
    raise UserError("The outcome of a conversation is known only to its environment: it cannot be graded as text.")


def demonstrations(task: TextTask, count: int) -> list[dict[str, Any]]:
    """`count` scripted episodes of training questions as rows `{"messages": [...]}`, and those of sub-agents.

    Raises UserError for a task whose class has no `script`, or too few questions.
    """
    if task.episode is None:
        raise UserError(f"'{task.name}' is no task with tools.")
    if not 0 < count <= len(task.train):
        raise UserError(f"'{task.name}' has {len(task.train):,} questions to train on, not {count:,}.")
    return [{"messages": one} for example in task.train[:count] for one in played(task, example)]


def played(task: TextTask, example: Example) -> list[list[dict[str, str]]]:
    """The messages of an example's scripted episode, and those of its sub-agents."""
    if task.episode is None:
        raise UserError(f"'{task.name}' is no task with tools.")
    episode = task.episode(example)
    try:
        return scripted(episode, task.turns)
    finally:
        close(episode)
