"""Bundled tasks: `addition`, `largest` (of several numbers), `stories` (sums in words) and `repeats`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import string
from typing import Any

from foresight.envs.text.graders import grade_ending, grade_last_integer
from foresight.envs.text.split import split
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError

NAMES = {"Tom": "he", "Ben": "he", "Max": "he", "Sam": "he", "Ann": "she", "Eva": "she", "Mia": "she", "Zoe": "she"}
THINGS = ("figs", "nuts", "eggs", "keys", "hats", "pens")
LETTERS = string.ascii_lowercase
STORIES = 8 * 7 * 6 * 40 * 9 * 2  # who, with whom, which things, how many, how many moved, in which direction


def addition(
    low: int = 0, high: int = 19, held_out: int = 100, seed: int = 0, train_high: int | None = None
) -> TextTask:
    """Questions like "What is 7 + 12?": every pair of addends in [low, high], `held_out` of them chosen by the seed.

    With `train_high`, pairs with a larger addend, up to `train_high`, are trained on too; the held-out questions stay
    the same.
    The last number in the completion is the answer. The difficulty is the sum. Pairs are ordered: most held-out
    questions, such as 7 + 12, are trained on with their addends exchanged, 12 + 7.
    """
    top = high if train_high is None else train_high
    if top < high:
        raise UserError(f"train_high must be at least high, which is {high}, not {train_high}.")
    examples = {
        (a, b): Example(f"What is {a} + {b}?", str(a + b), {"difficulty": a + b})
        for a, b in itertools.product(range(low, top + 1), repeat=2)
    }
    small = [example for pair, example in examples.items() if max(pair) <= high]
    large = [example for pair, example in examples.items() if max(pair) > high]
    task = split("addition", small, held_out, seed, grade_last_integer)
    return dataclasses.replace(task, train=[*task.train, *large])


def largest(numbers: int = 4, size: int = 2000, held_out: int = 200, seed: int = 0) -> TextTask:
    """Questions like "Which number is the largest: 34, 71, 15, 60?": `size` of them, of different two-digit numbers.

    The last number in the completion is the answer. The nearer the second largest, the harder.
    """
    if not 2 <= numbers <= 90:
        raise UserError(f"numbers is {numbers}: it must be from 2 to 90, the count of two-digit numbers.")
    if size > (most := math.perm(90, numbers) // 2):  # half: samples are rejected until they differ
        raise UserError(f"size is {size:,}: with {numbers} numbers it must be at most {most:,}.")
    draw, seen = random.Random(seed), set[tuple[int, ...]]()
    while len(seen) < size:
        seen.add(tuple(draw.sample(range(10, 100), numbers)))
    examples = [
        Example(
            f"Which number is the largest: {', '.join(map(str, row))}?",
            str(max(row)),
            {"difficulty": sorted(row)[-2] - max(row)},
        )
        for row in sorted(seen)
    ]
    return split("largest", examples, held_out, seed, grade_last_integer)


def stories(size: int = 8000, held_out: int = 200, seed: int = 0) -> TextTask:
    """Stories like "Tom has 12 figs. Ann gives him 7. Now he has 19.": `size` of them; the answer is the last words.

    They are sampled uniformly, without replacement, from all 8 · 7 · 6 · 40 · 9 · 2 = 241,920: no model can predict an
    unseen story with a loss below log 241,920 nats. The number at its end is the answer.
    """
    if size > STORIES // 2:  # half: samples are rejected until they differ
        raise UserError(f"size is {size:,}: it must be at most {STORIES // 2:,}, half of all stories.")
    draw, seen = random.Random(seed), set[tuple[Any, ...]]()
    while len(seen) < size:
        who, other = draw.sample(list(NAMES), 2)
        gives = draw.random() < 0.5
        seen.add((who, other, draw.choice(THINGS), draw.randint(10, 49), draw.randint(1, 9), gives))
    return split("stories", [_story(*row) for row in sorted(seen)], held_out, seed, grade_ending)


def repeats(
    size: int = 20_000, held_out: int = 200, seed: int = 0, shortest: int = 4, longest: int = 12, times: int = 3
) -> TextTask:
    """Texts like "kqrxkqrxkqrx": `shortest` to `longest` different random letters, `times` times.

    The last time is the answer. It can only be predicted by finding the former occurrence of a letter and copying what
    follows it: by induction heads (Olsson et al. 2022, arXiv:2209.11895).
    """
    if not 2 <= shortest <= longest <= len(LETTERS):
        raise UserError(f"shortest and longest must be 2 <= shortest <= longest <= 26, not {shortest} and {longest}.")
    if times < 2:
        raise UserError(f"times is {times}: it must be at least 2.")
    most = sum(math.perm(len(LETTERS), length) for length in range(shortest, longest + 1)) // 2
    if size > most:  # half: samples are rejected until they differ
        raise UserError(f"size is {size:,}: with {shortest} to {longest} letters it must be at most {most:,}.")
    draw, seen = random.Random(seed), set[str]()
    while len(seen) < size:
        seen.add("".join(draw.sample(LETTERS, draw.randint(shortest, longest))))
    examples = [Example(text * (times - 1), text) for text in sorted(seen)]
    return split("repeats", examples, held_out, seed, grade_ending)


def _story(who: str, other: str, thing: str, has: int, moved: int, gives: bool) -> Example:
    subject = NAMES[who]
    happens = f"gives {'him' if subject == 'he' else 'her'} {moved}" if gives else f"takes {moved} away"
    prompt = f"{who} has {has} {thing}. {other} {happens}. Now {subject} has"
    return Example(prompt, f" {has + moved if gives else has - moved}.")
