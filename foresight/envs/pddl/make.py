"""`make`: a PDDL problem by its name, and the explicit MDP of one."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from foresight.envs.pddl import domains, kernels
from foresight.envs.pddl.ground import Grounded, ground
from foresight.envs.pddl.parse import domain_from, problem_from, read
from foresight.envs.pddl.task import Problem
from foresight.envs.tabular.mdp import MDP, assemble, finish
from foresight.errors import UserError

PREFIX = "pddl:"
NAMED = re.compile(r"(?P<domain>[a-z]+)-(?P<size>\d+)(?:-(?P<seed>\d+))?")
WAIT = "wait"


def problem(name: str) -> Problem:
    """`gripper-4` (a random problem of size 4), `gripper-4-7` (of seed 7), or the files `DOMAIN.pddl,PROBLEM.pddl`.

    The prefix `pddl:` may stand before it. Raises UserError for another name and for files with an error.
    """
    name = name.removeprefix(PREFIX)
    if "," in name or name.endswith(".pddl"):
        files = name.split(",")
        if len(files) != 2:
            raise UserError(f"'{name}' must name two files: DOMAIN.pddl,PROBLEM.pddl.")
        return from_files(*files)
    form = NAMED.fullmatch(name)
    if form is None:
        raise UserError(
            f"'{name}' is no PDDL problem: write DOMAIN-SIZE such as gripper-4, DOMAIN-SIZE-SEED, or "
            f"DOMAIN.pddl,PROBLEM.pddl. The domains are {', '.join(domains.NAMES)}."
        )
    return domains.of_size(form["domain"], int(form["size"]), int(form["seed"] or 0))


def from_files(domain: str | Path, problem: str | Path) -> Problem:
    """The problem in a file, of the domain in another. Raises UserError."""
    return problem_from(read(problem), domain_from(read(domain), str(domain)), str(problem))


def make(name: str, max_states: int = 200_000, step_reward: float = -1.0) -> MDP:
    """The problem `name` (see `problem`) as an MDP with its reachable states.

    A step earns `step_reward`, and the episode ends where the goal holds, so that the value of an optimal policy at
    gamma 1 is minus the length of a shortest plan. State 0 is the initial one. An action that is not applicable is not
    allowed; in a dead end there is only the action `wait`. Raises UserError for a problem with more than `max_states`
    states, without solution, or whose goal is true already.
    """
    if max_states < 1:
        raise UserError(f"max_states must be at least 1, not {max_states}.")
    task = solvable(problem(name))
    count, states, moves = kernels.enumerate_states(task.init, task.arrays, len(task.actions), max_states)
    if count > max_states:
        raise UserError(
            f"{name} has more than {max_states:,} states: choose a smaller problem, raise it with --env-options "
            f"max_states=N, or plan with a search: foresight plan {name}"
        )
    names = [action.name for action in task.actions]
    left = np.zeros(count, bool)
    left[moves[:, 0]] = True
    ends = np.array([kernels.reached(states[i], task.arrays) for i in range(count)])
    if not ends.any():
        raise UserError(f"{name} has no solution: none of its {count:,} reachable states satisfies the goal.")
    stuck = ~left & ~ends
    if stuck.any():
        names.append(WAIT)
    shape = (count, len(names))
    if count * len(names) > 200_000_000:
        raise UserError(
            f"{name} has {count:,} states × {len(names):,} actions, too large for a table: plan with search."
        )
    next_state = np.broadcast_to(np.arange(count, dtype=np.int32)[:, None], shape).copy()
    reward = np.full(shape, -np.inf)
    discount = np.ones(shape)
    s, a, after = moves.T
    next_state[s, a], reward[s, a] = after, step_reward
    discount[s, a] = 1.0 - ends[after]
    reward[stuck, -1] = step_reward
    reward[ends, 0] = 0.0  # `finish` makes them absorbing
    start = np.zeros(count)
    start[0] = 1.0
    tables = next_state[:, :, None], np.ones((*shape, 1)), reward[:, :, None], discount[:, :, None]
    finish(*tables, start)
    return assemble(name, *tables, start, action_names=tuple(names))


def solvable(problem: Problem, seconds: float = math.inf) -> Grounded:
    """The grounded problem. Raises UserError if its goal is true already, or can never be reached even without
    deleting anything, and if grounding takes more than `seconds`.
    """
    if problem.solved(problem.init):
        raise UserError(f"The goal of {problem.name} is true in its initial state: the empty plan solves it.")
    task = ground(problem, seconds)
    if not task.possible:
        raise UserError(f"{problem.name} has no solution: an atom of its goal can never become true.")
    return task
