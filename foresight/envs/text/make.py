"""`make`: a text task by its name, with reasoning traces, composite rewards and a curriculum."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foresight import errors
from foresight.data import traces
from foresight.envs.text import composite
from foresight.envs.text import curriculum as curricula
from foresight.envs.text.arithmetic import addition, largest, repeats, stories
from foresight.envs.text.chains import chains
from foresight.envs.text.countdown import countdown, game24
from foresight.envs.text.dataset import dataset
from foresight.envs.text.errands import errands
from foresight.envs.text.planners import planners
from foresight.envs.text.reasoning_gym import reasoning_gym
from foresight.envs.text.rewards import REWARD_TIMEOUT
from foresight.envs.text.sorting import sorting
from foresight.envs.text.task import Example, TextTask
from foresight.envs.text.worker import class_at
from foresight.envs.tools import make as conversations
from foresight.errors import UserError

TASKS: dict[str, Callable[..., TextTask]] = {
    "addition": addition, "largest": largest, "stories": stories, "repeats": repeats,
    "countdown": countdown, "game24": game24,
    "chains": chains, "sorting": sorting, "planners": planners, "errands": errands,
}  # fmt: skip
NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}  # accepted types


def make(
    name: str,
    *,
    trace: bool = False,
    rewards: dict[str, float] | None = None,
    curriculum: float = 1.0,
    reward_timeout: float = REWARD_TIMEOUT,
    **options: Any,
) -> TextTask:
    """The text task `name`: one of `TASKS`, `reasoning_gym:NAME`, or a dataset with a reward function.

    Options of all tasks:

    - `trace`: completions are reasoning traces (`data.traces`): prompts ask for a thought before the answer, and the
      task's grader gets the answer alone. The default rewards become those of DeepSeek-R1: `{correct: 1, format: 1}`;
    - `rewards`: a composite reward, each part with its weight: `correct` (the task's grader), `format` (1 for a whole
      trace), `tags` (a share of it), or the path `file.py:name` of a reward function, which gets whole completions
      and may take `reward_timeout` seconds for a batch (0: in this process, without a limit). Conversations have other
      parts (`envs.tools.make.PARTS`);
    - `curriculum`: the share of the examples, the easiest, that a run starts with; all from half of it on. Examples
      need a column `difficulty` (`addition` and `largest` have one).

    Names joined by commas are several tasks of conversations (`envs.tools.make.mix`).

    Raises UserError for an unknown name or option, and if the grader rejects its own gold answers.
    """
    kind, _, rest = name.partition(":")
    _check_options(name, make, {"trace": trace, "curriculum": curriculum, "reward_timeout": reward_timeout})
    if "," in name and not Path(name).exists():
        return conversations.mix(
            name, functools.partial(make, trace=trace, rewards=rewards, curriculum=curriculum), options
        )
    if kind in conversations.ENVS or (kind.endswith(".py") and rest):
        return _conversation(name, trace, rewards, curriculum, options)
    maker: Callable[..., TextTask] = TASKS.get(name, reasoning_gym if kind == "reasoning_gym" and rest else dataset)
    named = maker is not dataset or "reward" in options or Path(name).exists() or bool(Path(name).suffix) or "/" in name
    if not named:
        raise errors.unknown("task", name, [*TASKS, *conversations.ENVS, "reasoning_gym:NAME", "FILE.jsonl"])
    _check_names(name, maker, options)
    _check_options(name, maker, options)
    if maker is reasoning_gym:
        task = reasoning_gym(rest, **options)
    else:
        task = maker(**options) if name in TASKS else dataset(name, reward_timeout=reward_timeout, **options)
    if task.grader is not None:
        if "reward" not in options:  # a user's reward has its own scale
            task.check()
    elif trace or rewards is not None:
        task.grade((), ())  # raises: there is no grader
    if trace:
        task = _traced(task)
    rewards = {"correct": 1.0, "format": 1.0} if trace and rewards is None else rewards
    if rewards is not None:
        pairs = composite.parse_weights(rewards)
        parts = composite.numbered([composite.part(task.grade, *pair, reward_timeout) for pair in pairs])
        task = dataclasses.replace(task, parts=parts)
    if curriculum != 1:
        curricula.check(task.name, task.train, curriculum)
        task = dataclasses.replace(task, curriculum=curriculum)
    return task


def _conversation(
    name: str, trace: bool, rewards: dict[str, float] | None, curriculum: float, options: dict[str, Any]
) -> TextTask:
    """A task of conversations with tools: a bundled one, perhaps `miniwob:PAGES`, or `FILE.py:CLASS`."""
    if trace or curriculum != 1:
        raise UserError(f"'{name}' is a task of conversations, which has no trace or curriculum: leave them out.")
    kind, _, rest = name.partition(":")
    env = conversations.ENVS.get(kind) or class_at(name)
    if kind in conversations.ENVS and rest:
        if not (option := getattr(env, "after_colon", "")):
            raise UserError(f"The task '{kind}' takes nothing after a colon: write --task {kind}, not {name}.")
        options = {option: rest, **options}
    _check_options(name, conversations.make, {key: options[key] for key in ("held_out", "seed") if key in options})
    if hasattr(env, "questions"):  # the other options have sentences of their own
        _check_options(name, env.questions, options)
    return conversations.make(name, env, rewards=rewards, **options)


def _check_names(name: str, maker: Callable[..., TextTask], options: dict[str, Any]) -> None:
    """Raise UserError for an unknown option; reasoning-gym checks its own."""
    own, shared = inspect.signature(maker).parameters, inspect.signature(make).parameters
    valid = [key for key in (*own, *shared) if key not in ("path", "name", "options")]
    for option in options:
        if option not in valid and maker is not reasoning_gym:
            raise errors.unknown(f"option of the task '{name}'", option, dict.fromkeys(valid))


def _check_options(name: str, make: Callable[..., TextTask], options: dict[str, Any]) -> None:
    """Raise UserError for an option that should be a number or a bool and is not."""
    for option, parameter in inspect.signature(make).parameters.items():
        wanted, value = str(parameter.annotation).partition(" ")[0], options.get(option)
        if wanted not in NUMBERS or value is None:
            continue
        if not isinstance(value, NUMBERS[wanted]) or isinstance(value, bool) != (wanted == "bool"):
            raise UserError(
                f"The option '{option}' of the task '{name}' must be {wanted}, not {value!r}. Separate options by "
                "spaces, as in --env-options high=29 held_out=50."
            )


def _traced(task: TextTask) -> TextTask:
    """The task with prompts that ask for a thought before the answer; its grader gets the answer alone."""

    def grade(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return task.grade(examples, [traces.read(completion).answer for completion in completions])

    own = task.extract  # an answer alone may lack the mark that the task's own answers follow
    extract = None if own is None else lambda answer: own(answer) or answer
    traced = dataclasses.replace(
        task, grader=grade, traced=True, marker="</think> <answer>", delimiter=". ", extract=extract, verifier=None
    )

    def with_instruction(example: Example) -> Example:
        found = traced.ask(example.prompt)
        return dataclasses.replace(example, prompt=found.prompt, stop=found.stop)

    train, test = ([with_instruction(example) for example in side] for side in (task.train, task.test))
    return dataclasses.replace(traced, train=train, test=test)
