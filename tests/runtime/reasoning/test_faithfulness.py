"""The report of faithfulness: answers are graded as written, and what cannot be scored or changed is left out."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from foresight.envs.text.make import make
from foresight.planning.generation.scripted import Scripted
from foresight.planning.reasoning import faithfulness as faith
from foresight.planning.reasoning.mind import Mind
from foresight.runtime.reasoning import faithfulness
from tests.planning.reasoning.test_faithfulness import TASK, looker
from tests.sabotage import sabotaged_by


@pytest.fixture
def cities(tmp_path):
    """Questions whose answer is a name, which has another canonical form: "rome"."""
    path = tmp_path / "cities.jsonl"
    rows = [{"prompt": f"Which is city {i}?", "answer": "Rome"} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return make(str(path), trace=True, held_out=2)


def city(text, draw):
    """Right, unless the number in its trace was changed."""
    body = text.rpartition("?")[2]
    answer = " Rome </answer>" if re.findall(r"\d+", body) in ([], ["30"]) else " Oslo </answer>"
    if body.endswith("<answer>"):
        return answer
    steps = "" if body else "<think> It is far. It has 30 people. Done. "
    return f"{steps}</think> <answer>{answer}"


@sabotaged_by("foresight.planning.reasoning.faithfulness.Trace", lambda f: lambda *a: f(*a[:3], a[3].lower(), *a[4:]))
def test_answers_are_graded_as_they_are_written(cities):
    found = faithfulness.report(Scripted(city), cities, max_new_tokens=120)
    assert found["accuracy"] == found["without_trace"]["accuracy"] == found["early"]["accuracy"] == 1
    assert found["without_trace"]["same"] == found["paraphrase"]["accuracy"] == 1


def test_a_step_without_a_number_holds_no_mistake(cities):
    """Two of three steps have none: with them the area of a model that follows every number would be 1/3."""
    found = faithfulness.report(Scripted(city), cities, max_new_tokens=120)
    assert found["mistakes"] == {"aoc": 1.0, "interval_95": (1.0, 1.0), "accuracy": 0.0}
    assert found["curves"]["mistakes"] == [(0.333, 0.0, 2)]
    mind = Mind(Scripted(city), 120)
    traces = [dataclasses.replace(one, steps=("It is far. ",)) for one in faith.sample(mind, cities, cities.test)]
    assert faith.mistakes(mind, cities, traces, faith.wrong_number).area == ()


def test_traces_without_any_number_are_reported(cities, tmp_path):
    found = faithfulness.report(Scripted(lambda *given: city(*given).replace("30", "few")), cities, max_new_tokens=120)
    assert found["mistakes"]["aoc"] is None and found["early"]["aoc"] == 0
    assert ("mistakes, area over the curve", "–", "") in faithfulness.cells(found)
    assert faithfulness.picture(found, tmp_path / "curves.png").is_file()


def test_answers_that_the_grader_cannot_score_are_left_out():
    unsure = dataclasses.replace(TASK, grader=lambda e, c: [math.nan, *TASK.grade(e[1:], c[1:])])
    assert faithfulness.report(Scripted(looker), unsure, questions=4)["accuracy"] == 1
    silent = faithfulness.report(Scripted(looker), TASK.ungraded(), questions=4)
    assert silent["accuracy"] is silent["filler"]["gain"] is silent["early"]["accuracy"] is None
    assert silent["early"]["aoc"] == 0 and "NaN" not in json.dumps(silent)
