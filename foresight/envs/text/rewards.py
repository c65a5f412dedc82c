"""User reward functions as graders, with TRL's signature; errors name the sample."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from foresight.envs.text.worker import Worker, function, listed
from foresight.errors import LostError, UserError

Examples = Sequence[Any]  # of `envs.text.task.Example`, which imports this module
Grader = Callable[[Examples, Sequence[str]], list[float]]  # examples and their completions to rewards
REWARD_TIMEOUT = 300.0  # seconds that a user's reward function may take for a batch


def reward_at(
    place: str | Callable[..., Any], limit: float, columns: Sequence[str] | None = None
) -> Callable[..., Any]:
    """The function itself, or the one at `file.py:name`, in a subprocess.

    Raises UserError if there is none, or if it does not take the task's `columns` as it will be called with them.
    """
    if limit < 0:
        raise UserError(f"reward_timeout is {limit}: it must be a number of seconds, or 0 for no limit.")
    found = function(place)
    if columns is not None:
        _check_signature(found, [name for name in columns if name != "prompt"])
    return found if callable(place) or limit == 0 else Worker(place, limit)


def _check_signature(reward: Callable[..., Any], columns: Sequence[str]) -> None:
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # of a builtin
        return
    given = dict.fromkeys(("prompts", "completions", *columns))
    try:
        signature.bind(**given)
    except TypeError as error:
        have = f"prompts, completions and the columns {', '.join(columns)}" if columns else "prompts and completions"
        raise UserError(
            f"The reward function '{reward_name(reward)}' is called with {have}, but does not take them: {error}. "
            f"Write def {reward_name(reward)}({', '.join((*given, '**columns'))}), or add the column to the data."
        ) from error


def reward_name(reward: Callable[..., Any]) -> str:
    """The name of a reward function in errors and metrics."""
    return str(getattr(reward, "__name__", type(reward).__name__))


def waits(reward: Callable[..., Any]) -> bool:
    """Whether a reward function runs in a subprocess or is `async`, so that it can run concurrently with others."""
    own = reward if inspect.isroutine(reward) else type(reward).__call__
    return isinstance(reward, Worker) or inspect.iscoroutinefunction(own)


def function_grader(reward: Callable[..., Any]) -> Grader:
    """A grader from a reward function with TRL's signature. None and NaN mean unscorable.

    Raises UserError, naming the sample, if the function raises, returns anything but finite numbers, None and NaN, or
    too few rewards.
    """
    name = reward_name(reward)

    def call(examples: Examples, completions: Sequence[str]) -> list[Any]:
        columns = {key: [e.columns.get(key) for e in examples] for key in examples[0].columns if key != "prompt"}
        shaped = [
            c if isinstance(e.prompt, str) else [{"role": "assistant", "content": c}]
            for e, c in zip(examples, completions, strict=True)
        ]
        result = listed(reward(prompts=[e.prompt for e in examples], completions=shaped, **columns))
        if not isinstance(result, list):
            raise LostError(
                f"The reward function '{name}' must return a list of rewards, one for each completion, but returned "
                f"{str(result)[:200]!r}, a {type(result).__name__}."
            )
        return result

    def grade(examples: Examples, completions: Sequence[str]) -> list[float]:
        if not examples:
            return []
        try:
            rewards = call(examples, completions)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise _blame(name, error, call, examples, completions) from error
        if len(rewards) != len(completions):
            raise LostError(
                f"The reward function '{name}' returned {len(rewards)} rewards for {len(completions)} completions: "
                "return one for each, None where there is none."
            )
        return [_number(name, r, e, c) for r, e, c in zip(rewards, examples, completions, strict=True)]

    return grade


def _number(name: str, reward: Any, example: Any, completion: str) -> float:
    if reward is None:
        return math.nan
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.inf
    if math.isinf(value):
        raise LostError(
            f"The reward function '{name}' returned {reward!r} for the completion {completion!r} to "
            f"{example.question!r}: return a finite number, or None (or NaN) if it cannot be scored."
        )
    return value


def _blame(
    name: str, error: BaseException, call: Callable[..., Any], examples: Examples, completions: Sequence[str]
) -> LostError:
    """Find the sample on which a reward function fails, to name it in the error."""
    for example, completion in zip(examples, completions, strict=True):
        try:
            call([example], [completion])
        except (Exception, SystemExit) as single:
            return LostError(
                f"The reward function '{name}' raised {type(single).__name__}: {single}, on the completion "
                f"{completion!r} to {example.question!r}."
            )
    return LostError(f"The reward function '{name}' raised {type(error).__name__}: {error}.")
