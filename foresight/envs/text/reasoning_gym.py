"""Tasks of the package reasoning-gym, each with its own scorer."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Sequence
from typing import Any

from foresight import errors
from foresight.envs.text.graders import last_integer
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError

INTEGER = r"-?\d+"


def reasoning_gym(
    name: str, size: int = 1000, held_out: int = 100, seed: int = 0, exact: bool = False, **options: Any
) -> TextTask:
    """Any task of the package reasoning-gym, with its own scorer; `options` go to its generator.

    The answer is the text in the last `<answer>...</answer>`; without one, the last number if the gold answer is an
    integer, else the whole completion. Scorers may give partial credit: with `exact` a full score is 1, and all else 0.

    Generators repeat themselves: questions that are held out are not trained on, so that fewer than `size` may remain.
    """
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise UserError("reasoning-gym tasks need a package: run `pip install 'foresight[reasoning]'`.") from error
    registry = importlib.import_module("reasoning_gym.factory").DATASETS
    if size < 1 or held_out < 1:
        raise UserError(f"size is {size} and held_out {held_out}: both must be at least 1.")
    if name not in registry:
        raise errors.unknown("reasoning-gym task", name, registry)
    valid = [field.name for field in dataclasses.fields(registry[name][1]) if field.name not in ("seed", "size")]
    for option in options:
        if option not in valid:
            own = [key for key in inspect.signature(reasoning_gym).parameters if key not in ("name", "options")]
            raise errors.unknown(f"option of the task 'reasoning_gym:{name}'", option, [*own, *valid])
    try:
        dataset = gym.create_dataset(name, size=size + held_out, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"reasoning-gym cannot make '{name}' with {options}: {error}") from error

    def score(example: Example, completion: str) -> float:
        try:
            return float(dataset.score_answer(_answer_of(completion, str(example.answer)), example.columns["entry"]))
        except Exception:  # scorers parse an answer without checks: they cannot read this one
            return 0.0

    def grade(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        scores = [score(e, c) for e, c in zip(examples, completions, strict=True)]
        return [float(score >= 1) for score in scores] if exact else scores

    entries = [dataset[i] for i in range(size + held_out)]
    gold = [None if entry["answer"] is None else str(entry["answer"]) for entry in entries]  # None: there are many
    examples = [Example(one["question"], answer, {"entry": one}) for one, answer in zip(entries, gold, strict=True)]
    metric, test = "accuracy" if exact else "score", examples[:held_out]
    asked = {example.prompt for example in test}
    train = [example for example in examples[held_out:] if example.prompt not in asked]
    if not train:
        raise UserError(f"All {size} questions of '{name}' are held out too: lower held_out, or raise size.")
    numeric = any(re.fullmatch(INTEGER, str(example.answer)) for example in examples)
    extract = functools.partial(_answer_of, gold="0" if numeric else "")
    return TextTask(f"reasoning_gym:{name}", train, test, grade, metric, extract=extract)


def _answer_of(completion: str, gold: str) -> str:
    """What is graded and voted on: the last text in a tag; else the last integer, if `gold` is one; else all."""
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    if not found and re.fullmatch(INTEGER, gold) and (number := last_integer(completion)) is not None:
        return str(number)
    return (found[-1] if found else completion).strip()
