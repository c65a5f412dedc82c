"""The split of a text task into examples to train on and examples held out."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence

from foresight.envs.text.rewards import Grader
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError

HELD_OUT = 100  # examples, by default


def split(
    name: str,
    examples: Sequence[Example],
    held_out: int | None,
    seed: int,
    grader: Grader | None,
    keys: Sequence[str] | None = None,
) -> TextTask:
    """Hold out whole prompts, chosen by the seed, until `held_out` examples are: no prompt is in both sets.

    None is `HELD_OUT`, or a fifth of the examples if that is less, and leaves a prompt to train on. With `keys`, one
    for each example, examples of one key count as one prompt instead.

    Raises UserError if there are fewer than 2 prompts, or `held_out` leaves none to train on.
    """
    prompts = [json.dumps(e.prompt) for e in examples] if keys is None else list(keys)
    sizes = Counter(prompts)
    order = list(sizes)
    if len(order) < 2:
        raise UserError(
            f"'{name}' has {len(order)} different prompts: at least 2 are needed, one to train on and one held out."
        )
    random.Random(f"held out {seed}").shuffle(order)
    most = len(examples) - sizes[order[-1]]
    held_out = min(HELD_OUT, len(examples) // 5 or 1, most) if held_out is None else held_out
    if not 0 < held_out <= most:
        note = "" if len(order) == len(examples) else f" (of {len(order)} prompts, one of which is left to train on)"
        raise UserError(f"held_out must be between 1 and {most} for '{name}'{note}, but is {held_out}.")
    reserved, count = dict[str, list[Example]](), 0
    for prompt in order:
        if count >= held_out:
            break
        reserved[prompt], count = [], count + sizes[prompt]
    train = [example for example, prompt in zip(examples, prompts, strict=True) if prompt not in reserved]
    for example, prompt in zip(examples, prompts, strict=True):
        if prompt in reserved:
            reserved[prompt].append(example)
    return TextTask(name, train, list(itertools.chain.from_iterable(reserved.values())), grader)
