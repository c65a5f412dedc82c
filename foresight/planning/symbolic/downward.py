"""Fast Downward (Helmert 2006) as an external program: its planner, and its translation of a problem.

It is found as `fast-downward.py` or `fast-downward` on the PATH, or in the package `up-fast-downward` (GPL), which is
never imported: files go in, files and exit codes come out. Its times include translation and the start of its driver.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from foresight.envs.pddl.task import Problem, write_domain, write_problem
from foresight.envs.pddl.validate import read_plan
from foresight.errors import UserError
from foresight.planning.symbolic.found import Found
from foresight.sandbox import process

ALIAS = "lama-first"
UNSOLVABLE, TIME = (10, 11, 12), (21, 23, 24)  # exit codes of the driver; (11, 12: incomplete, it found none)
MEMORY = (20, 22)
EXTRA = 10.0  # seconds of wall clock beyond the planner's own limit


def driver() -> list[str] | None:
    """The command of the driver, or None if it is not installed."""
    for name in ("fast-downward.py", "fast-downward"):
        if found := shutil.which(name):
            return [sys.executable, found] if found.endswith(".py") else [found]
    spec = importlib.util.find_spec("up_fast_downward")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / "downward" / "fast-downward.py"
        if file.is_file():
            return [sys.executable, str(file)]
    return None


def plan(problem: Problem, seconds: float = 30.0, alias: str = ALIAS) -> Found:
    """The first plan of Fast Downward. Raises UserError if it is not installed or fails."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="foresight-") as place:
        command = ["--alias", alias, "--plan-file", "plan", "--overall-time-limit", f"{max(1, round(seconds))}s"]
        code = _run(problem, Path(place), command, seconds + EXTRA)
        took = time.perf_counter() - began
        file = Path(place) / "plan"
        if code is not None and code < 4 and file.is_file():
            return Found(read_plan(file.read_text()), "solved", 0, 0, took)
    if code is None or code in TIME:
        return Found(None, "time", 0, 0, took)
    if code in UNSOLVABLE or code in MEMORY:
        return Found(None, "unsolvable" if code in UNSOLVABLE else "memory", 0, 0, took)
    raise UserError(f"Fast Downward failed on {problem.name} with the exit code {code}: see its documentation.")


@dataclass(frozen=True)
class Operator:
    """A ground action over variables with finite domains: (variable, value) that must hold; (variable, value) after."""

    name: str
    conditions: tuple[tuple[int, int], ...]
    effects: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Translated:
    """A problem in Fast Downward's SAS: `facts[variable][value]` is an atom as text, or what means "none of them"."""

    facts: tuple[tuple[str, ...], ...]
    init: tuple[int, ...]
    goal: tuple[tuple[int, int], ...]
    operators: dict[str, Operator]

    def applicable(self, state: tuple[int, ...]) -> list[str]:
        """The names of the applicable operators, sorted."""
        return sorted(o.name for o in self.operators.values() if all(state[var] == val for var, val in o.conditions))

    def apply(self, state: tuple[int, ...], name: str) -> tuple[int, ...]:
        """The state after an operator."""
        after = list(state)
        for variable, value in self.operators[name].effects:
            after[variable] = value
        return tuple(after)

    def solved(self, state: tuple[int, ...]) -> bool:
        """Whether the goal holds."""
        return all(state[variable] == value for variable, value in self.goal)

    def atoms(self, state: tuple[int, ...]) -> set[str]:
        """The positive atoms of a state, as `at(ball0, room1)`."""
        named = {self.facts[variable][value] for variable, value in enumerate(state)}
        return {fact.removeprefix("Atom ") for fact in named if fact.startswith("Atom ")}

    def known(self) -> set[str]:
        """All positive atoms that a state may hold."""
        return {f.removeprefix("Atom ") for values in self.facts for f in values if f.startswith("Atom ")}


def translate(problem: Problem, seconds: float = 60.0) -> Translated:
    """Fast Downward's translation, without its simplification by relevance. Raises UserError without Fast Downward."""
    with tempfile.TemporaryDirectory(prefix="foresight-") as place:
        options = ["--translate-options", "--keep-unimportant-variables"]
        code = _run(problem, Path(place), ["--translate"], seconds, options)
        file = Path(place) / "output.sas"
        if code != 0 or not file.is_file():
            raise UserError(f"Fast Downward could not translate {problem.name} (exit code {code}).")
        return _read(file.read_text())


def _run(
    problem: Problem, place: Path, options: list[str], seconds: float, last: list[str] | None = None
) -> int | None:
    """Run the driver on the problem's files in `place`; its exit code, or None where it was killed."""
    command = driver()
    if command is None:
        raise UserError("Fast Downward is not installed: pip install up-fast-downward, or use --search gbfs.")
    files = {"domain.pddl": write_domain(problem.domain), "problem.pddl": write_problem(problem)}
    for name, text in files.items():
        with tempfile.NamedTemporaryFile("w", dir=place, delete=False) as file:
            file.write(text)
        os.replace(file.name, place / name)
    sas = ["--sas-file", "output.sas"]
    child = process.start([*command, *options, *sas, *files, *(last or [])], {**os.environ}, quiet=True, cwd=str(place))
    return process.kill(child, seconds)


def _read(text: str) -> Translated:
    """The parts of a SAS file (version 3) that a planner without axioms needs."""
    lines = iter(text.splitlines())

    def until(word: str) -> None:
        while next(lines) != word:
            pass

    until("end_metric")
    facts = []
    for _ in range(int(next(lines))):
        until("begin_variable")
        _ = next(lines), next(lines)
        facts.append(tuple(next(lines) for _ in range(int(next(lines)))))
    until("begin_state")
    init = tuple(int(next(lines)) for _ in facts)
    until("begin_goal")
    goal = tuple(_pair(next(lines)) for _ in range(int(next(lines))))
    until("end_goal")
    operators = {}
    for _ in range(int(next(lines))):
        until("begin_operator")
        name = f"({next(lines)})"
        conditions = [_pair(next(lines)) for _ in range(int(next(lines)))]
        effects = []
        for _ in range(int(next(lines))):
            count, *rest = map(int, next(lines).split())
            if count:
                raise UserError("The translation has conditional effects, which are not supported.")
            variable, before, after = rest
            if before >= 0:
                conditions.append((variable, before))
            effects.append((variable, after))
        operators[name] = Operator(name, tuple(conditions), tuple(effects))
    return Translated(tuple(facts), init, goal, operators)


def _pair(line: str) -> tuple[int, int]:
    first, second = line.split()
    return int(first), int(second)
