"""A result names the command that makes all of it: benchmarks that add to a file name what the file holds."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _language
from foresight.runtime.config import resolve

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def made(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def test_miniwob_names_its_options_and_the_seeds_of_the_file() -> None:
    space = made("miniwob")
    assert space["command"]({**space["DEFAULTS"], "demonstrations": 1}, [0, 1, 2]) == (
        "python benchmarks/miniwob.py --demonstrations 1 --seeds 0 1 2"
    )
    assert space["command"](space["DEFAULTS"], [0]) == "python benchmarks/miniwob.py --seeds 0"


def test_planners_keep_seeds_of_as_many_episodes() -> None:
    space = made("planners")
    ten, two = ({"cem_returns": [1.0] * n, "cem": 1.0, "random_shooting": 0.5, "random": 0.0} for n in (10, 2))
    known = {"BallInCupCatch-v1": {"runs": {"0": ten, "1": two}}, "CartpoleSwingup-v1": {"runs": {"0": two}}}
    assert space["kept"]({**known, "seconds": 3.0, "machine": {}}, 10) == {"BallInCupCatch-v1": {"0": ten}}
    assert space["command"](known, 10, [0]) == (
        "python benchmarks/planners.py CartpoleSwingup-v1 BallInCupCatch-v1 --seeds 0"
    )
    assert (
        space["command"](reversed(space["TASKS"]), 2, [0, 1])
        == "python benchmarks/planners.py --episodes 2 --seeds 0 1"
    )


def test_planners_are_compared_by_their_means_over_seeds() -> None:
    rows = {"0": {"cem": 3.0, "random_shooting": 5.0}, "1": {"cem": 9.0, "random_shooting": 5.0, "cem_by_best": 1.0}}
    found = made("planners")["combined"](rows)
    assert found["cem"] == 6 and found["cem_minus_random_shooting"] == 1 and found["cem_is_better"] is True
    assert found["runs"] == rows and "cem_by_best" not in found  # of one seed alone


def test_critics_are_compared_on_the_seeds_of_equal_runs(monkeypatch: Any, tmp_path: Path) -> None:
    space = made("compare_mtp")
    given = argparse.Namespace(updates=32, every=8, arms=list(space["MAIN"]))
    assert space["command"](given, [], [0, 1]) == "python benchmarks/compare_mtp.py --updates 32 --every 8 --seeds 0 1"
    file = tmp_path / "found.json"
    monkeypatch.setitem(space["kept"].__globals__, "FILE", file)
    assert space["kept"](given, []) == {}
    runs = {"grpo": {"0": {"tokens": 1}}}
    file.write_text(json.dumps({"command": space["command"](given, [], [0]), "seeds": [0], "runs": runs}))
    assert space["kept"](given, []) == runs and space["kept"](given, ["--lora", "8"]) == {}
    given.updates = 64
    assert space["kept"](given, []) == {}


def test_a_finished_run_stands_only_for_its_own_settings(tmp_path: Path) -> None:
    given = ["grpo", "--preset", "smollm2-addition", "--seed", "0"]
    wanted = resolve.resolve("grpo", preset="smollm2-addition", given={"seed": 0})
    (tmp_path / "config.yaml").write_text(json.dumps(wanted.document()))
    (tmp_path / "summary.json").write_text("{}")
    _language.train(tmp_path, [*given, "--evaluate-every", "8"])  # not a setting of what is trained
    with pytest.raises(SystemExit, match="was trained with another learning_rate: choose another --runs"):
        _language.train(tmp_path, [*given, "--learning-rate", "1e-5"])


def test_the_stack_keeps_rows_of_as_many_errands() -> None:
    space = made("stack")
    given = {"episodes": 200, **{kind: str(space["RUNS"] / name) for kind, name in space["TRAINED"].items()}}
    rows = {name: {"episodes": 200} for name in space["rows"]()}
    assert set(space["kept"](rows, 200)) == set(rows) and space["kept"](rows, 20) == {}
    assert space["command"](given, rows) == "python benchmarks/stack.py"
    some = {**given, "episodes": 20, "control": "runs/mine"}
    assert space["command"](some, ["script", "learned"]) == (
        "python benchmarks/stack.py --episodes 20 --rows learned script --control runs/mine"
    )


def test_the_axes_of_a_vla_keep_runs_of_as_many_episodes() -> None:
    space = made("vla_axes")
    known = {"episodes": 200, "vla-BabyAI": {"each_seed": {}}, "seconds": 1.0}
    assert list(space["kept"](known, 200)) == ["vla-BabyAI"] and space["kept"](known, 50) == {}
    assert space["command"](space["NAMES"], 50) == "python benchmarks/vla_axes.py --episodes 50"
    assert space["command"](["vla-BabyAI"], 200) == "python benchmarks/vla_axes.py --only vla-BabyAI"


def test_miniwob_of_smollm2_adds_to_figures_of_as_many_episodes() -> None:
    space = made("miniwob_smollm2")
    known = {"episodes": 200, "seeds": [0], **{name: {} for name in space["NAMES"]}}
    assert space["others"](known, ["ppo"], 200, 0) == known and space["others"](known, space["NAMES"], 20, 1) == {}
    for episodes, seed, file, reason in (
        (20, 0, known, "200 episodes"),
        (200, 1, known, "seed 0"),
        (200, 0, {}, "not there"),
    ):
        with pytest.raises(SystemExit, match=reason):
            space["others"](file, ["ppo"], episodes, seed)
    assert space["command"](200, 0) == "python benchmarks/miniwob_smollm2.py"
    assert space["command"](20, 1) == "python benchmarks/miniwob_smollm2.py --episodes 20 --seed 1"


def test_board_games_name_the_seeds_of_the_file() -> None:
    command = made("board_games")["command"]
    start = "python benchmarks/board_games.py tic_tac_toe muzero"
    assert command(["tic_tac_toe", "muzero", "--seeds", "0", "1", "2", "--more"], [0, 1]) == f"{start} --seeds 0 1"
    assert command(["tic_tac_toe", "muzero", "--more", "--minutes", "3"], [0]) == f"{start} --minutes 3"


@pytest.mark.parametrize(
    ("elo", "low", "wanted"),
    [((0, 5, 6), (0, -58, -57), False), ((0, 5, 90), (0, -58, 27), True), ((0, 95, 90), (0, 30, 27), False)],
)
def test_an_elo_rises_if_the_last_checkpoint_is_above_the_first(elo: Any, low: Any, wanted: bool) -> None:
    rows = [{"elo": x, "elo_low": y} for x, y in zip(elo, low, strict=True)]
    assert made("board_games")["rises"](rows) is wanted


def test_live_learning_names_the_modes_seeds_and_settings_of_the_file() -> None:
    space = made("live_learning")
    mode = {**space["DEFAULTS"], "rehearsal": 0.3, "runs": {"0": {}, "1": {}}}
    start = "python benchmarks/live_learning.py --modes"
    both = {"seconds": 1.0, "both": mode, "evaluative": mode}
    assert space["command"](both) == f"{start} evaluative both --seeds 0 1 --rehearsal 0.3"
    other = {**both, "both": {**mode, "hint_top_k": 50, "runs": {"0": {}}}}
    assert space["command"](other) == (
        f"{start} evaluative --seeds 0 1 --rehearsal 0.3 && {start} both --seeds 0 --rehearsal 0.3 --hint-top-k 50"
    )


def test_an_accelerator_is_needed_and_its_options_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    space = made("accelerator")
    monkeypatch.setattr("sys.argv", ["accelerator.py", "--seconds", "0", "--out", str(tmp_path / "a.json")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        space["main"]()
    assert not (tmp_path / "a.json").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setitem(space["main"].__globals__, "updates", lambda name, fields: {})
    space["main"]()
    assert (
        f'"command": "python benchmarks/accelerator.py --seconds 0 --out {tmp_path}'
        in (tmp_path / "a.json").read_text()
    )


def test_the_peak_of_memory_is_that_of_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    calls: list[str] = []
    space = made("accelerator")
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))

    def stop(*given: Any) -> Any:
        calls.append("built")
        raise KeyboardInterrupt

    monkeypatch.setitem(space["updates"].__globals__, "built", stop)
    monkeypatch.setitem(space["updates"].__globals__, "config_of", stop)
    for measure in (lambda: space["updates"]("storm", {}), lambda: space["training"]("storm", "Pong", 1.0)):
        with pytest.raises(KeyboardInterrupt):
            measure()
        assert calls == ["empty_cache", "reset_peak_memory_stats", "built"]
        calls.clear()
