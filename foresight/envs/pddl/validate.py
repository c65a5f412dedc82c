"""Whether a plan solves a problem, and if not, at which step it fails and what would repair it.

A plan is a list of texts `(action object ...)`, as in a plan file of the planning competitions. The verdicts are those
of VAL (Howey, Long & Fox 2004); its `advice` is what must become true or false first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresight.envs.pddl.task import Action, Atom, Problem, State, text_of
from foresight.errors import UserError

STEP = re.compile(r"\(\s*([^\s()]+(?:\s+[^\s()]+)*)\s*\)")
SHOWN = 8  # literals of a goal named in a message
KINDS = ("valid", "not a plan", "invalid operator", "unmet precondition", "unmet goal")


@dataclass(frozen=True)
class Verdict:
    """`kind` is one of `KINDS`; `step` (from 1) is the one that fails, or 0."""

    kind: str
    step: int = 0
    message: str = ""
    advice: tuple[str, ...] = ()
    state: State = frozenset()  # the last one that was reached

    @property
    def valid(self) -> bool:
        """Whether the plan reaches the goal."""
        return self.kind == "valid"


def validate(problem: Problem, plan: Any) -> Verdict:
    """Simulate `plan`, which may be anything that a program returned."""
    if not isinstance(plan, list | tuple) or not all(isinstance(step, str) for step in plan):
        return Verdict("not a plan", 0, f"A plan is a list of texts such as '(move a b)', not {_short(plan)}.")
    state = set(problem.init)
    for number, step in enumerate(plan, 1):
        action, wrong = operator(problem, step)
        if action is None:
            return Verdict(
                "invalid operator", number, f"Step {number}, {_short(step)}: {wrong}", state=frozenset(state)
            )
        if not action.applicable(state):
            missing = [atom for atom in action.positive if atom not in state]
            advice = _advice(missing, [atom for atom in action.negative if atom in state])
            return Verdict(
                "unmet precondition", number,
                f"Step {number}, {action.name}, is not applicable: {'; '.join(advice)}.", advice, frozenset(state),
            )  # fmt: skip
        state.difference_update(action.delete)
        state.update(action.add)
    missing = [atom for atom in problem.goal if atom not in state]
    present = [atom for atom in problem.goal_negative if atom in state]
    if missing or present:
        advice = _advice(missing, present)
        more = f"; and {len(advice) - SHOWN} more" if len(advice) > SHOWN else ""
        return Verdict(
            "unmet goal", len(plan),
            f"The plan of {len(plan)} steps ends before the goal: {'; '.join(advice[:SHOWN])}{more}.", advice,
            frozenset(state),
        )  # fmt: skip
    return Verdict("valid", state=frozenset(state))


def operator(problem: Problem, step: str) -> tuple[Action | None, str]:
    """The ground action that a step names, or None and what is wrong with it."""
    form = STEP.fullmatch(step.strip().lower())
    actions = problem.domain.actions
    known = ", ".join(f"({' '.join((a.name, *(v for v, _ in a.parameters)))})" for a in actions.values())
    if form is None:
        return None, f"a step is '(action object ...)'. The actions are {known}."
    name, *arguments = form[1].split()
    if name not in actions:
        return None, f"there is no action '{name}'. The actions are {known}."
    wanted = actions[name].parameters
    if len(arguments) != len(wanted):
        return None, f"'{name}' takes {len(wanted)} objects, not {len(arguments)}. The actions are {known}."
    for argument, (variable, kind) in zip(arguments, wanted, strict=True):
        if argument not in problem.objects:
            return None, f"there is no object '{argument}' for {variable}."
        if not problem.domain.is_a(problem.objects[argument], kind):
            return None, f"'{argument}' is a {problem.objects[argument]}, but {variable} must be a {kind}."
    return actions[name].bind(arguments), ""


def read_plan(text: str) -> list[str]:
    """The steps of a plan file; lines that start with ';' are comments. Raises UserError for another line."""
    steps = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split(";")[0].strip()
        if line and not STEP.fullmatch(line):
            raise UserError(f"Line {number} of the plan is '{line[:60]}'; expected '(action object ...)'.")
        steps += [line] if line else []
    return steps


def load_plan(path: str | Path) -> list[str]:
    """The steps in a plan file. Raises UserError."""
    from foresight.envs.pddl.parse import read

    return read_plan(read(path))


def _advice(missing: Sequence[Atom], present: Sequence[Atom]) -> tuple[str, ...]:
    return (
        *(f"{text_of(atom)} is false and must be true" for atom in missing),
        *(f"{text_of(atom)} is true and must be false" for atom in present),
    )


def _short(what: object) -> str:
    text = repr(what)
    return text if len(text) <= 80 else text[:77] + "..."
