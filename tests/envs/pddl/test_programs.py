"""Planner programs: the hand-written ones, their faults by class, and other names for the same problem."""

from __future__ import annotations

import numpy as np
import pytest

from foresight.envs.pddl import domains, programs, renaming
from foresight.envs.pddl.parse import domain_from, problem_from
from foresight.envs.pddl.task import write_domain, write_problem
from foresight.errors import UserError
from tests.sabotage import sabotaged_by

TRAINING = {name: domains.tasks(name, 3, 2, domains.TRAIN) for name in domains.NAMES}


def first_step_dropped(original):
    """Values of the sandbox, without the first step of a plan."""

    def mutant(*arguments):
        return [
            type(r)(r.status, r.value[1:] if r.status == "ok" else None, r.error, r.trace, r.printed, r.seconds)
            for r in original(*arguments)
        ]

    return mutant


@sabotaged_by("foresight.sandbox.run.run", first_step_dropped)
@pytest.mark.parametrize("name", domains.NAMES)
def test_a_hand_written_planner_solves_its_domain(name):
    """On three training problems; `benchmarks/genplan.py planners` runs the thirty of the evaluation."""
    assert [one.fault for one in programs.solve(programs.written(name), TRAINING[name])] == ["", "", ""]


@pytest.mark.parametrize(
    ("body", "fault", "said"),
    [
        ("return init[0]", "exception", "TypeError: 'set' object is not subscriptable"),
        ("import numpy", "exception", "No module named 'numpy'"),
        ("while True: pass", "time-out", "did not return within 2 seconds"),
        ("return (x for x in goal)", "not a plan", "it returned a generator"),
        ("return None", "not a plan", "not None"),
        ("return [('move', 'room0')]", "not a plan", "A plan is a list of texts"),
        (
            "return ['(fly room0 room1)']",
            "invalid operator",
            "there is no action 'fly'. The actions are (move ?from ?to)",
        ),
        ("return ['(pick ball0 room0)']", "invalid operator", "'pick' takes 3 objects, not 2"),
        ("return ['(drop ball0 room0 gripper0)']", "unmet precondition", "(carry ball0 gripper0) is false"),
        ("return []", "unmet precondition", "ends before the goal"),
    ],
)
def test_every_fault_has_its_class_and_a_message(body, fault, said):
    found = programs.solve(f"def get_plan(objects, init, goal):\n    {body}\n", TRAINING["gripper"][:1], 2.0)[0]
    assert (found.fault, found.solved) == (fault, False) and said in found.message


@pytest.mark.parametrize(("name", "nameless"), [(name, i % 2 == 0) for i, name in enumerate(domains.NAMES)])
def test_other_names_are_the_same_problem(name, nameless):
    """The renamed planner solves the renamed problem; the original one does not, and the file is read again."""
    problem = TRAINING[name][0]
    names = renaming.draw(problem.domain, renaming.stems(problem), np.random.default_rng(3), nameless)
    other = renaming.rename(problem, names)
    source = programs.written(name)
    assert programs.solve(renaming.rename_program(source, names), [other])[0].solved
    assert not programs.solve(source, [other])[0].solved
    again = problem_from(write_problem(other), domain_from(write_domain(other.domain)))
    assert again.init == other.init and len(other.init) == len(problem.init)
    words = set(write_problem(other).split())
    assert not words & {f"({p}" for p in problem.domain.predicates}


def test_a_plain_program_is_short_and_solves():
    source = programs.plain(programs.written("gripper"))
    assert '"""' not in source and "Atoms" not in source and len(source) < 700
    assert programs.solve(source, TRAINING["gripper"])[2].solved
    with pytest.raises(UserError, match="Unknown domain 'griper'"):
        programs.written("griper")
