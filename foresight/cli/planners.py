"""`foresight plan`: problems of PDDL, solved by a search or by Fast Downward, and plans validated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from foresight.cli import screen
from foresight.errors import UserError


def plan(
    problem: Annotated[str, tyro.conf.Positional],
    *,
    search: Literal["bfs", "astar", "gbfs", "downward"] = "gbfs",
    heuristic: Literal["hff", "hadd", "hmax", "blind"] = "hff",
    seconds: float = 30.0,
    max_states: int = 5_000_000,
    validate: str | None = None,
    out: str | None = None,
    json: bool = False,
) -> int:
    """Find a plan for a problem of PDDL, or validate one. The exit code is 1 without a valid plan.

    Args:
        problem: DOMAIN-SIZE such as gripper-4 (or with a seed, gripper-4-7), or DOMAIN.pddl,PROBLEM.pddl.
        search: breadth-first, A*, greedy best-first, or downward: Fast Downward (lama-first), if it is installed.
        heuristic: of astar and gbfs; with hmax or blind, A* finds a shortest plan.
        seconds: time limit.
        max_states: maximum number of states that a search keeps.
        validate: a plan file to validate instead: the step that fails, and what would repair it.
        out: write the plan to this file.
        json: print the result as JSON.
    """
    from foresight.envs.pddl import make
    from foresight.envs.pddl import validate as validator
    from foresight.planning.symbolic import downward
    from foresight.planning.symbolic import search as searches

    if not seconds > 0:
        raise UserError(f"--seconds must be above 0, not {seconds:g}.")
    found = make.problem(problem)
    console = screen.stdout()
    if validate is not None:
        verdict = validator.validate(found, validator.load_plan(validate))
        if json:
            keys = ("kind", "step", "message", "advice")
            screen.emit({key: getattr(verdict, key) for key in keys} | {"valid": verdict.valid})
        else:
            console.print("valid" if verdict.valid else verdict.message, markup=False, soft_wrap=True)
        return 0 if verdict.valid else 1
    if search == "downward":
        if found.solved(found.init):
            raise UserError(f"The goal of {found.name} is true in its initial state: the empty plan solves it.")
        result = downward.plan(found, seconds)
    else:
        result = searches.search(make.solvable(found), search, heuristic, seconds, max_states)
    if result.plan is not None and not (verdict := validator.validate(found, result.plan)).valid:
        raise UserError(f"The plan of {search} is not valid: {verdict.message}")
    if json:
        screen.emit({"problem": found.name, "search": search, **dataclasses.asdict(result)})
        return 0 if result.plan is not None else 1
    if result.plan is None:
        reason = {"time": f"no plan within {seconds:g} seconds", "memory": "no plan within the memory limit",
                  "unsolvable": "no plan exists"}[result.status]  # fmt: skip
        screen.note(f"{found.name}: {reason}.")
        return 1
    text = "\n".join(result.plan) + "\n"
    if out is not None:
        try:
            Path(out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"Cannot write {out}: {error.strerror}. Choose another --out.") from error
    else:
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    counted = f", {result.expanded:,} states expanded, {result.generated:,} generated" if result.generated else ""
    screen.note(f"{len(result.plan)} steps in {result.seconds:.2f} s{counted}")
    return 0
