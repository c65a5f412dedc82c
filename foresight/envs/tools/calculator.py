"""`calculator`: products of numbers that a small model cannot multiply, with a calculator that can."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from typing import Any

from foresight.envs.text.graders import last_integer
from foresight.envs.tools import tool
from foresight.errors import UserError

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
LARGEST = 10**30  # of a number on the way
LONGEST = 200  # characters of an expression


class Calculator:
    """Questions like "What is 482 * 913?"; the last integer of the answer counts."""

    instruction = "Answer with one number."

    def __init__(self) -> None:
        self._gold = 0

    @staticmethod
    def questions(low: int = 100, high: int = 999, size: int = 2_200, seed: int = 0) -> list[dict[str, Any]]:
        """`size` different products of factors in [low, high]."""
        if size > (most := max(0, high - low + 1) ** 2 // 2):
            raise UserError(f"size is {size:,}: there are only {most:,} products to draw from. Lower size.")
        draw, seen = random.Random(seed), set[tuple[int, int]]()
        while len(seen) < size:
            seen.add((draw.randint(low, high), draw.randint(low, high)))
        return [{"a": a, "b": b} for a, b in sorted(seen)]

    def reset(self, row: dict[str, Any]) -> str:
        """The question about one product."""
        self._gold = row["a"] * row["b"]
        return f"What is {row['a']} * {row['b']}?"

    def calculate(self, expression: str) -> int:
        """Compute an expression of integers with + - * // % and parentheses."""
        return evaluate(expression)

    def reward(self, answer: str) -> float:
        """1 if the last integer in the answer is the product."""
        return float(last_integer(answer) == self._gold)

    @staticmethod
    def script(messages: list[dict[str, str]]) -> str:
        """A demonstration: one call, then its result."""
        last = messages[-1]["content"]
        if last.startswith(tool.RESULT):
            return last.removeprefix(tool.RESULT).removesuffix(tool.RESULT_END)
        return tool.write("calculate", expression=re.sub(r"What is (.*)\?", r"\1", last))


def evaluate(expression: str) -> int:
    """The value of an expression of integers. Raises ValueError for anything else, and for numbers beyond `LARGEST`."""
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, more than {LONGEST}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("this is no expression of integers") from error
    return _value(tree.body)


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        found = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if right == 0 and isinstance(node.op, ast.FloorDiv | ast.Mod):
            raise ValueError("division by zero")
        found = OPERATORS[type(node.op)](left, right)
    else:
        raise ValueError("only integers, + - * // % and parentheses are allowed")
    if abs(found) > LARGEST:
        raise ValueError(f"a number is larger than {LARGEST:.0e}")
    return int(found)
