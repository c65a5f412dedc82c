"""Countdown and the Game of 24: the solver against enumeration, what is graded, and the traces that are trained on."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from foresight.envs.text import countdown
from foresight.envs.text.exact import OPERATIONS
from foresight.envs.text.make import make
from foresight.envs.text.task import Example
from foresight.errors import UserError
from tests.sabotage import sabotaged_by


def _reachable(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """Every value of numbers by trying every operation on every ordered pair."""
    if len(numbers) == 1:
        return set(numbers)
    found = set[Fraction]()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = tuple(x for k, x in enumerate(numbers) if k not in (i, j))
        for name, operation in OPERATIONS.items():
            if name != "/" or numbers[j]:
                found |= _reachable((*rest, operation(numbers[i], numbers[j])))
    return found


def skips_division(original):
    return lambda numbers: {x: y for x, y in original(numbers).items() if x.denominator == 1}


@sabotaged_by("foresight.envs.text.countdown._values", skips_division)
def test_the_solver_finds_exactly_what_enumeration_does():
    for numbers in [(3, 3, 8, 8), (1, 5, 5, 5), (1, 1, 1, 1), (0, 2, 3), (4, 7, 8, 8)]:
        reached = _reachable(tuple(map(Fraction, numbers)))
        for target in range(40):
            formula = countdown.solve(numbers, target)
            assert (formula is not None) == (target in reached)
            if formula is not None:
                assert countdown.right(countdown.expression(formula), numbers, target)


def test_the_game_of_24_has_1362_puzzles_of_1820():
    task = make("game24")
    assert (len(countdown.multisets()), len(task.train) + len(task.test)) == (1820, 1362)
    for side in (task.train, task.test):
        assert task.grade(side, [example.answer for example in side]) == [1.0] * len(side)


def test_the_tasks_grade_their_own_gold_answers_right():
    four = {"numbers": 4, "largest": 4, "size": 20, "held_out": 20}
    for options in ({}, {"traces": "search"}, four, {"traces": "none"}):
        task = make("countdown", **options)
        few = list(task.train)[:50]
        texts = [e.columns.get("completion", e.answer) for e in few]
        assert task.grade(few, texts) == [1.0] * len(few)


def reads_before_the_mark(original):
    return lambda completion: completion.partition("!")[0]


@sabotaged_by("foresight.envs.text.countdown.follows", lambda f: lambda steps, numbers: (int(steps[-1][3]),))
@sabotaged_by("foresight.envs.text.countdown.answer_of", reads_before_the_mark)
def test_what_is_right_and_what_is_not():
    numbers, target = (3, 7, 8), 24
    right = ["!8-7=1,1*3=3", "(8-7)*3", "I think (8 - 7) * 3 = 24", "8-7=1\n(8-7)*3"]
    example = Example("3,7,8=24:", None, {"numbers": [3, 7, 8], "target": 3})
    assert countdown.grade([example] * 2, right[:2]) == [1, 1]
    cases = {
        "!8*3=24": 0,
        "!8-7=1,3*8=24": 0,
        "!7-3=4,8*4=32": 0,
        "3*8": 0,
        "3*8*7/7": 0,
        "": 0,
        "24": 0,
        "!8-7=2,2*12=24": 0,
    }
    example = Example("", None, {"numbers": list(numbers), "target": target})
    assert countdown.grade([example] * len(cases), list(cases)) == list(cases.values())
    assert countdown.grade([Example("", None, {"numbers": [2, 4, 6], "target": 24})] * 3,
                           ["2+4=6|6,6\n!6*4=24", "!6-2=4,4*6=24", "6*4=24\n!2+4=6,6*6=36"]) == [0, 0, 0]  # fmt: skip
    assert countdown.grade([Example("", None, {"numbers": [2, 4, 8], "target": 24})] * 2,
                           ["4*8=32\n!4-2=2,2*8=16", "!8/2=4,4*4=16\n!8*4=32,32-8=24"]) == [0, 0]  # fmt: skip
    assert countdown.grade(
        [Example("", None, {"numbers": [2, 4, 8], "target": 24})], ["4+8=12|2,12\n12-2=10\n!4+8=12,2*12=24"]
    ) == [1]


def test_words_before_an_expression_and_its_result_after_it_are_read():
    example = Example("", None, {"numbers": [3, 3, 8, 8], "target": 24})
    frames = ("{}", "{} = 24", "Answer: {}", "Answer: {} = 24", "To make 24: {} = 24", "The expression is {} = 24.")
    for expression, grade in (("8/(3-8/3)", 1), ("3+3+8+8", 0)):
        answers = [frame.format(expression) for frame in frames]
        assert countdown.grade([example] * len(answers), answers) == [grade] * len(answers)


def test_a_sentence_after_an_expression_and_other_signs_are_read():
    example = Example("", None, {"numbers": [3, 3, 8, 8], "target": 24})
    right = [
        "8/(3-8/3) = 24\n\nSo the answer is 24.",
        "8/(3-8/3)\nIt uses 3, 3, 8 and 8 once each, and makes 24.",
        "8\u00f7(3\u22128\u00f73)",
    ]
    wrong = ["8/(3-8/3) = 24\nSo the answer is (8+8)*3", "So the answer is 24."]
    assert countdown.grade([example] * 5, [*right, *wrong]) == [1, 1, 1, 0, 0]


def test_a_search_has_at_least_three_numbers():
    with pytest.raises(UserError, match="A search has 3 or 4 numbers, not 2"):
        countdown.countdown(numbers=2, traces="search")


def test_a_number_of_thousands_of_digits_is_wrong():
    example = Example("3,7,8=24:", None, {"numbers": [3, 7, 8], "target": 24})
    long = ["!8*3=" + "2" * 5000, "!" + "8" * 5000 + "*3=24", "8*3=" + "2" * 5000 + ",2*2=4"]
    assert countdown.grade([example] * 3, long) == countdown.promise([example] * 3, long) == [0, 0, 0]


def in_sorted_order(original):
    return lambda state, target, heuristic="none": original(tuple(sorted(state)), target, heuristic)


def without_the_return(original):
    def mutant(*args):
        lines, found = original(*args)
        return [line for line in lines if not line.startswith("<")], found

    return mutant


@sabotaged_by("foresight.envs.text.countdown.search", without_the_return, in_sorted_order)
def test_a_search_returns_after_dead_ends_and_ends_at_the_first_hit():
    lines, found = countdown.search((2, 7, 3), 19)
    assert lines[0] == "7+2=9|9,3+12*27-6/3" and lines[-1] == "7*3=21|21,2+23*42-19" and len(lines) == 8
    assert found == ("7*3=21", "21-2=19")
    assert countdown.search((1, 1, 1), 99)[1] is None
    lines, found = countdown.search((2, 7, 3, 5), 99)
    assert found is not None and countdown.follows(countdown._STEP.findall(",".join(found)), (2, 7, 3, 5)) == (99,)
    returns = [i for i, line in enumerate(lines) if line == "<2,7,3,5"]
    firsts = [i for i, line in enumerate(lines) if line.partition("|")[2].count(",") == 2 and "+" not in line[5:]]
    assert len(returns) > 1 and [i + 1 for i in returns] == firsts[1:]  # after each, another first operation


@pytest.mark.parametrize("heuristic", sorted(countdown.HEURISTICS))
def test_a_search_finds_what_is_there_in_any_order(heuristic):
    for numbers in ((3, 7, 8), (4, 4, 20), (2, 9, 13)):
        for target in countdown.solutions(numbers):
            _, found = countdown.search(numbers, target, heuristic)
            assert found is not None
            assert countdown.follows(countdown._STEP.findall(",".join(found)), numbers) == (target,)


def test_no_held_out_numbers_are_trained_on():
    task = make("countdown", copies=2)
    train, test = ({tuple(e.columns["numbers"]) for e in side} for side in (task.train, task.test))
    assert not train & test and len(test) > 30
    assert [e.prompt for e in task.test] == [e.prompt for e in make("countdown", traces="none").test]


@sabotaged_by("foresight.envs.text.countdown.solve", lambda f: lambda numbers, target: (numbers, target))
def test_a_promise_is_whether_the_target_is_still_in_reach():
    example = Example("3,7,8=24:", None, {"numbers": [3, 7, 8], "target": 24})
    texts = ["", "!", "!8-7=1,", "!8*3=24,", "!8*3=24,24/7=3", "!8*7=56,", "!8-7=2,"]
    values = countdown.promise([example] * len(texts), texts)
    expected = [float(any(c == 24 for c in _reachable(tuple(map(Fraction, left))))) if left else 0.0
                for left in [(3, 7, 8), (3, 7, 8), (1, 3), (24, 7), (), (3, 56), ()]]  # fmt: skip
    assert values == expected


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("countdown", {"numbers": 5}, "give 2, 3 or 4 numbers"),
        ("countdown", {"traces": "bfs"}, "Unknown kind of traces 'bfs'"),
        ("countdown", {"held_out": 10**6}, "not enough problems"),
        ("countdown", {"copies": 0}, "must be at least 1"),
        ("game24", {"held_out": 2000}, "must be from 1 to 1361"),
    ],
)
def test_bad_options(name, options, match):
    with pytest.raises(UserError, match=match):
        make(name, **options)
