"""Planners as Python programs: `get_plan(objects, init, goal)`, run in the sandbox; the validator checks their plans.

The interface is that of Silver et al. (2024, arXiv 2305.11014): `objects` is a set of names, or of pairs (name, type)
in a domain with types; `init` and `goal` are sets of atoms such as `("at", "ball1", "room2")`; the result is a list of
texts `"(action object ...)"`. The classes of feedback are theirs too.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresight.envs.pddl.domains import NAMES
from foresight.envs.pddl.task import Problem
from foresight.envs.pddl.validate import validate
from foresight.errors import UserError, unknown
from foresight.sandbox.run import Limits, Result, run

FOLDER = Path(__file__).with_name("written")
CLASSES = ("exception", "time-out", "not a plan", "invalid operator", "unmet precondition")
SECONDS = 30.0  # wall clock of a program on one problem, as in the paper
SENT = ("exception", "memory", "ended", "output")  # statuses of the sandbox that count as exceptions
ENTRY = """

def _entry(objects, init, goal):
    sets = [{tuple(x) if isinstance(x, list) else x for x in part} for part in (objects, init, goal)]
    return get_plan(*sets)
"""


@dataclass(frozen=True)
class Outcome:
    """A program on one problem: `fault` is one of `CLASSES`, or "" if its plan is valid."""

    fault: str
    message: str = ""
    plan: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def solved(self) -> bool:
        """Whether the plan is valid."""
        return not self.fault


def solve(source: str, problems: Sequence[Problem], seconds: float = SECONDS) -> list[Outcome]:
    """Run the program on each problem. Raises UserError for a problem with a negative goal, which has no place here."""
    for problem in problems:
        if problem.goal_negative:
            raise UserError(f"The goal of {problem.name} has a negative atom, which programs are not given.")
    calls = [arguments(problem) for problem in problems]
    results = run(source + ENTRY, "_entry", calls, Limits(seconds=seconds))
    return [outcome(problem, result, seconds) for problem, result in zip(problems, results, strict=True)]


def arguments(problem: Problem) -> list[Any]:
    """Objects, initial state and goal for the program, as JSON: sorted lists."""
    objects: list[Any] = list(problem.objects)
    if problem.domain.typed:
        objects = [[name, kind] for name, kind in problem.objects.items()]
    return [objects, list(map(list, problem.facts)), sorted(map(list, problem.goal))]


def outcome(problem: Problem, result: Result, seconds: float = SECONDS) -> Outcome:
    """The class of a fault, and the message that a model gets to repair it."""
    if result.status == "timeout":
        return Outcome("time-out", f"The program did not return within {seconds:g} seconds.", (), result.seconds)
    if result.status in SENT:
        text = result.trace or result.error
        return Outcome("exception", f"The program raised an exception:\n{text.strip()}", (), result.seconds)
    if result.status == "value":
        return Outcome("not a plan", f"The program returned no list of texts: {result.error}.", (), result.seconds)
    verdict = validate(problem, result.value)
    if verdict.valid:
        return Outcome("", "", tuple(result.value), result.seconds)
    fault = "unmet precondition" if verdict.kind == "unmet goal" else verdict.kind
    return Outcome(fault, verdict.message, (), result.seconds)


def written(name: str) -> str:
    """The planner of a domain that was written by hand. Raises UserError for another name."""
    if name not in NAMES:
        raise unknown("domain", name, NAMES)
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def plain(source: str) -> str:
    """The program without docstrings, annotations and what only they need: the form that a small model writes."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not isinstance(node, ast.ImportFrom | ast.Assign | ast.Expr)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
            if ast.get_docstring(node):
                node.body = node.body[1:]
    return ast.unparse(tree) + "\n"
