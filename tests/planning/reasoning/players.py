"""A scripted player of Countdown: random legal steps, which continue what is written."""

from __future__ import annotations

import random

from foresight.envs.text import countdown

TASK = countdown.countdown(held_out=30)


def player(text: str, draw: random.Random) -> str:
    """The rest of an answer in the form of `traces="steps"`."""
    question, _, written = text.partition(":")
    left = [int(number) for number in question.partition("=")[0].split(",")]
    for a, _, b, result in countdown._STEP.findall(written):
        left.remove(int(a))
        left.remove(int(b))
        left.append(int(result))
    out = "" if written else countdown.ANSWER
    while len(left) > 1:
        step, state = draw.choice(countdown.children(tuple(sorted(left))))
        left = list(state)
        out += step + ("," if len(left) > 1 else "")
    return out
