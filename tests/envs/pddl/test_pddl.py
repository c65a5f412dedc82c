"""PDDL: what is read, what is refused and where, what actions do, and which plans are valid."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from foresight.envs.pddl import domains, kernels, make, programs
from foresight.envs.pddl.ground import ground
from foresight.envs.pddl.parse import domain_from, problem_from
from foresight.envs.pddl.task import Action, ground_actions, write_domain, write_problem
from foresight.envs.pddl.validate import read_plan, validate
from foresight.errors import UserError
from foresight.planning.dynamic import bellman
from foresight.planning.symbolic import genplan
from tests.sabotage import sabotaged_by

SMALL = {name: domains.of_size(name, 3) for name in domains.NAMES}
DOMAIN = """(define (domain d) (:requirements :strips :typing)
  (:types a b - thing)
  (:predicates (p ?x - a) (q ?x - thing ?y - b))
  ; a comment
  (:action go :parameters (?x - a ?y - b)
    :precondition (and (p ?x))
    :effect (and (q ?x ?y) (not (p ?x)))))"""


@pytest.mark.parametrize("name", domains.NAMES)
def test_what_is_written_is_read_again(name):
    problem = SMALL[name]
    domain = domain_from(write_domain(problem.domain))
    again = problem_from(write_problem(problem), domain)
    assert domain.actions == problem.domain.actions and domain.predicates == problem.domain.predicates
    assert again.init == problem.init and again.goal == problem.goal and dict(again.objects) == dict(problem.objects)


@pytest.mark.parametrize(
    ("before", "after", "reported"),
    [
        ("(define", "(defin", r"line 1: 'defin'; expected 'define'"),
        ("(domain d)", "(domain)", r"line 1: \(domain\); expected '\(domain NAME\)'"),
        (":typing", ":adl", r"line 1: the requirement \(:adl\) not supported; supported are :strips :typing"),
        ("(and (p ?x))", "(and (r ?x))", r"line 6: Unknown predicate 'r'"),
        ("(and (p ?x))", "(and (p ?z))", r"line 6: '\?z', which is no parameter,; expected one of \?x, \?y"),
        ("(and (p ?x))", "(and (p ?x ?y))", r"line 6: 2 arguments of 'p'; expected 1"),
        ("(and (p ?x))", "(or (p ?x))", r"line 6: disjunctions \(or\) not supported"),
        ("(and (p ?x))", "(forall (?x) (p ?x))", r"line 6: quantifiers \(forall\) not supported"),
        ("(not (p ?x))", "(when (p ?x) (p ?x))", r"line 7: conditional effects \(when\) not supported"),
        ("(not (p ?x))", "(increase (c) 1)", r"line 7: numeric effects \(increase\) not supported"),
        ("(?x - a ?y - b)", "(?x - c)", r"line 5: the type 'c'; expected one of a, b, thing, object"),
        ("a b - thing", "a - a b", r"line 2: the type 'a' below itself; expected types that end at object"),
        ("a b - thing", "c - a b - a\na - b", r"line 2: the type 'b' below itself"),
        (":effect", ":efect", r"line 7: ':efect' in the action go; expected :parameters, :precondition or :effect"),
        ("))))", "))", r"line 7: the file ends inside the '\(' of line 5; expected '\)'"),
        ("))))", "))))\n)", r"line 8: a '\)' without '\('"),
        ("(:predicates", "(:functions (c))(:predicates", r"line 3: functions and costs \(:functions\) not supported"),
    ],
)
def test_an_error_names_the_file_the_line_and_what_was_expected(before, after, reported):
    assert before in DOMAIN
    with pytest.raises(UserError, match="x.pddl, " + reported):
        domain_from(DOMAIN.replace(before, after), "x.pddl")


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("(domain d)", r"\(\(\.\.\.\)\)"),
        ("(p ?x - a)", r"\(\(\.\.\.\)\) in :predicates"),
        ("(and (p ?x))", r"\(\(\.\.\.\)\)"),
        ("thing)", r"types of alternatives \(either\)"),
        ("?x - a ?y", r"\(\(\.\.\.\)\)"),
    ],
)
def test_an_error_shows_nothing_nested(before, found):
    """Lists that are nested thousands deep are an error like any other."""
    with pytest.raises(UserError, match=f"line .: {found}"):
        domain_from(DOMAIN.replace(before, 3_000 * "(" + 3_000 * ")" + before[-1] * (before == "thing)"), 1))


@pytest.mark.parametrize(
    ("init", "goal", "reported"),
    [
        ("(p o1)", "(q o1 o3)", "line 3: 'o3', which is no object,; expected one of o1, o2"),
        ("(p o2)", "(q o1 o2)", "line 2: 'o2' of type b in 'p'; expected an object of type a"),
        ("(not (p o2))", "(q o1 o2)", "line 2: 'o2' of type b in 'p'; expected an object of type a"),
        ("(not (p o1) (p o1))", "(q o1 o2)", "line 2: 'not' of 2 conditions"),
        ("(p o1)", "(exists (?x) (p ?x))", r"line 3: quantifiers \(exists\) not supported"),
    ],
)
def test_errors_of_problems(init, goal, reported):
    text = f"(define (problem x) (:domain d) (:objects o1 - a o2 - b)\n(:init {init})\n(:goal {goal}))"
    with pytest.raises(UserError, match="p.pddl, " + reported):
        problem_from(text, domain_from(DOMAIN), "p.pddl")


def test_a_negated_atom_of_the_initial_state_is_false():
    problem = problem_from(
        "(define (problem z) (:domain d) (:objects o1 - a o2 - b) (:init (p o1) (not (q o1 o2))) (:goal (q o1 o2)))",
        domain_from(DOMAIN),
    )
    assert problem.init == {("p", "o1")} and validate(problem, ["(go o1 o2)"]).valid


@pytest.mark.parametrize("word", ["over", "assign", "decrease", "preference"])
def test_a_predicate_that_is_declared_is_no_keyword(word):
    domain = domain_from(DOMAIN.replace("(p ", f"({word} "))
    problem = problem_from(
        f"(define (problem z) (:domain d) (:objects o1 - a o2 - b) (:init ({word} o1)) (:goal (not ({word} o1))))",
        domain,
    )
    assert domain.actions["go"].positive == ((word, "?x"),) and validate(problem, ["(go o1 o2)"]).valid


PAIRS = """(define (domain d) (:requirements :strips :equality :negative-preconditions)
  (:predicates (free ?x) (joined ?x ?y))
  (:action join :parameters (?x ?y)
    :precondition (and (free ?x) (free ?y) (not (= ?x ?y)))
    :effect (and (joined ?x ?y) (not (free ?x)) (not (free ?y)))))"""


def test_grounding_has_a_time_limit():
    with pytest.raises(UserError, match="gripper-9-9-9 was not grounded within 0 seconds: raise --seconds, or make"):
        make.solvable(domains.of_size("gripper", 9), seconds=0)


def test_equality_is_not_among_the_facts_that_others_get():
    """Fast Downward reads an `=` in :init as the value of a function."""
    text = "(define (problem z) (:domain d) (:objects u v) (:init (free u) (free v)) (:goal (joined u v)))"
    problem = problem_from(text, domain_from(PAIRS))
    assert [a.name for a in ground(problem).actions] == ["(join u v)", "(join v u)"]
    assert "(=" not in write_problem(problem) and "(not (= ?x ?y))" in write_domain(problem.domain)
    assert problem_from(write_problem(problem), problem.domain).init == problem.init
    assert programs.arguments(problem)[1] == [["free", "u"], ["free", "v"]]
    assert "=" not in genplan.abbreviated(problem) and "('free', 'u')" in genplan.instruction(problem)


def test_a_conjunction_may_be_nested_thousands_deep():
    flat, deep = (
        f"(define (problem q) (:domain d) (:objects o - a) (:init (p o)) (:goal {before}(p o){after}))"
        for before, after in (("", ""), (3_000 * "(and ", 3_000 * ")"))
    )
    assert problem_from(deep, domain_from(DOMAIN)).goal == problem_from(flat, domain_from(DOMAIN)).goal


def test_a_goal_may_use_equality():
    text = "(define (problem z) (:domain d) (:objects o1 - a o2 - b) (:init (p o1)) (:goal (and (q o1 o2) (= o1 o1))))"
    problem = problem_from(text, domain_from(DOMAIN))
    assert ground(problem).possible and validate(problem, ["(go o1 o2)"]).valid
    apart = problem_from(text.replace("(= o1 o1)", "(not (= o1 o1))"), problem.domain)
    assert not ground(apart).possible and not validate(apart, ["(go o1 o2)"]).valid


def test_an_atom_that_is_added_and_deleted_is_true():
    action = Action("a", (), (), (), add=(("p",),), delete=(("p",), ("q",)))
    assert action.apply(frozenset({("q",), ("r",)})) == {("p",), ("r",)}


def deletes_nothing(original):
    def mutant(problem):
        task = original(problem)
        return dataclasses.replace(task, arrays=task.arrays._replace(delete_start=0 * task.arrays.delete_start))

    return mutant


@sabotaged_by("foresight.envs.pddl.ground.ground", deletes_nothing)
@pytest.mark.parametrize("name", domains.NAMES)
def test_compiled_successors_are_those_of_the_definition(name):
    """Along a random walk: the same actions are applicable, and they lead to the same states."""
    problem = SMALL[name]
    task = ground(problem)
    everything = list(ground_actions(problem))
    static = {atom for atom in problem.init if atom not in task.atoms}
    out = np.zeros(len(task.actions), np.int32)
    after = np.zeros_like(task.init)
    for bits in kernels.walk(task.init, task.arrays, len(task.actions), 8, 3):
        state = task.state(bits) | static
        expected = {a.name: a.apply(state) for a in everything if a.applicable(state)}
        found = {}
        for i in out[: kernels.applicable(bits, task.arrays, out)]:
            kernels.apply(bits, i, task.arrays, after)
            found[task.actions[i].name] = task.state(after) | static
        assert found == expected


@pytest.mark.parametrize("name", domains.NAMES)
def test_problems_are_solvable_within_the_published_ranges_and_repeat(name):
    (first,), (again,) = domains.tasks(name, 1, 5, domains.TRAIN), domains.tasks(name, 1, 5, domains.TRAIN)
    assert first.init == again.init and first.goal == again.goal
    assert not first.solved(first.init) and ground(first).possible
    assert write_problem(domains.tasks(name, 1, 6, domains.TRAIN)[0]) != write_problem(first)


PLAN = ["(move room1 room0)", "(pick ball0 room0 gripper0)", "(move room0 room1)", "(drop ball0 room1 gripper0)"]
GRIPPER = problem_from(
    """(define (problem g) (:domain gripper) (:objects ball0 room0 room1 gripper0)
    (:init (ball ball0) (room room0) (room room1) (gripper gripper0) (at ball0 room0) (at-robby room1) (free gripper0))
    (:goal (and (at ball0 room1))))""",
    domains.domain("gripper"),
)


def believes_preconditions(original):
    return lambda action, state: True


@sabotaged_by("foresight.envs.pddl.task.Action.applicable", believes_preconditions)
def test_a_plan_is_valid_and_each_mutated_one_is_refused():
    """Every step removed, doubled, swapped with its neighbor, or with another object."""
    assert validate(GRIPPER, PLAN).valid
    mutants = [PLAN[:i] + PLAN[i + 1 :] for i in range(4)]
    mutants += [[*PLAN[:i], PLAN[i + 1], PLAN[i], *PLAN[i + 2 :]] for i in range(3)]
    mutants += [[*PLAN[:i], PLAN[i], *PLAN[i:]] for i in (1, 3)]
    for i, one in itertools.product(range(4), GRIPPER.objects):
        words = PLAN[i].strip("()").split()
        for j in range(1, len(words)):
            if words[j] != one:
                changed = [*words[:j], one, *words[j + 1 :]]
                mutants.append([*PLAN[:i], f"({' '.join(changed)})", *PLAN[i + 1 :]])
    assert len(mutants) > 30
    assert [m for m in mutants if validate(GRIPPER, m).valid] == []


@pytest.mark.parametrize(
    ("plan", "kind", "step", "said"),
    [
        ("(move a b)", "not a plan", 0, "A plan is a list of texts"),
        ([("move", "a")], "not a plan", 0, "A plan is a list"),
        (None, "not a plan", 0, "not None"),
        (["move room1 room0"], "invalid operator", 1, r"a step is '(action object ...)'. The actions are (move ?from"),
        (["(fly room1 room0)"], "invalid operator", 1, "there is no action 'fly'"),
        (["(move room1)"], "invalid operator", 1, "'move' takes 2 objects, not 1"),
        (["(move room1 room7)"], "invalid operator", 1, "there is no object 'room7' for ?to"),
        ([PLAN[1]], "unmet precondition", 1, "(at-robby room0) is false and must be true"),
        (PLAN[:3], "unmet goal", 3, "ends before the goal: (at ball0 room1) is false and must be true"),
        ([], "unmet goal", 0, "The plan of 0 steps"),
    ],
)
def test_a_verdict_names_the_step_and_the_repair(plan, kind, step, said):
    verdict = validate(GRIPPER, plan)
    assert (verdict.kind, verdict.step) == (kind, step) and said in verdict.message


def test_a_negative_precondition_is_advised_and_types_are_checked():
    forest = SMALL["forest"]
    hill = next(a[1] for a in forest.init if a[0] == "hill")
    verdict = validate(forest, [f"(walk {next(a[1] for a in forest.init if a[0] == 'at')} {hill})"])
    assert f"(hill {hill}) is true and must be false" in verdict.advice
    miconic = SMALL["miconic"]
    assert "is a floor, but ?p must be a passenger" in validate(miconic, ["(board f0_b0 f0_b0)"]).message


def test_plan_files():
    assert read_plan("; cost 1\n(a b)\n\n( c )") == ["(a b)", "( c )"]
    with pytest.raises(UserError, match=r"Line 2 of the plan is 'a b'; expected '\(action object"):
        read_plan("(a b)\na b")


@sabotaged_by("foresight.envs.pddl.make.make", lambda original: lambda name, **o: original(name, step_reward=-2.0))
def test_the_value_of_a_problem_is_minus_the_length_of_a_shortest_plan():
    mdp = make.make("pddl:gripper-2")
    sweeps = bellman.Sweeps(mdp, 1.0)
    values, policy = mdp.start * 0, (mdp.start * 0).long()
    for _ in range(20):
        values, policy, _ = sweeps.improve(values, policy)
    assert mdp.states > 20
    assert float(values[0]) == -6.0  # there, two picks, back, two drops
    assert mdp.action_names[int(policy[0])].startswith("(")


def test_dead_ends_wait_and_bad_names_are_refused():
    mdp = make.make("pddl:forest-3")
    assert mdp.action_names[-1] == "wait"  # in the water
    for name, reported in (
        ("gripper", "'gripper' is no PDDL problem: write DOMAIN-SIZE"),
        ("griper-3", "Unknown domain 'griper'. Did you mean 'gripper'"),
        ("gripper-1", "must be at least 2, not 1"),
        ("forest-1000000", "must be at most 1,000, not 1,000,000"),
        ("a.pddl", "must name two files"),
        ("a.pddl,b.pddl", "Cannot read"),
    ):
        with pytest.raises(UserError, match=reported):
            make.problem(f"pddl:{name}")
    with pytest.raises(UserError, match="more than 10 states: choose a smaller problem"):
        make.make("pddl:gripper-3", max_states=10)


def test_a_goal_that_is_true_or_out_of_reach_is_refused(tmp_path):
    (tmp_path / "d.pddl").write_text(DOMAIN)
    for goal, reported in (("(p o1)", "is true in its initial state: the empty plan"), ("(p o2)", "can never become")):
        text = f"(define (problem x) (:domain d) (:objects o1 o2 - a o3 - b) (:init (p o1)) (:goal {goal}))"
        (tmp_path / "p.pddl").write_text(text)
        with pytest.raises(UserError, match=reported):
            make.make(f"pddl:{tmp_path}/d.pddl,{tmp_path}/p.pddl")
