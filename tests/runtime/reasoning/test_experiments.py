"""The experiments of the suite `reasoning`: those without a model are run, and the rules of the others are tried."""

from __future__ import annotations

import json
from types import SimpleNamespace

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
    with pytest.raises(UserError, match="reproduce reasoning --only pretrain-countdown-steps"):
        experiments.countdown_models(True, tmp_path / "a.png")


def test_seeds_of_countdown_models_that_are_gone_keep_their_figures(tmp_path, monkeypatch):
    solved = {"pretrain": [1.0, 1.0, 0.0, 0.0], "grpo": [1.0, 0.0, 1.0, 1.0], "dapo": [1.0, 1.0, 1.0, 0.0]}
    trained = {"dapo-countdown-search": [0, 1]}
    monkeypatch.setattr(experiments.reproduce, "root", lambda: tmp_path)
    monkeypatch.setattr(experiments, "make", lambda name, **options: SimpleNamespace(test=[name] * 4))
    monkeypatch.setattr(experiments, "_trained", lambda name: trained.get(name, [0, 2]))
    monkeypatch.setattr(experiments, "_policy", lambda name, seed: name)
    monkeypatch.setattr(experiments, "_greedy", lambda name, task, most: solved[name.partition("-")[0]])
    first = experiments.countdown_models(True, tmp_path / "a.png")
    assert first["seeds"] == [0] and set(first["formerly_unsolved"].values()) == {1.0, 0.5}
    assert first["still_solved"]["grpo-countdown-search"] == 0.5 and first["gain"]["dapo-countdown-search"] == 0.25
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "countdown-models.json").write_text(json.dumps(first))
    for name in first["accuracy"]:
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps({"seeds": [0, 1, 2]}))
    solved["grpo"] = [1.0, 1.0, 1.0, 1.0]
    trained["dapo-countdown-search"] = [2]
    monkeypatch.setattr(experiments, "_trained", lambda name: trained.get(name, [2]))
    both = experiments.countdown_models(True, tmp_path / "a.png")
    assert both["seeds"] == [0, 2]
    assert all(rows["0"] == first["each"][name]["0"] for name, rows in both["each"].items())
    assert both["accuracy"]["grpo-countdown-search"] == pytest.approx((0.75 + 1.0) / 2)
    assert both["gain"]["grpo-countdown-search"] == pytest.approx((0.25 + 0.5) / 2)
    (tmp_path / "results" / "grpo-countdown-steps.json").write_text(json.dumps({"seeds": [2]}))  # a new preset
    assert experiments.countdown_models(True, tmp_path / "a.png")["seeds"] == [2]
    trained["dapo-countdown-search"] = [1]
    with pytest.raises(UserError, match="No seed has all models"):
        experiments.countdown_models(True, tmp_path / "a.png")
    (tmp_path / "results" / "grpo-countdown-steps.json").write_text(json.dumps({"seeds": [0, 2]}))
    (tmp_path / "results" / "countdown-models.json").write_text(json.dumps(both))
    solved["pretrain"], trained["dapo-countdown-search"] = [1.0, 1.0, 1.0, 1.0], []  # trained again, but not by DAPO
    newest = experiments.countdown_models(True, tmp_path / "a.png")
    assert newest["accuracy"]["pretrain-countdown-search"] == pytest.approx((0.5 + 1.0) / 2)
    assert newest["each"]["dapo-countdown-search"] == both["each"]["dapo-countdown-search"]


def test_figures_of_query_time_methods_are_means_over_seeds(tmp_path, monkeypatch):
    accuracy = {0: (0.2, 0.4, 0.9), 2: (0.4, 0.6, 0.5)}
    asked = []

    def think(names, policy, task, questions, most, *, verify, seed, **given):
        asked.append((policy, verify, seed))
        rows = [
            {"method": method, "budget": budget, "accuracy": x, "standard_error": 0.1 * (seed + 1), "requests": 1.0}
            for (method, budget), x in zip(
                (("greedy", 8), ("self_consistency", 64), ("tree_of_thoughts", 64)), accuracy[seed], strict=True
            )
        ]
        rows[2] |= {"any": 1.0, "mean": 0.5}
        return {"task": "t", "rows": rows, "seed": seed, "answer_tokens": 2.0 + seed}, {}, []

    monkeypatch.setattr(experiments.think, "think", think)
    monkeypatch.setattr(experiments.pictures, "curves", lambda *_: None)
    found = experiments._query_time(None, {0: "a", 2: "c"}, {0: "x", 2: "z"}, tmp_path / "p.png", 8, 64)
    assert asked == [("a", "x", 0), ("c", "z", 2)] and found["seeds"] == [0, 2]
    assert found["greedy"] == pytest.approx(0.3) and found["voting"] == pytest.approx(0.5)
    assert found["best_method"] == "tree_of_thoughts" and found["gain"] == pytest.approx(0.4)
    assert found["rows"][1]["each"] == [0.4, 0.6] and found["rows"][1]["standard_error"] == pytest.approx(0.2)
    assert found["answer_tokens"] == 3.0 and found["rows"][2]["any"] == 1.0


def test_rows_of_different_budgets_have_no_mean():
    with pytest.raises(ValueError, match="different methods or budgets"):
        experiments._average([{"method": "beam", "budget": 8}, {"method": "beam", "budget": 16}])


def test_the_mean_of_documents_is_that_of_each_number():
    found = experiments._mean_of_all([{"a": {"b": 1.0, "c": 2.0}, "d": 0.0}, {"a": {"b": 3.0, "c": 2.0}, "d": 1.0}])
    assert found == {"a": {"b": 2.0, "c": 2.0}, "d": 0.5}
