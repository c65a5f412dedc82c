"""Curricula: a run starts with the easiest examples and adds harder ones, or prefers those that it half knows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foresight.errors import UserError, unknown
from foresight.ops.advantage import learnability

if TYPE_CHECKING:
    from foresight.envs.text.task import Example, TextTask

FULL_AT = 0.5  # of a run: from here on it samples from all examples
SAMPLING = ("uniform", "learnability", "hardest")
FADING = 0.5  # weight of earlier completions each time an example is sampled again: the policy has changed


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


def refuse(task: TextTask, name: str) -> None:
    """Raise UserError for a task with a curriculum, by which the algorithm `name` does not draw."""
    if task.curriculum < 1:
        raise UserError(
            f"{name} trains on all rows of its data, in an order of its own, and a curriculum ({task.curriculum:g}) "
            "chooses prompts to sample answers to: leave it out."
        )


def check_sampling(sampling: str) -> None:
    """Raise UserError for an unknown way to sample prompts."""
    if sampling not in SAMPLING:
        raise unknown("prompt_sampling", sampling, SAMPLING)


@dataclasses.dataclass(frozen=True)
class Counts:
    """How many completions of each of N training examples were right and wrong, `table` `[N, 2]`, see `count_`.

    `digest` tells which examples these are (`TextTask.digest`): data may be edited before a resume.
    """

    table: Tensor
    digest: str


def counts_of(task: TextTask, counts: Counts | None) -> Counts:
    """The same counts or, if they are None or of other training examples, new ones."""
    if counts is None or counts.digest != task.digest:
        return Counts(torch.zeros(len(task.train), 2), task.digest)
    return counts


def by_learnability(counts: Tensor, prompts: int, generator: torch.Generator) -> list[int]:
    """The indices of distinct examples, drawn in proportion to their learnability.

    `counts` `[N, 2]` holds how many completions of each example were right and wrong, see `count_`.
    Source: Foster et al. 2025 (arXiv:2502.12272), who count new completions of candidates; here they are the run's own,
    which cost nothing.
    """
    right, wrong = counts.cpu().unbind(1)
    drawn: list[int] = torch.multinomial(learnability(right, wrong), prompts, generator=generator).tolist()
    return drawn


def count_(counts: Tensor, chosen: Sequence[int], rewards: Tensor) -> None:
    """Add the completions of the examples `chosen` to `counts`, in place; earlier ones then weigh half.

    `rewards` `[P, G]` in [0, 1], NaN where unscorable. Raises UserError for other rewards.
    """
    if len(outside := rewards[(rewards < 0) | (rewards > 1)]):
        raise UserError(
            f"prompt_sampling learnability needs rewards from 0 to 1, but one is {outside[0]:g}: scale the rewards, or "
            "use prompt_sampling uniform."
        )
    right, scored = rewards.nansum(1), (~rewards.isnan()).sum(1)
    counts[chosen] = FADING * counts[chosen] + torch.stack([right, scored - right], 1).to(counts)
