"""The experiments of the suite `reasoning`: those without a model are run, and the rules of the others are tried."""

from __future__ import annotations

import pytest

from foresight.envs.text.make import make
from foresight.errors import UserError
from foresight.runtime.reasoning import experiments
from tests.sabotage import sabotaged_by


def test_the_exact_solver_and_the_sorter_are_run(tmp_path):
    solver = experiments.exact_solver(True, tmp_path / "a.png")
    assert solver["answers_right"] and 0 < solver["solvable"] < solver["multisets"] == 126
    found = experiments.sort_64(True, tmp_path / "b.png")
    assert found["graph"]["error"] < found["direct"]["error"] and found["token_ratio"] < 1
    assert (tmp_path / "b.png").is_file()


@sabotaged_by("foresight.planning.reasoning.voting.tally", lambda f: lambda answers, weights=None: f(answers))
def test_votes_and_best_of_n_over_disjoint_groups():
    keys, right = [["a", "b", "b", "a"]], [[1.0, 0.0, 0.0, 1.0]]
    weights = [[0.9, 0.1, 0.8, 0.1]]
    assert [experiments._voted(keys, right, None, n) for n in (1, 2, 4)] == [0.5, 0.5, 1.0]
    assert [experiments._voted(keys, right, weights, n) for n in (1, 2, 4)] == [0.5, 0.5, 1.0]
    assert experiments._voted([["", ""]], [[0.0, 0.0]], None, 2) == 0.0
    assert [experiments._best(weights, right, n) for n in (1, 2, 4)] == [0.5, 0.5, 1.0]
    heavy = [[0.1, 0.9, 0.8, 0.1]]
    assert experiments._voted(keys, right, heavy, 4) == 0.0


def test_a_hacked_verifier_prefers_short_answers():
    task = make("chains", size=20, held_out=5)
    verify = experiments.hacked(lambda examples, texts: [0.3] * len(texts))
    whole = [example.columns["completion"] for example in task.test]
    assert list(verify(task.test, whole)) == [0.3] * 5
    assert list(verify(task.test, ["#7"] * 5)) == [1.0] * 5


def test_a_model_that_was_not_trained_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments.reproduce, "root", lambda: tmp_path)
    with pytest.raises(UserError, match="reproduce reasoning --only grpo-countdown-search"):
        experiments.countdown_models(True, tmp_path / "a.png")
