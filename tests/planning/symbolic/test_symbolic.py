"""Search: shortest plans, estimates that keep their promise, and the same semantics as Fast Downward."""

from __future__ import annotations

import numpy as np
import pytest

from foresight.envs.pddl import domains, kernels
from foresight.envs.pddl.ground import ground
from foresight.envs.pddl.parse import domain_from, problem_from
from foresight.envs.pddl.validate import validate
from foresight.errors import UserError
from foresight.planning.symbolic import downward, heuristics
from foresight.planning.symbolic.search import search
from tests.sabotage import sabotaged_by

TASKS = {name: ground(domains.of_size(name, 3)) for name in domains.NAMES}


def literal_distances(task):
    """Steps to the goal of every reachable state, by definition: backward from the goal over the transitions."""
    count, states, moves = kernels.enumerate_states(task.init, task.arrays, len(task.actions), 100_000)
    distance = np.full(count, np.inf)
    distance[[kernels.reached(state, task.arrays) for state in states]] = 0
    for _ in range(count):
        before = distance.copy()
        np.minimum.at(distance, moves[:, 0], distance[moves[:, 2]] + 1)
        if (before == distance).all():
            return states, distance
    raise AssertionError


def greedy(original):
    return lambda task, method, heuristic: original(task, "gbfs", "hff")


@pytest.mark.parametrize("name", ["miconic", "spanner", "forest"])
def test_other_domains_too(name):
    test_breadth_first_and_a_star_with_an_admissible_estimate_find_shortest_plans.__wrapped__(name)


@sabotaged_by("foresight.planning.symbolic.search.search", greedy)
@pytest.mark.parametrize("name", ["gripper"])
def test_breadth_first_and_a_star_with_an_admissible_estimate_find_shortest_plans(name):
    task = TASKS[name]
    _, distance = literal_distances(task)
    for method, heuristic in (("bfs", "blind"), ("astar", "hmax")):
        found = search(task, method, heuristic)
        assert found.status == "solved" and len(found.plan) == distance[0]
        assert validate(task.problem, found.plan).valid
    quick = search(task, "gbfs", "hff")
    assert validate(task.problem, quick.plan).valid and len(quick.plan) >= distance[0]


@pytest.mark.parametrize("name", domains.NAMES)
def test_estimates_keep_their_promises(name):
    """h_max ≤ h* and h_max ≤ h_add; h_FF counts actions of a relaxed plan; all are 0 exactly at the goal."""
    task = TASKS[name]
    states, distance = literal_distances(task)
    s = heuristics.scratch(len(task.atoms), len(task.actions))
    for state, exact in list(zip(states, distance, strict=True))[:60]:
        h_max, h_ff = (f(state, task.arrays, s) for f in (heuristics.h_max, heuristics.h_ff))
        assert h_max <= exact or exact == np.inf
        assert (h_ff == 0) == (h_max == 0) == (exact == 0)
        assert h_max <= h_ff or exact == np.inf


def test_limits_and_unsolvable_problems_are_reported():
    task = ground(domains.of_size("gripper", 6))
    assert search(task, "bfs", max_states=3000).status == "memory"
    domain = domain_from(
        "(define (domain d) (:predicates (p) (q) (r)) (:action a :parameters () :precondition (p) "
        ":effect (and (q) (not (p)))) (:action b :parameters () :precondition (p) :effect (and (r) (not (p)))))"
    )
    both = problem_from("(define (problem x) (:domain d) (:init (p)) (:goal (and (q) (r))))", domain)
    found = search(ground(both), "gbfs")
    assert found.plan is None and found.status == "unsolvable" and ground(both).possible
    for bad, reported in (
        ({"method": "dfs"}, "Unknown search 'dfs'"),
        ({"heuristic": "lmcut"}, "Unknown heuristic 'lmcut'"),
        ({"seconds": 0}, "needs seconds above 0"),
    ):
        with pytest.raises(UserError, match=reported):
            search(task, **bad)


def drops_one(original):
    """A validator that believes everything."""

    def mutant(problem, plan):
        verdict = original(problem, plan)
        return type(verdict)("valid") if verdict.kind == "unmet precondition" else verdict

    return mutant


@pytest.mark.skipif(downward.driver() is None, reason="Fast Downward is not installed")
@sabotaged_by("benchmarks.pddl_semantics.validate", drops_one)
def test_states_and_plans_mean_the_same_to_fast_downward():
    """Of two domains; `benchmarks/pddl_semantics.py` compares 1,000 states and plans of all seven."""
    from benchmarks.pddl_semantics import compare

    for name in ("forest", "spanner"):
        counts = compare(domains.of_size(name, 3), states=6, plans=6, seed=1)
        assert counts["states"] == counts["states_equal"] >= 5
        assert counts["plans"] == counts["plans_equal"] == 6
        assert 0 < counts["plans_valid"] < 6


@pytest.mark.skipif(downward.driver() is None, reason="Fast Downward is not installed")
def test_fast_downward_plans_and_fails_in_words():
    problem = domains.of_size("ferry", 3)
    found = downward.plan(problem)
    assert found.status == "solved" and validate(problem, found.plan).valid
    text = "(define (problem x) (:domain ferry) (:objects c l) (:init (car c) (location l)) (:goal (and (at c l))))"
    assert downward.plan(problem_from(text, problem.domain)).status == "unsolvable"
