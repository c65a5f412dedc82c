"""`python`: questions about numbers that a few lines of Python answer, run in the sandbox."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

from foresight.envs.text.graders import last_integer
from foresight.envs.tools import tool
from foresight.sandbox.run import Limits, run

LIMITS = Limits(seconds=5.0, memory_mib=256)
SOURCE = "def program(code):\n    exec(compile(code, '<program>', 'exec'), {'__name__': '__main__'})\n"


class Python:
    """Questions such as "What is the 41st prime?"; the last integer of the answer counts."""

    instruction = "Answer with one number."
    slow = True  # a call starts a process

    def __init__(self) -> None:
        self._gold = 0

    @staticmethod
    def questions(size: int = 2_000, seed: int = 0) -> list[dict[str, Any]]:
        """`size` different questions of three kinds."""
        draw, found = random.Random(seed), dict[str, dict[str, Any]]()
        while len(found) < size:
            row = _question(draw)
            found.setdefault(row["question"], row)
        return list(found.values())

    def reset(self, row: dict[str, Any]) -> str:
        """The question."""
        self._gold = row["gold"]
        return str(row["question"])

    def python(self, code: str) -> str:
        """Run a Python program; returns what it prints. Nothing is kept from one call to the next."""
        return execute(code)

    def reward(self, answer: str) -> float:
        """1 if the last integer in the answer is right."""
        return float(last_integer(answer) == self._gold)

    @staticmethod
    def script(messages: list[dict[str, str]]) -> str:
        """A demonstration: one program, then what it printed."""
        last = messages[-1]["content"]
        if last.startswith(tool.RESULT):
            return last.removeprefix(tool.RESULT).removesuffix(tool.RESULT_END).strip()
        numbers = [int(text) for text in re.findall(r"\d+", last)]
        if "digits" in last:
            return tool.write("python", code=f"print(sum(map(int, str({numbers[0]}**{numbers[1]}))))")
        if "divisible" in last:
            low, high, by, no = numbers
            code = f"print(sum(n % {by} == 0 and n % {no} != 0 for n in range({low}, {high} + 1)))"
            return tool.write("python", code=code)
        code = f"n, found = 1, 0\nwhile found < {numbers[0]}:\n    n += 1\n"
        return tool.write("python", code=f"{code}    found += all(n % d for d in range(2, int(n**0.5) + 1))\nprint(n)")


def execute(code: str, limits: Limits = LIMITS) -> str:
    """What a program prints in the sandbox, in a new process. Raises ValueError with its traceback if it fails."""
    result = run(SOURCE, "program", [[code]], limits)[0]
    if result.status != "ok":
        raise ValueError(f"{result.printed}{result.trace or result.error}")
    return result.printed or "(nothing: print what you want to read)"


def _question(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(("digits", "divisible", "prime"))
    if kind == "digits":
        base, power = draw.randint(2, 99), draw.randint(10, 60)
        gold = sum(map(int, str(base**power)))
        return {"question": f"What is the sum of the digits of {base} to the power of {power}?", "gold": gold}
    if kind == "divisible":
        low, by = draw.randint(1, 500), draw.randint(3, 9)
        high, no = low + draw.randint(50, 500), by * draw.randint(2, 5)
        text = f"How many numbers from {low} to {high} are divisible by {by} and not by {no}?"
        gold = sum(n % by == 0 and n % no != 0 for n in range(low, high + 1))
        return {"question": text, "gold": gold}
    place = draw.randint(20, 250)
    primes = (n for n in itertools.count(2) if all(n % d for d in range(2, int(n**0.5) + 1)))
    return {"question": f"What is prime number {place}?", "gold": next(itertools.islice(primes, place - 1, None))}
