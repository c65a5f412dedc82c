"""Curriculum: a run starts with the easiest examples and adds harder ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foresight.errors import UserError

if TYPE_CHECKING:
    from foresight.envs.text.task import Example

FULL_AT = 0.5  # of a run: from here on it samples from all examples


def by_difficulty(examples: Sequence[Example]) -> list[Example]:
    """The examples sorted by their column `difficulty`, the easiest first."""
    return sorted(examples, key=lambda example: float(example.columns["difficulty"]))


def size(examples: Sequence[Example], initial: float, progress: float, least: int) -> int:
    """How many of the easiest examples to sample from at `progress` in [0, 1] of a run; never fewer than `least`.

    Their share grows linearly from `initial` to 1 at `FULL_AT`.
    """
    share = initial + (1 - initial) * min(1.0, progress / FULL_AT)
    return max(least, math.ceil(share * len(examples)))


def check(name: str, examples: Sequence[Example], initial: float) -> None:
    """Raise UserError unless `initial` is a share and every training example has a difficulty."""
    if not 0 < initial <= 1:
        raise UserError(f"curriculum is {initial}: it must be a share of the examples, above 0 and at most 1.")
    for number, example in enumerate(examples, 1):
        if not isinstance(example.columns.get("difficulty"), int | float):
            raise UserError(
                f"A curriculum needs a number in the column 'difficulty' of every example; training example {number} "
                f"of '{name}' has {example.columns.get('difficulty')!r}."
            )
