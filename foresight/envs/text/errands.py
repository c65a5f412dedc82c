"""Plans of errands as text: a question with an instruction and a report, and the subgoals of the script as its answer.

See `envs.control.errands`. Instructions that are held out name an object that no training question names.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from foresight.envs.control.errands import script
from foresight.envs.control.errands.rules import HELD_PAIRS, PAIRS
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError

KNOWN = tuple(pair for pair in PAIRS if pair not in HELD_PAIRS)
LOCKS = tuple(pair.removesuffix(" key") for pair in KNOWN if pair.endswith("key"))


def errands(size: int = 4000, held_out: int = 300, seed: int = 0) -> TextTask:
    """`size` questions to train on, and `held_out` with new instructions. Graded 1 for the plan of the script."""
    if size < 1 or held_out < 1:
        raise UserError(f"size is {size} and held_out {held_out}: both must be at least 1.")
    draw = random.Random(f"errands {seed}")
    train = [_example(draw, KNOWN, KNOWN) for _ in range(size)]
    return TextTask("errands", train, [_example(draw, HELD_PAIRS, PAIRS) for _ in range(held_out)], grade)


def _example(draw: random.Random, moved: Sequence[str], others: Sequence[str]) -> Example:
    what = draw.choice(moved)
    where = draw.choice([pair for pair in others if pair != what])
    locked = draw.choice(LOCKS) if draw.random() < 0.6 else ""
    other = draw.choice([pair for pair in others if pair != where])
    hand = draw.choice(["", "", what, f"{locked} key" if locked else "", other])
    reasons = [
        "it begins", "time is over", "the plan is done", f"the {draw.choice([what, hand or what])} slipped",
        f"the hand has the {hand}" if hand else "time is over",
    ]  # fmt: skip
    reason = f"the {locked} door is locked" if locked and draw.random() < 0.5 else draw.choice(reasons)
    instruction = f"bring the {what} to the {where}"
    answer = "; ".join(script.plan(instruction, hand, locked))
    return Example(script.ask(instruction, reason, hand, locked), answer, {"completion": answer})


def grade(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """1 where the subgoals are those of the script; else 0."""
    pairs = zip(examples, completions, strict=True)
    return [float(script.read(text) == script.read(str(one.answer))) for one, text in pairs]
