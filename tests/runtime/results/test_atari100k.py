"""Atari 100k: human-normalized scores, the rows of the 26 games, and what a run of some of them writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foresight.errors import UserError
from foresight.runtime import catalog
from foresight.runtime.results import atari100k, reproduce, results, row_settings, suites
from tests.sabotage import sabotaged_by, scaled


@sabotaged_by("foresight.runtime.results.atari100k.normalized", scaled(1.01))
def test_published_runs_have_the_published_aggregate() -> None:
    """STORM's repository: 1.222 mean, 0.425 median, 0.561 interquartile mean, 9 games above a person."""
    found = atari100k.aggregate({game: facts["storm"] for game, facts in atari100k.games().items()})
    assert (found["games"], found["superhuman"]) == (26, 9)
    assert found["mean"] == pytest.approx(1.222, abs=5e-4) and found["median"] == pytest.approx(0.425, abs=5e-4)
    assert found["interquartile_mean"] == pytest.approx(0.561, abs=5e-4)
    for key in ("mean", "median", "interquartile_mean"):
        low, high = found[f"{key}_interval_95"]
        assert low < found[key] < high


def test_one_run_a_game_has_no_interval() -> None:
    assert "mean_interval_95" not in atari100k.aggregate({"Pong": [14.6], "Boxing": [0.1]})
    assert atari100k.aggregate({"Pong": [14.6], "Boxing": [0.1]})["mean"] == 0.5
    assert atari100k.normalized("Pong", -20.7) == 0


def test_every_game_is_a_row_with_its_own_environment() -> None:
    suite = suites.suites()["atari100k"]
    rows = {row.result: row for row in suite.runs}
    assert len(rows) == len(suite.runs) == 26 * len({(row.algorithm, row.preset) for row in suite.runs})
    assert rows["dreamer-atari100k-Pong"].env == "ALE/Pong-v5" and rows["dreamer-atari100k-Hero"].budget == 100_000
    chosen = reproduce.chosen("atari100k", games=("Pong", "Boxing"))
    assert {row.env for row in chosen if isinstance(row, suites.Trained)} == {"ALE/Pong-v5", "ALE/Boxing-v5"}


@pytest.mark.parametrize(
    ("suite", "games", "message"),
    [("atari100k", ("Pongg",), "Did you mean 'Pong'"), ("search", ("Pong",), "no suite of Atari games")],
)
def test_games_that_do_not_exist_are_refused(suite: str, games: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        reproduce.chosen(suite, games=games)


def test_each_game_is_trained_and_the_aggregate_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def one(name, preset, seed, out, episodes, steps, show, env=None, **fields):
        trained.append((env, seed))
        score = {"mean": 0.1 if env == "ALE/Boxing-v5" else 14.6, "metric": "return", "n": 20}
        return {"seed": seed, "steps": 100_000, "unit": "env steps", "evaluation": score, "baseline": score,
                "seconds": 60.0, "versions": {}, "machine": {}}  # fmt: skip

    monkeypatch.setattr(reproduce, "one", one)
    monkeypatch.setattr(reproduce, "last", lambda *_: {})
    files = reproduce.reproduce("atari100k", tmp_path, seeds=2, games=("Pong", "Boxing"), only=())
    assert {env for env, _ in trained} == {"ALE/Pong-v5", "ALE/Boxing-v5"} and {seed for _, seed in trained} == {0, 1}
    found = json.loads((tmp_path / "dreamer-atari100k.json").read_text())
    assert tmp_path / "dreamer-atari100k.json" in files
    assert found["mean"] == 0.5 and found["scores"]["Boxing"] == [0.1, 0.1] and found["games"] == 2
    assert found["published"]["games"] == 2
    rows = [row for row in results.gather(tmp_path) if row.suite == "atari100k" and row.value is not None]
    assert {row.task for row in rows if row.algorithm == "dreamer"} == {
        "atari100k ALE/Boxing-v5", "atari100k ALE/Pong-v5"
    }  # fmt: skip
    assert json.loads((tmp_path / "dreamer-atari100k-Pong.json").read_text())["env"] == "ALE/Pong-v5"


def test_a_quick_run_makes_updates_and_evaluates_little() -> None:
    rows = {row.result: row for row in suites.suites()["atari100k"].runs}
    for name, starts in (("dreamer-atari100k-Pong", 1_024), ("storm-atari100k-Pong", 1_024)):
        found = row_settings.settings_of(rows[name], quick=True)
        assert found["learning_starts"] == starts < found["steps"] == 1_034
        # DreamerV3 replays 128 rows a step, in updates of 1,024: learning starts with the row of step 1,024 itself.
        assert (found["steps"] - starts + 1) * found.get("train_ratio", 1_024) >= 1_024
        assert found["evaluation_episodes"] == 2
        assert row_settings.settings_of(rows[name])["evaluation_episodes"] == 20


def test_each_algorithm_has_its_protocol() -> None:
    rows = {row.result: row for row in suites.suites()["atari100k"].runs}
    options = {
        name: row_settings.settings_of(rows[f"{name}-atari100k-Boxing"])["env_options"] for name in ("dreamer", "storm")
    }
    for found in options.values():
        assert (found["image_size"], found["gray"], found["frame_stack"], found["fire_reset"]) == (64, False, 1, False)
        assert found["clip_reward"] is False  # both papers: the reward is compressed by symlog
    assert catalog.presets("storm")["ALE/Pong-v5"]["env_options"]["clip_reward"] is False
    sticky = [options[name]["repeat_action_probability"] for name in ("dreamer", "storm")]
    assert sticky == [0.0, 0.25]
    assert [options[name]["episodic_life"] for name in ("dreamer", "storm")] == [False, True]
