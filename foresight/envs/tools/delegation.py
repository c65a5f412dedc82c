"""`delegation`: chains of sums that a manager answers alone or splits among sub-agents, in a few tokens of text.

    a3b5c9:            the question: the last digit of 3 + 5 + 9
    a3=3b5=8c9=7#7     an answer: the running sum after each term, and the result after "#"
    ?a-h?i-p           instead: one sub-agent for the terms a to h, one for i to p
    A4B7:              what the manager reads when they have answered: a chain of their results ("A?" without one)

A sub-agent gets its slice of the chain, and nothing else: the same kind of question, with letters from a on. At the
depth limit it ends with "." instead of ":", and a delegation is answered with "!", as is one that cannot be read. An
answer takes 4 tokens a term, so that a long chain does not fit into one context.
"""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

from foresight.envs.tools.episode import Reply
from foresight.errors import UserError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST_MEMBERS = 4  # sub-agents of a demonstration
_SPLIT = re.compile(r"(\?[a-z]-[a-z])+")


class Delegation:
    """One conversation of a team. The outcome is 1 for the right digit; the reward is less the cost of all tokens."""

    turns = 3
    canceled = False

    def __init__(self, digits: str = "", cost: float = 0.0, depth: int = 0, budget: int = 0) -> None:
        self.digits, self.cost, self.depth, self.tokens_left = digits, cost, depth, budget
        self.tokens = 0
        self.answer = ""
        self.members: list[Delegation] = []
        self.latest: list[Delegation] = []  # of the last delegation
        self.failed = 0

    @staticmethod
    def questions(
        shortest: int = 3,
        longest: int = 24,
        size: int = 6_000,
        cost: float = 0.2,
        depth: int = 1,
        budget: int = 1_000,
        seed: int = 0,
    ) -> list[dict[str, Any]]:
        """`size` different chains of `shortest` to `longest` terms.

        `cost` is that of 100 sampled tokens, of the manager and its sub-agents, whose `budget` limits their number;
        `depth` is how far sub-agents may delegate (0: not at all, 1: the manager alone).
        """
        if not 2 <= shortest <= longest <= len(LETTERS):
            raise UserError(f"shortest and longest are {shortest} and {longest}: use 2 <= shortest <= longest <= 26.")
        if depth < 0 or budget < 1 or not cost >= 0:
            raise UserError(f"depth is {depth}, budget {budget} and cost {cost}: use at least 0, 1 and 0.")
        draw, rows = random.Random(f"delegation {seed}"), dict[str, None]()
        for _ in range(100 * size):
            if len(rows) == size:
                break
            length = draw.randint(shortest, longest)
            rows["".join(str(draw.randint(0, 9)) for _ in range(length))] = None
        else:
            raise UserError(f"size {size} is too many for chains of {shortest} to {longest} digits: lower size.")
        return [{"digits": digits, "cost": cost, "depth": depth, "budget": budget} for digits in rows]

    def reset(self, row: dict[str, Any]) -> str:
        """The question."""
        self.__init__(**row)  # type: ignore[misc]
        return self._question()

    def _question(self) -> str:
        terms = "".join(letter + digit for letter, digit in zip(LETTERS, self.digits, strict=False))
        return terms + (":" if self.depth else ".")

    def messages(self) -> list[dict[str, str]]:
        """The question alone."""
        return [{"role": "user", "content": self._question()}]

    def spend(self, tokens: int) -> None:
        """Count sampled tokens."""
        self.tokens, self.tokens_left = self.tokens + tokens, self.tokens_left - tokens

    def turn(self, text: str) -> Reply:
        """An answer, which ends the episode, or a delegation."""
        if not text.startswith("?"):
            self.answer = text.rpartition("#")[2] if "#" in text else ""
            return Reply(None)
        slices = self._slices(text)
        share = self.tokens_left // (len(slices) + 1)  # as much for each as for the manager
        if not slices or not self.depth or share < 1:
            self.failed += 1
            return Reply({"role": "user", "content": "!"})
        members = tuple(Delegation(self.digits[a:b], self.cost, self.depth - 1, share) for a, b in slices)
        self.members, self.latest = [*self.members, *members], list(members)
        self.tokens_left -= share * len(slices)
        return Reply(None, members)

    def _slices(self, text: str) -> list[tuple[int, int]]:
        """The slices of a delegation; none if it cannot be read."""
        found = []
        for part in text[1:].split("?") if _SPLIT.fullmatch(text) else ():
            first, last = LETTERS.index(part[0]), LETTERS.index(part[-1])
            if not first <= last < len(self.digits):
                return []
            found.append((first, last + 1))
        return found

    def joined(self) -> Reply:
        """A chain of the results."""
        self.tokens_left += sum(member.tokens_left for member in self.latest)
        results = "".join(
            f"{letter.upper()}{one.answer[:1] or '?'}" for letter, one in zip(LETTERS, self.latest, strict=False)
        )
        return Reply({"role": "user", "content": f"{results}:"})

    def parts(self) -> dict[str, float]:
        """`outcome`, `reward` (the outcome less the cost), `members`, `malformed` and `team_tokens`.

        Only a right answer has a cost: if all answers to a question are wrong, the cheapest must not be learned.
        """
        right = float(self.answer == str(sum(map(int, self.digits)) % 10))
        tokens = self.team_tokens()
        return {
            "outcome": right,
            "reward": right * max(1 - self.cost * tokens / 100, 0.0),
            "members": float(len(self.members)),
            "malformed": float(self.failed),
            "team_tokens": float(tokens),
        }

    def team_tokens(self) -> int:
        """The sampled tokens of this conversation and of its sub-agents'."""
        return self.tokens + sum(member.team_tokens() for member in self.members)

    def script(self, messages: list[dict[str, str]]) -> str:
        """A demonstration: half of the chains are split, into parts drawn at random."""
        if self.members:
            results = [int(member.answer) for member in self.latest]
            return _answer(results, LETTERS.upper())
        draw = random.Random(self._question())
        if self.depth and draw.random() < 0.5:
            count = draw.randint(2, min(MOST_MEMBERS, len(self.digits)))
            cuts = [0, *sorted(draw.sample(range(1, len(self.digits)), count - 1)), len(self.digits)]
            return "".join(f"?{LETTERS[a]}-{LETTERS[b - 1]}" for a, b in itertools.pairwise(cuts))
        return _answer(list(map(int, self.digits)), LETTERS)


def _answer(terms: list[int], letters: str) -> str:
    total, text = 0, ""
    for letter, term in zip(letters, terms, strict=False):
        total = (total + term) % 10
        text += f"{letter}{term}={total}"
    return f"{text}#{total}"
