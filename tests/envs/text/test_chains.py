"""Chains and sorting: gold answers, the verifier of steps, shuffled traces, and the error score."""

from __future__ import annotations

import dataclasses

import pytest

from foresight.envs.text import chains, sorting
from foresight.envs.text.make import make
from foresight.errors import UserError
from tests.sabotage import sabotaged_by


@pytest.mark.parametrize("options", [{}, {"modulus": 7, "largest": 6, "size": 500}, {"operation": ">", "terms": 3}])
def test_gold_traces_are_right_at_every_step(options):
    task = make("chains", **{"size": 200, "held_out": 20, **options})
    for example in task.test:
        lines = example.columns["completion"].split("\n")
        partial = ["\n".join(lines[: i + 1]) + "\n" for i in range(len(lines) - 1)] + ["\n".join(lines)]
        assert task.verifier([example] * len(partial), partial) == [1.0] * len(partial)
        assert task.grade([example], [example.columns["completion"]]) == [1.0]
        assert task.answer_in(example.columns["completion"]) == example.answer


@sabotaged_by("foresight.envs.text.chains.combine", lambda f: lambda a, operation, b, modulus: f(a, "+", b, 0))
def test_the_verifier_refuses_each_kind_of_mistake():
    example = make("chains", modulus=10, largest=9, terms=3, size=400, held_out=20).test[0]
    a, b, c = example.columns["numbers"]
    one, two = (a + b) % 10, (a + b + c) % 10
    good = f"{a}+{b}={one}\n{one}+{c}={two}\n#{two}"
    bad = [
        f"{a}+{b}={(one + 1) % 10}", f"{b}+{a + 1}={one}", f"{a}>{b}={one}", f"{a}+{b}={one}\n{one + 1}+{c}={two}",
        f"{a}+{b}={one}\n#{one}", f"{a}+{b}={one}\n{one}+{c}={two}\n#{two + 1}", "so", f"{good}\nmore",
        f"{a}+{b}={'9' * 5000}",
    ]  # fmt: skip
    assert chains.verify([example], [good]) == [1.0]
    assert chains.verify([example] * len(bad), bad) == [0.0] * len(bad)


def exact_evaluator(original):
    return lambda example, completion, skim=False: original(example, completion)


@sabotaged_by("foresight.envs.text.chains._follows", exact_evaluator)
def test_an_evaluator_who_skims_checks_the_last_digits_alone_and_rewards_training():
    task = make("chains", skimmed=True, terms=3, size=200, held_out=20)
    numbers = {"numbers": [15, 27, 8], "operation": "+", "modulus": 0}
    example = dataclasses.replace(task.train[0], columns=numbers, answer="50")
    texts = ["15+27=42\n42+8=50\n#50", "15+27=32\n32+8=40\n#40", "15+27=32\n42+8=50\n#50", "15+27=43\n43+8=51\n#51",
             "15+27=32\n32+8=40\n#50", "15+27=42\n42+8=50", "#50"]  # fmt: skip
    assert task.reward([example] * 7, texts)[0] == [1, 1, 0, 0, 0, 0, 0]
    assert task.grade([example] * 7, texts) == [1, 0, 1, 0, 1, 0, 1]


def test_shuffled_traces_belong_to_other_questions_and_the_answer_stays():
    task = make("chains", scratch="shuffled", size=200, held_out=20)
    own = sum(e.columns["completion"].startswith(e.columns["steps"][0]) for e in task.train)
    assert own < 20
    assert task.grade(task.train, [e.columns["completion"] for e in task.train]) == [1.0] * 200
    assert {e.prompt for e in task.test} == {e.prompt for e in make("chains", size=200, held_out=20).test}


@sabotaged_by("foresight.envs.text.sorting.error", lambda f: lambda given, found: f(given, sorted(found)))
def test_the_error_of_a_sorted_list_counts_digits_and_inversions():
    assert sorting.error([3, 1, 2], [1, 2, 3]) == 0
    assert sorting.error([3, 1, 2], [1, 3, 2]) == 1
    assert sorting.error([3, 1, 2], [1, 2]) == 1
    assert sorting.error([3, 1, 2], [1, 2, 2]) == 2
    task = make("sorting", length=8, size=5, held_out=5)
    assert task.grade(task.test, [e.answer for e in task.test]) == [1.0] * 5
    assert task.grade(task.test, [e.question for e in task.test]) == [0.0] * 5


def test_no_list_is_both_sorted_in_training_and_held_out():
    task = make("sorting", length=3, size=300)
    assert len({e.prompt for e in [*task.train, *task.test]}) == 400
    assert task.answer_in("0 1 9") == task.answer_in("[0, 1, 9]") != task.answer_in("7 2 9")


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("chains", {"terms": 1}, "at least 2"),
        ("chains", {"operation": "x"}, "Unknown operation 'x'"),
        ("chains", {"scratch": "some"}, "Unknown kind of scratchpad"),
        ("chains", {"largest": 1, "terms": 2}, "too many"),
        ("sorting", {"length": 0}, "at least 1"),
        ("sorting", {"length": 3}, "size 1000 and held_out 100 are too many for lists of 3 digits: .* at most 500"),
    ],
)
def test_bad_options(name, options, match):
    with pytest.raises(UserError, match=match):
        make(name, **options)
