"""Rows of `foresight think` where a reward function scores some of the answers, or has another scale."""

from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure

from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.planning.reasoning.mind import Answer, Charge, Result
from foresight.planning.reasoning.tree import ThoughtTree
from foresight.runtime.reasoning import pictures, think
from tests.sabotage import sabotaged_by

GRADES = {"good": 1.0, "bad": 0.0, "odd": math.nan}
EXAMPLES = [Example(f"{i}?") for i in range(3)]
TASK = TextTask("t", EXAMPLES, EXAMPLES, lambda examples, completions: [GRADES[c] for c in completions])


def results(*groups):
    """Answers, each the first of its candidates."""
    return [Result(Answer(few[0], tuple((x, 1.0) for x in few), ThoughtTree("?")), Charge()) for few in groups]


@sabotaged_by("foresight.envs.text.graders.scored", lambda f: lambda grades: [0.0, *f(grades)])
def test_answers_that_cannot_be_scored_are_left_out():
    found = think.row("m", 8, TASK, EXAMPLES, results(["good", "odd", "bad"], ["odd", "odd"], ["bad", "odd"]))
    assert found["accuracy"] == 0.5 and found["standard_error"] == pytest.approx(0.5 / 2**0.5)
    assert found["any"] == 0.5 and found["mean"] == 0.25  # of the two questions with a score
    few = [{"results": []}]
    think._show(few, "m", 8, TASK, EXAMPLES, results(["odd", "good"]))
    assert few[0]["results"][0]["reward"] is None
    assert [vote["reward"] for vote in few[0]["results"][0]["votes"]] == [None, 1.0]


def test_a_method_without_any_score_is_named():
    with pytest.raises(UserError, match="The grader of 't' can score none of the 3 answers of m: let the reward"):
        think.row("m", 8, TASK, EXAMPLES, results(["odd"], ["odd"], ["odd"]))


@pytest.mark.parametrize(("accuracy", "inside"), [(0.4, True), (7.5, False), (-2.0, False)])
def test_curves_of_another_scale_are_seen(tmp_path, monkeypatch, accuracy, inside):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: drawn.append(self.axes[0].get_ylim()))
    row = {"method": "m", "sampled_tokens": 8, "accuracy": accuracy, "standard_error": 0.1}
    pictures.curves([row], "?", tmp_path / "x.png")
    low, high = drawn[0]
    assert low < accuracy < high and ((low, high) == (0, 1)) == inside
