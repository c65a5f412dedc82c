"""Exact rational arithmetic on text: expressions are parsed, never executed, and answers are compared as numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST = 200  # characters of an expression
OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}
_SYMBOLS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_NUMBER = re.compile(  # of an exponent at most 3 digits: the number of 1e999999999 needs 400 MB
    r"-?(?:\d+(?:\.\d+)?|\.\d+)(?:/\d+|[eE][-+]?\d{1,3})?"
)
_WRITTEN = re.compile(  # a number in a text: its sign, thousands, decimals, what it is divided by, and its exponent
    r"(?<![\w./^])(?<!\^[-+\u2212{])(?<!\^\{[-+\u2212])[-+\u2212]?(?=\.?\d)"  # the exponent of ^ is no number
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d*)(?:\.\d+)?(?: ?/ ?\d+)?(?:[eE][-+]?\d+)?"
)
_REWRITTEN = [  # what LaTeX and hands write, as `_WRITTEN` reads it
    (re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3})"), ","),  # 10{,}000, 10\,000 and 10,\!000
    (re.compile(r"(?<!\d)\\[dt]?frac\{([-+\u2212]?\d+)\}\{(\d+)\}"), r"\1/\2"),
    (re.compile(r"(?<!\d)\\[dt]?frac(\d)(\d)"), r"\1/\2"),
    (re.compile(r"(?<=\d) ?(?:\\times|\\cdot|[*\u00d7\u00b7]) ?10\^(?:\{([-+]?\d+)\}|([-+]?\d+))"), r"e\1\2"),
    (re.compile(r"((?:^|[=({$:])\s*[-\u2212])\s+(?=\.?\d)"), r"\1"),  # x = - 5, and not 10 - 3
]


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression of integers, + - * / and parentheses, and its integers in order.

    None for anything else: a name, a power, a division by zero, or more than `LONGEST` characters.
    """
    if len(expression) > LONGEST or "\n" in expression.strip():
        return None
    numbers = list[int]()

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and (symbol := _SYMBOLS.get(type(node.op))):
            return OPERATIONS[symbol](value(node.left), value(node.right))
        raise ValueError

    try:
        return value(ast.parse(expression.strip(), mode="eval").body), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def canonical(answer: str) -> str:
    """The one form of an answer that votes are counted under: 0.5, 1/2 and 2/4 are "1/2"; 1,000 and 1e3 are "1000".

    Text that is not a number is stripped of spaces, a final period, and differences of case.
    """
    text = answer.strip().rstrip(".").strip()
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text).replace(" ", "").replace("\u2212", "-").removeprefix("+")
    if len(plain) <= LONGEST and _NUMBER.fullmatch(plain):
        top, _, bottom = plain.partition("/")
        if not bottom or int(bottom):
            return str(Fraction(top) / int(bottom or 1))
    return " ".join(text.lower().split())


def last_number(text: str) -> str:
    """The last number in a text, as it is written: "-1,000", "0.5", "3/4" or "2e5"; "" if there is none.

    A fraction of LaTeX is written with a slash, its thousands, "10{,}000", with a comma, and powers of ten, "3 * 10^5",
    as "3e5". Other exponents, as in cm^2, are no numbers of their own.
    """
    found = _WRITTEN.findall(_plain(text))
    return str(found[-1]) if found else ""


def is_number(text: str) -> bool:
    """Whether a text is a number and nothing else."""
    return _WRITTEN.fullmatch(_plain(text)) is not None


def _plain(text: str) -> str:
    for pattern, plain in _REWRITTEN:
        text = pattern.sub(plain, text)
    return text
