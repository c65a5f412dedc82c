"""Countdown and the Game of 24: reach a target from given numbers, each used once, with + - * /.

The solver is exact and rational: 3 3 8 8 makes 24 as 8/(3-8/3). The tasks write two kinds of text to train on, over
integers from 1 to 99: the steps of a solution alone, or a depth-first search with its dead ends before them (Stream of
Search, Gandhi et al. 2024, arXiv:2404.03683). A search of 2, 7 and 3 for 19 is written as

    7+2=9|9,3+12*27-6/3     an operation, the numbers left, and each result of the last two: none is 19
    7*2=14|14,3+17*42-11    the next operation: a line is also the return to the numbers given
    7-2=5|5,3+8*15-2
    3+2=5|7,5+12*35-2
    3*2=6|7,6+13*42-1
    3-2=1|7,1+8*7-6/7
    7+3=10|10,2+12*20-8/5
    7*3=21|21,2+23*42-19    here it is
    !7*3=21,21-2=19         the steps of the solution

With four numbers, "<" and the numbers that the search returns to stand after each first operation that fails.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from foresight import errors
from foresight.envs.text.exact import LONGEST, OPERATIONS, evaluate
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError

LIMIT = 99  # larger results are not tried over positive integers
ANSWER = "!"  # before the steps of the answer
BACK = "<"  # before the numbers that a search returns to
TRACES = ("steps", "search", "none")
State = tuple[int, ...]  # the numbers left, sorted
Formula = Any  # a Fraction, or (operation, left formula, right formula)
_STEP = re.compile(r"(\d+)\s*([+*/-])\s*(\d+)\s*=\s*(\d+)")
_EXPRESSION = re.compile(r"[\d(][\d\s()+*/.-]*[\d)]")
_OPERATION = re.compile(r"[\d)]\s*[+*/-]\s*[\d(]")
_SIGNS = str.maketrans({"\u2212": "-", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/"})


def solve(numbers: Sequence[int], target: int) -> Formula | None:
    """A formula of all `numbers` that equals `target` exactly, or None if there is none.

    The last operation is solved for: for each way to part the numbers in two, the value that one part needs is looked
    up among those of the other.
    """
    wanted, given = Fraction(target), tuple(sorted(numbers))
    if len(given) < 2:
        return wanted if given == (target,) else None
    for left, right in _parts(given):
        others = _values(right)
        for a, x in _values(left).items():
            needed = {"+": wanted - a, "-": a - wanted, "- swapped": wanted + a}
            if a:
                needed |= {"*": wanted / a, "/ swapped": wanted * a}
                needed |= {"/": a / wanted} if wanted else {}
            elif not wanted:
                needed["*"] = next(iter(others))
            for operation, b in needed.items():
                if b in others:
                    pair = (others[b], x) if operation.endswith("swapped") else (x, others[b])
                    return (operation[0], *pair)
    return None


@functools.cache
def _values(numbers: State) -> dict[Fraction, Formula]:
    """Every value of formulas of all these numbers, with one formula each."""
    if len(numbers) == 1:
        return {Fraction(numbers[0]): Fraction(numbers[0])}
    found: dict[Fraction, Formula] = {}
    for left, right in _parts(numbers):
        for (a, x), (b, y) in itertools.product(_values(left).items(), _values(right).items()):
            found.setdefault(a + b, ("+", x, y))
            found.setdefault(a * b, ("*", x, y))
            found.setdefault(a - b, ("-", x, y))
            found.setdefault(b - a, ("-", y, x))
            if b:
                found.setdefault(a / b, ("/", x, y))
            if a:
                found.setdefault(b / a, ("/", y, x))
    return found


def _parts(numbers: State) -> Iterator[tuple[State, State]]:
    """The ways to part numbers into two groups, the smaller first."""
    everything = set(range(len(numbers)))
    for size in range(1, len(numbers) // 2 + 1):
        for chosen in itertools.combinations(range(len(numbers)), size):
            if 2 * size < len(numbers) or 0 in chosen:
                rest = tuple(numbers[i] for i in sorted(everything - set(chosen)))
                yield tuple(numbers[i] for i in chosen), rest


def expression(formula: Formula) -> str:
    """A formula as text, with parentheses around every part that is not a number."""
    if not isinstance(formula, tuple):
        return str(formula)
    operation, *sides = formula
    return operation.join(f"({expression(side)})" if isinstance(side, tuple) else str(side) for side in sides)


def children(state: State) -> list[tuple[str, State]]:
    """Every operation on two of the numbers with a result from 1 to `LIMIT`: `("8-7=1", the numbers left)`."""
    found: dict[str, State] = {}
    for i, j in itertools.combinations(range(len(state)), 2):
        small, large = state[i], state[j]
        rest = [number for k, number in enumerate(state) if k not in (i, j)]
        results = {f"{small}+{large}": small + large, f"{small}*{large}": small * large}
        if large > small:
            results[f"{large}-{small}"] = large - small
        if large % small == 0:
            results[f"{large}/{small}"] = large // small
        for text, result in results.items():
            if result > LIMIT:
                continue
            found[f"{text}={result}"] = tuple(sorted([*rest, result]))
    return list(found.items())


def solutions(state: State) -> dict[int, list[tuple[str, ...]]]:
    """For every target in reach over positive integers, the steps of all its solutions."""
    if len(state) == 1:
        return {state[0]: [()]}
    found: dict[int, list[tuple[str, ...]]] = {}
    for step, left in children(state):
        for target, paths in solutions(left).items():
            found.setdefault(target, []).extend((step, *path) for path in paths)
    return found


def moves(state: State) -> list[tuple[str, State]]:
    """As `children`, the larger number of a pair first: `("8-7=1", the numbers left, in their order)`."""
    found: dict[str, State] = {}
    for i, j in itertools.combinations(range(len(state)), 2):
        large, small = max(state[i], state[j]), min(state[i], state[j])
        rest = tuple(number for k, number in enumerate(state) if k not in (i, j))
        results = {"+": large + small, "*": large * small}
        if large > small:
            results["-"] = large - small
        if large % small == 0:
            results["/"] = large // small
        for operation, result in results.items():
            if result <= LIMIT:
                found[f"{large}{operation}{small}={result}"] = (result, *rest)
    return list(found.items())


HEURISTICS: dict[str, Callable[[State, int], int]] = {  # of a search, lower first: how far the numbers left are
    "none": lambda state, target: 0,  # the order of `moves`
    "sum": lambda state, target: abs(sum(state) - target),
    "nearest": lambda state, target: min(abs(sum(state) - target), abs(math.prod(state) - target)),
}
MIXED = ("sum", "nearest")  # the paper's: each search has one of them


def search(state: State, target: int, heuristic: str = "none") -> tuple[list[str], tuple[str, ...] | None]:
    """The lines of a depth-first search from 3 or 4 numbers, best first, and the steps of what it found, or None."""
    lines = list[str]()
    for step, left in sorted(moves(state), key=lambda move: HEURISTICS[heuristic](move[1], target)):
        if len(left) == 2:
            pair = tuple(sorted(left, reverse=True))
            line = f"{step}|{_listed(pair)}"
            for last, (result,) in moves(pair):
                line += last[len(str(pair[0]))] + str(result)
                if result == target:
                    return [*lines, line], (step, last)
            lines.append(line)
            continue
        below, found = search(left, target, heuristic)
        lines += [f"{step}|{_listed(left)}", *below]
        if found is not None:
            return lines, (step, *found)
        lines.append(BACK + _listed(state))
    return lines, None


def _listed(state: Sequence[int]) -> str:
    return ",".join(map(str, state))


def countdown(
    numbers: int = 3,
    largest: int = 13,
    low: int = 10,
    high: int = 99,
    traces: str = "steps",
    heuristic: str = "mixed",
    copies: int = 1,
    size: int = 0,
    held_out: int = 300,
    seed: int = 0,
) -> TextTask:
    """Problems like "3,7,8=24:", of `numbers` numbers from 1 to `largest` and a target in [low, high] in reach.

    `traces` is what `pretrain` and `sft` train on: "steps" (a solution, drawn from all), "search" (a search and what it
    found) or "none"; a search tries first what its `heuristic` calls nearest: "sum", "nearest", "none", or one of the
    first two at random, "mixed". `copies` of each problem have their numbers in another order and their own trace.
    `size` limits the training examples (0: all). No held-out numbers are trained on, with whatever target. The
    difficulty is the number of solutions, negated. An answer is an expression, or the steps; what stands before "!" is
    not graded.
    """
    if not 2 <= numbers <= 4 or largest < numbers:
        least = f"largest at least {min(max(numbers, 2), 4)}"
        raise UserError(f"numbers is {numbers} and largest {largest}: give 2, 3 or 4 numbers, and {least}.")
    if traces not in TRACES:
        raise errors.unknown("kind of traces", traces, TRACES)
    if traces == "search" and numbers < 3:
        raise UserError("A search has 3 or 4 numbers, not 2: give --env-options numbers=3, or traces=steps.")
    if heuristic not in ("mixed", *HEURISTICS):
        raise errors.unknown("heuristic", heuristic, ("mixed", *HEURISTICS))
    heuristics = MIXED if heuristic == "mixed" else (heuristic,)
    if copies < 1 or size < 0 or held_out < 1 or low < 1 or not low <= high <= LIMIT:
        raise UserError(
            f"copies is {copies}, size {size}, held_out {held_out} and the targets are {low} to {high}: copies and "
            f"held_out must be at least 1, size at least 0, and the targets a range from 1 to {LIMIT}."
        )
    draw = random.Random(f"countdown {seed}")
    every = list(itertools.combinations_with_replacement(range(1, largest + 1), numbers))
    draw.shuffle(every)
    test, train = list[Example](), list[Example]()
    few = max(1, held_out // max(1, len(every) // 10))  # of each held-out set of numbers: a tenth of all sets
    for state in every:
        reached = {t: paths for t, paths in solutions(state).items() if low <= t <= high}
        problems = [(target, paths) for target, paths in sorted(reached.items())]
        if len(test) < held_out:
            chosen = draw.sample(problems, min(few, len(problems), held_out - len(test)))
            test += [_problem(state, *problem, traces, heuristics, f"{seed}") for problem in chosen]
            continue
        train += [
            _problem(state, *problem, traces, heuristics, f"{seed} {copy}")
            for problem in problems
            for copy in range(copies)
        ]
        if size and len(train) >= size:
            break
    if not train or len(test) < held_out:
        raise UserError(f"There are not enough problems for held_out {held_out}: lower it, or raise largest or high.")
    draw.shuffle(train)
    end, mark = "," if traces == "steps" else "\n", ANSWER if traces == "search" else ""
    rules = {"extract": answer_of, "verifier": promise, "delimiter": end, "marker": mark}
    return TextTask("countdown", train[: size or None], test, grade, **rules)  # type: ignore[arg-type]


def _problem(
    state: State, target: int, paths: Sequence[tuple[str, ...]], traces: str, heuristics: Sequence[str], copy: str
) -> Example:
    """A problem with its numbers shuffled, and a trace to train on. A search has one of the heuristics, at random."""
    draw = random.Random(f"{state} {target} {copy}")  # its own, so that the problems do not depend on the traces
    shuffled = draw.sample(state, len(state))
    steps = draw.choice(paths)
    answer = ANSWER + ",".join(steps)
    columns: dict[str, Any] = {"numbers": list(state), "target": target, "difficulty": -len(paths)}
    if traces == "search":
        lines, found = search(tuple(shuffled), target, draw.choice(heuristics))
        assert found is not None  # the target is in reach, and the search is exhaustive
        columns["completion"] = "\n".join([*lines, ANSWER + ",".join(found)])
    elif traces == "steps":
        columns["completion"] = answer
    return Example(f"{_listed(shuffled)}={target}:", answer, columns)


def game24(largest: int = 13, held_out: int = 100, seed: int = 0, target: int = 24) -> TextTask:
    """Four numbers from 1 to `largest` that make 24, with fractions where needed: all 1,362 puzzles for 13.

    The questions are in words, and the answer is an expression. The difficulty is the largest denominator on the way.
    """
    puzzles = [(state, solve(state, target)) for state in multisets(largest)]
    examples = [
        Example(
            f"Use {_listed(state)}, each once, with + - * / and parentheses, to make {target}. Write one expression.",
            expression(formula),
            {"numbers": list(state), "target": target, "difficulty": _denominator(formula)},
        )
        for state, formula in puzzles
        if formula is not None
    ]
    if not 0 < held_out < len(examples):
        raise UserError(
            f"held_out is {held_out}: it must be from 1 to {len(examples) - 1}, with {len(examples)} puzzles."
        )
    random.Random(f"game24 {seed}").shuffle(examples)
    return TextTask("game24", examples[held_out:], examples[:held_out], grade, extract=answer_of, verifier=promise)


def multisets(largest: int = 13) -> list[State]:
    """All multisets of four numbers from 1 to `largest`: 1,820 for 13."""
    return list(itertools.combinations_with_replacement(range(1, largest + 1), 4))


def _denominator(formula: Formula) -> int:
    value = _valued(formula)
    return max([value.denominator, *(_denominator(side) for side in formula[1:] if isinstance(side, tuple))])


def _valued(formula: Formula) -> Fraction:
    if not isinstance(formula, tuple):
        return Fraction(formula)
    return OPERATIONS[formula[0]](*map(_valued, formula[1:]))


def grade(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """1 where the answer uses the example's numbers, each once, and equals its target exactly; else 0.

    It is a comma-separated list of steps, or an expression, after the last "!" or, without one, at the end. Needs the
    columns numbers and target; no gold answer is looked at, so the grader is also an exact verifier.
    """
    return [
        float(right(answer_of(c), e.columns["numbers"], e.columns["target"]))
        for e, c in zip(examples, completions, strict=True)
    ]


def answer_of(completion: str) -> str:
    """The text of a completion that is graded: after the last "!", else the last line with an expression or steps.

    A line with an operation comes first: "So the answer is 24." may follow it.
    """
    before, mark, after = completion.translate(_SIGNS).rpartition(ANSWER)
    if mark and _EXPRESSION.search(after):
        return after.strip()
    lines = [line for line in (before or after).splitlines() if _EXPRESSION.search(line)]
    lines = [line for line in lines if _OPERATION.search(line)] or lines
    return lines[-1].strip() if lines else ""


def right(answer: str, numbers: Sequence[int], target: int) -> bool:
    """Whether steps, or an expression, reach the target with these numbers, each used once."""
    steps = _STEP.findall(answer)
    if steps and _STEP.sub("", answer).strip(" ,.;") == "":
        return follows(steps, numbers) == (target,)
    head = answer.split("=")[0]  # of "the answer is (8 - 7) * 3 = 3"
    candidates = [head, *_EXPRESSION.findall(head)[-1:], *_EXPRESSION.findall(answer)[-1:]]
    return any(
        found is not None and found[0] == target and sorted(found[1]) == sorted(numbers)
        for found in map(evaluate, candidates)
    )


def follows(steps: Sequence[tuple[str, str, str, str]], numbers: Sequence[int]) -> State | None:
    """The numbers left after steps `(a, operation, b, result)`, or None if one is wrong or uses what is not there."""
    left = list(numbers)
    for a, operation, b, result in steps:
        if max(map(len, (a, b, result))) > LONGEST:  # `int` refuses thousands of digits
            return None
        for number in (int(a), int(b)):
            if number not in left:
                return None
            left.remove(number)
        if operation == "/" and int(b) == 0:
            return None
        if OPERATIONS[operation](Fraction(a), Fraction(b)) != int(result):
            return None
        left.append(int(result))
    return tuple(sorted(left))


def promise(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """The exact value of steps so far: 1 where the target can still be reached from the numbers left, else 0.

    Of an expression, or of all steps, it is the grade. Text before "!" is not looked at, nor an unfinished step.
    """
    return [_promise(e, c.rpartition(ANSWER)[2]) for e, c in zip(examples, completions, strict=True)]


def _promise(example: Example, answer: str) -> float:
    numbers, target = example.columns["numbers"], example.columns["target"]
    steps = [] if "(" in answer else _STEP.findall(answer)
    whole = len(steps) >= len(numbers) - 1 or (not steps and bool(_EXPRESSION.search(answer)))
    if whole:
        return float(right(answer_of(answer), numbers, target))
    left = follows(steps, numbers)
    return float(left is not None and solve(left, target) is not None)
