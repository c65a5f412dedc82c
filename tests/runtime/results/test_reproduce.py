"""`foresight reproduce`: suites that exist, runs that are read again, files that tell how they were made."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foresight.errors import UserError
from foresight.runtime import bench, catalog
from foresight.runtime.monitoring import log
from foresight.runtime.results import reproduce, results, row_settings, suites, sutton_barto
from foresight.training.options import field_types
from tests.cli.conftest import call as call  # the command line as a fixture

CORRIDOR = suites.Experiment("foresight.runtime.results.sutton_barto:short_corridor", "short-corridor")


COMMANDS = {"pddl", "genplan", "live"}  # what is measured is no algorithm with a file of its own


def test_every_suite_names_what_exists() -> None:
    found = reproduce.suites()
    assert {"sutton-barto", "model-free"} <= set(found)
    for suite in found.values():
        assert suite.title and suite.experiments + suite.runs
        rows = suite.rows()
        assert len(rows) == len(suite.experiments + suite.runs), "two rows of one name"
        for target in [run.target for run in suite.runs] + [x.target for one in suite.experiments for x in one.figures]:
            known = {"baseline": 1.0, **{run.result: 1.0 for run in suite.runs}}
            assert target is None or suites.met(target, 1.0, known) is not None, target
        for one in suite.experiments:
            assert {figure.algorithm for figure in one.figures} <= {*catalog.algorithms(), *COMMANDS}
            if not one.run:
                continue
            if one.is_command:
                first, second, *rest = one.run.split()
                if first == "foresight":
                    assert second == "bench" and rest[0] in bench.benchmarks()
                else:
                    script = (reproduce.root() / second).read_text(encoding="utf-8")
                    assert first == "python" and all(f'"{x}"' in script for x in rest if x.startswith("--")), one.run
                continue
            module, _, function = one.run.partition(":")
            assert callable(getattr(importlib.import_module(module), function)), one.run
        for run in suite.runs:
            assert run.preset in catalog.presets(run.algorithm), run
            assert run.seeds >= 1
            fields = set(field_types(catalog.config_class(run.algorithm)))
            assert set(run.options) <= fields | {"env_options"}
            for needed in run.needs:  # what it makes is what the preset reads
                data = catalog.presets(run.algorithm)[run.preset]["data"]
                assert str(suites.made_by(needed)) in ([data] if isinstance(data, str) else data)


def test_mistakes_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'sutton-barto'"):
        reproduce.reproduce("sutton-bartho")
    with pytest.raises(UserError, match="--seeds must be at least 1, not -1"):
        reproduce.reproduce("model-free", tmp_path / "out", seeds=-1)
    wrong = tmp_path / "suites.yaml"
    for text, match in (
        ("runs: [{algorithm: ppo, presets: y}]", "a run of 'x' is wrong"),
        ("runs: [{algorithm: ppo, preset: y, target: about 3}]", "target 'about 3'"),
        ("runs: [{algorithm: ppo, preset: y, target: 475}]", "target '475'"),
        ("experiments: [{run: python a.py}]", "must name its result"),
    ):
        wrong.write_text(f"x: {{title: t, {text}}}")
        with pytest.raises(UserError, match=match):
            reproduce.suites(wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Choose another --out"):
        reproduce.reproduce("sutton-barto", tmp_path / "file" / "below", quick=True)


def test_a_suite_is_run_and_its_presets_are_read_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = (suites.Trained("sarsa", "CliffWalking-v1", seeds=2),)
    suite = suites.Suite("small", "t", (CORRIDOR,), runs)
    monkeypatch.setattr(reproduce, "suites", lambda: {"small": suite})
    reported: list[str] = []
    files = reproduce.reproduce("small", tmp_path, report=reported.append)
    assert [file.name for file in files] == ["short-corridor.json", "short-corridor.png", "sarsa-CliffWalking-v1.json"]
    assert reported[0] == "short-corridor" and len(reported) == 4
    corridor, trained = (json.loads(files[i].read_text()) for i in (0, 2))
    for document in (corridor, trained):
        assert {"what", "command", "seeds", "versions", "machine", "seconds"} <= set(document)
        assert document["command"] == "foresight reproduce small"
    assert files[1].read_bytes()[1:4] == b"PNG"
    assert corridor["best_probability"] == pytest.approx(2 - 2**0.5, abs=1e-6)
    assert corridor["best_value"] == pytest.approx(corridor["published"]["best_value"], abs=1e-3)
    assert trained["seeds"] == [0, 1] and trained["iqm"] >= -17 > trained["baseline"]
    shown = [row["return"] for row in log.read(tmp_path / "runs" / "sarsa-CliffWalking-v1-0") if "return" in row]
    assert trained["runs"][0]["last"]["return"] == pytest.approx(statistics.fmean(shown[-math.ceil(len(shown) / 10) :]))
    made = (tmp_path / "runs" / "sarsa-CliffWalking-v1-0" / "summary.json").stat().st_mtime_ns
    reproduce.reproduce("small", tmp_path)
    assert (tmp_path / "runs" / "sarsa-CliffWalking-v1-0" / "summary.json").stat().st_mtime_ns == made


def test_a_run_of_other_settings_is_kept_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(seed: int = 0, steps: int = 40, **fields: Any) -> dict[str, Any]:
        return reproduce.one("sarsa", "CliffWalking-v1", seed, tmp_path / "run", 2, steps, False, **fields)

    first = made()
    assert made() == first  # read again
    assert made(epsilon=0.3) != first
    assert "epsilon" in capsys.readouterr().err
    assert made(epsilon=0.3, steps=50)["steps"] == 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-before-1", "run-before-2"]
    assert json.loads((tmp_path / "run-before-1" / "summary.json").read_text()) == first
    (tmp_path / "run" / "config.yaml").unlink()  # as of a run that died before it wrote one
    assert made()["evaluation"] == first["evaluation"]
    assert "run-before-3" in capsys.readouterr().err
    config = tmp_path / "run" / "config.yaml"  # as of a version without this field: it had the default
    config.write_text("".join(x for x in config.read_text().splitlines(True) if "epsilon:" not in x))
    assert made()["evaluation"] == first["evaluation"] and not (tmp_path / "run-before-4").exists()
    assert made(epsilon=0.3) != first and "epsilon" in capsys.readouterr().err
    slippery = made(env_options={"is_slippery": True})
    assert "env_options" in capsys.readouterr().err
    assert slippery != first and made(env_options={"is_slippery": True}) == slippery
    monkeypatch.setattr(reproduce, "MEMORY", ("epsilon",))  # as a field that changes memory and time alone
    assert made(epsilon=0.5, env_options={"is_slippery": True}) == slippery


def test_rows_are_chosen_and_those_that_are_there_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, dict[str, Any]]] = []
    commands: list[str] = []

    def trained(what: Any, results: Path, runs: Path, *rest: Any) -> Path:
        made.append((what.result, len(rest[-2]), dict(what.options)))
        commands.append(rest[0])
        (results / f"{what.result}.json").write_text("{}")
        return results / f"{what.result}.json"

    needs = f"foresight brew --out {tmp_path / 'data.jsonl'}"
    runs = (
        suites.Trained("ppo", "a", "first"),
        suites.Trained("ppo", "a", "second", after=("first",), options={"learning_rate": 1.0}),
        suites.Trained("ppo", "a", "third", needs=(needs,)),
    )
    suite = suites.Suite("small", "t", (suites.Experiment("", "later"),), runs)
    monkeypatch.setattr(reproduce, "suites", lambda: {"small": suite})
    monkeypatch.setattr(reproduce, "gather", lambda folder: [])
    monkeypatch.setattr(reproduce, "trained", trained)
    reported: list[str] = []
    reproduce.reproduce("small", tmp_path, only=("second",), seeds=2)
    assert made == [("first", 2, {}), ("second", 2, {"learning_rate": 1.0})]
    assert commands == [f"foresight reproduce small --only {name} --seeds 2" for name in ("first", "second")]
    with pytest.raises(UserError, match=r"foresight brew.* failed"):
        reproduce.reproduce("small", tmp_path, missing=True)
    (tmp_path / "data.jsonl").write_text("")
    reproduce.reproduce("small", tmp_path, missing=True, report=reported.append)
    assert len(made) == 3 and made[2][0] == "third"
    assert reported == ["later", "  skipped: no code can run it yet", "first", "  exists already", "second",
                    "  exists already", "third"]  # fmt: skip
    made.clear()
    reproduce.reproduce("small", tmp_path, quick=True)
    assert [name for name, *_ in made] == ["first"]


def test_fields_of_a_row_may_name_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    summary = {
        "evaluation": {"mean": 1.0, "metric": "m", "n": 1},
        "steps": 1,
        "unit": "u",
        "baseline": {"mean": 0.0, "n": 1},
    }
    summary |= {"seconds": 1.0, "versions": {}, "machine": {}}

    def one(name: str, preset: str, seed: int, out: Path, *rest: Any, **fields: Any) -> dict[str, Any]:
        given.append((out.name, fields))
        return {**summary, "seed": seed}

    monkeypatch.setattr(reproduce, "one", one)
    options = {"teacher": "{runs}/t-{seed}/export", "group": 3, "env_options": {"seed": "{seed}", "high": 9}}
    what = suites.Trained("distill", "x", "student", seeds=2, options=options)
    reproduce.trained(what, tmp_path, Path("R"), "c", False)
    filled = [
        {"teacher": f"R/t-{i}/export", "group": 3, "env_options": {"seed": i, "high": 9}} for i in (0, 1)
    ]  # fmt: skip
    assert given == [(f"student-{i}", fields) for i, fields in enumerate(filled)]


def test_a_run_that_is_older_than_its_data_is_kept_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, first = tmp_path / "data.jsonl", tmp_path / "runs" / "first-0" / "summary.json"
    what = suites.Trained(
        "sarsa", "CliffWalking-v1", "second", seeds=1, steps=40, episodes=2, after=("first",),
        needs=(f"foresight brew --out {data}",),
    )  # fmt: skip
    first.parent.mkdir(parents=True)

    def runs() -> list[str]:
        reproduce.trained(what, tmp_path, tmp_path / "runs", "c", False)
        return sorted(path.name for path in (tmp_path / "runs").iterdir() if path.name != "first-0")

    for file in (data, first):
        file.write_text("")
        os.utime(file, (1, 1))
    assert runs() == runs() == ["second-0"] and not capsys.readouterr().err
    for i, file in enumerate((data, first), 1):
        os.utime(file, (time.time() + 1, time.time() + 1))
        assert runs() == ["second-0", *(f"second-0-before-{j}" for j in range(1, i + 1))]
        assert f"older than its input {file}" in capsys.readouterr().err.replace("\n", "")
        os.utime(file, (1, 1))


@pytest.mark.parametrize("read", ["first-0", "first-0/export"])
def test_data_that_are_older_than_their_runs_are_made_again(
    read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    data, summary = tmp_path / "data.jsonl", tmp_path / "first-0" / "summary.json"
    summary.parent.mkdir()
    command = f"foresight brew {tmp_path / read} --episodes 3 --out {data}"

    def run(command: str, folder: Path) -> None:
        made.append(command)
        data.write_text(str(len(made)))

    monkeypatch.setattr(reproduce, "_run", run)
    for file, second in ((data, 2), (summary, 1)):
        file.write_text("old")
        os.utime(file, (second, second))
    reproduce.prepare(command)
    assert not made and not capsys.readouterr().err
    os.utime(summary, (3, 3))
    reproduce.prepare(command)
    assert made == [command] and data.read_text() == "1"
    assert (tmp_path / "data.jsonl-before-1").read_text() == "old"
    assert f"older than its input {summary}" in capsys.readouterr().err.replace("\n", "")
    reproduce.prepare(command)
    assert len(made) == 1


def test_seeds_are_added_to_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def one(name: str, preset: str, seed: int, out: Path, *rest: Any, **fields: Any) -> dict[str, Any]:
        made.append((out.name, seed))
        return {
            "seed": seed, "evaluation": {"mean": float(seed), "metric": "return", "n": 2}, "steps": 40, "unit": "u",
            "baseline": {"mean": -1.0, "n": 2}, "seconds": 1.0, "versions": {"torch": "1"}, "machine": machine,
        }  # fmt: skip

    def more(row: suites.Trained, seeds: int | None = None, *, add: bool = True) -> list[tuple[str, int]]:
        made.clear()
        suite = suites.Suite("small", "t", (), (row,))
        monkeypatch.setattr(reproduce, "suites", lambda: {"small": suite})
        reproduce.reproduce("small", tmp_path, seeds=seeds, more=add)
        return list(made)

    monkeypatch.setattr(reproduce, "one", one)
    row, file, machine = (
        suites.Trained("sarsa", "CliffWalking-v1", "row", 3, 2, 40),
        tmp_path / "row.json",
        {"cores": 2},
    )
    assert more(row, 1) == [("row-0", 0)]
    first = json.loads(file.read_text())
    machine = {"cores": 4}
    assert more(row, 3) == [("row-1", 1), ("row-2", 2)]
    both = json.loads(file.read_text())
    assert both["seeds"] == [0, 1, 2] and both["iqm"] == 1.0 and both["seconds"] == [1.0] * 3
    assert both["machine"] == {"cores": 2} and both["runs"][0] == first["runs"][0]
    assert "machine" not in both["runs"][0] and both["runs"][1]["machine"] == {"cores": 4}
    assert both["settings"] == first["settings"] and both["settings"]["epsilon"] and both["settings"]["steps"] == 40
    assert "--more" not in both["command"]  # the command that makes all of it
    assert more(row, 1) == [] and json.loads(file.read_text()) == both  # nothing is lost
    both["settings"]["micro_tokens"] = 384  # changes memory and time alone
    file.write_text(json.dumps(both))
    assert more(row, 1) == []
    del both["settings"]["micro_tokens"]
    for other in (
        dataclasses.replace(row, options={"epsilon": 0.7}),
        dataclasses.replace(row, env="FrozenLake-v1"),
        dataclasses.replace(row, options={"env_options": {"is_slippery": True}}),
        dataclasses.replace(row, episodes=3),
    ):
        with pytest.raises(UserError, match="which cannot be mixed with new ones"):
            more(other)
    del both["settings"]["epsilon"]  # as of a version without this field
    file.write_text(json.dumps(both))
    with pytest.raises(UserError, match=r"epsilon 0\.\d+, now 0\.7"):
        more(dataclasses.replace(row, options={"epsilon": 0.7}))
    assert more(row, 1) == []
    del both["settings"]  # as of an older version
    file.write_text(json.dumps(both))
    for other, of in ((dataclasses.replace(row, steps=50), "steps 40, now 50"),
                      (dataclasses.replace(row, episodes=3), "evaluation_episodes 2, now 3")):  # fmt: skip
        with pytest.raises(UserError, match=of):
            more(other)
    assert more(dataclasses.replace(row, seeds=4)) == [("row-3", 3)]
    assert [run.get("machine") for run in json.loads(file.read_text())["runs"]] == [None, *[{"cores": 4}] * 3]
    before = file.read_text()
    reproduce.trained(row, tmp_path, tmp_path, "another command", False, print, [1], row_settings.stored(row, file))
    assert made.pop() == ("row-1", 1) and file.read_text() == before  # only its run was needed
    assert more(row, add=False) == [("row-0", 0), ("row-1", 1), ("row-2", 2)]
    with pytest.raises(UserError, match="choose one"):
        reproduce.reproduce("small", tmp_path, more=True, missing=True)


def test_of_a_row_that_others_read_the_runs_that_they_need_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, tuple[list[int], list[int]]] = {}

    def trained(what: Any, results: Path, *rest: Any) -> Path:
        calls[what.result] = rest[-2], list(rest[-1])
        return results / f"{what.result}.json"

    def again(*only: str) -> dict[str, tuple[list[int], list[int]]]:
        calls.clear()
        reproduce.reproduce("small", tmp_path, only=only, more=True)
        return dict(calls)

    def has(name: str, *seeds: int) -> None:
        runs = [{"seed": seed} for seed in seeds]
        facts = {"runs": runs, "steps": 40, "unit": "u", "versions": {}, "machine": {}, "episodes": 2}
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))

    def row(name: str, *after: str, **rest: Any) -> suites.Trained:
        return suites.Trained("sarsa", "CliffWalking-v1", name, 3, 2, 40, after=after, **rest)

    made = f"foresight data episodes {{runs}}/first-0 --out {tmp_path}/pairs"
    rows = (
        row("first"), row("second", "first", options={"policy": "{runs}/first-{seed}/export"}),
        row("third", "first", "second", needs=(made,), options={"policy": "{runs}/second-{seed}/export"}),
        row("fourth", "first"),
        row("fifth", "second", options={"policy": "{runs}/first-{seed}/export", "model": "{runs}/second-0/export"}),
    )  # fmt: skip
    monkeypatch.setattr(reproduce, "suites", lambda: {"small": suites.Suite("small", "t", (), rows)})
    monkeypatch.setattr(reproduce, "gather", lambda folder: [])
    monkeypatch.setattr(reproduce, "trained", trained)
    monkeypatch.setattr(reproduce, "prepare", lambda *given: None)
    has("first", 0, 1)
    has("second", 0, 1, 2)
    has("third", 0, 1)
    assert again("first") == {"first": ([2], [0, 1])}
    assert again("second") == {}, "it was run again"
    # seed 2 reads that of the second, which reads that of the first; its data are made of seed 0 of the first
    third = {"first": ([0, 2], [0, 1]), "second": ([2], [0, 1, 2]), "third": ([2], [0, 1])}
    assert again("third") == third
    (tmp_path / "pairs").touch()
    assert again("third") == third | {"first": ([2], [0, 1])}
    assert again("fourth") == {"first": ([0, 1, 2], [0, 1]), "fourth": ([0, 1, 2], [])}  # it does not tell
    has("fifth", 0, 1)  # it follows the second, and reads the first, which the second follows
    assert again("fifth") == {"first": ([0, 2], [0, 1]), "second": ([0], [0, 1, 2]), "fifth": ([2], [0, 1])}
    for name in ("third", "fourth", "fifth"):
        has(name, 0, 1, 2)
    assert again() == {"first": ([2], [0, 1])}


def test_a_run_that_ended_before_its_maximum_is_of_the_same_settings(tmp_path: Path) -> None:
    def refused(row: suites.Trained, steps: int, episodes: int) -> str:
        file = tmp_path / "row.json"
        facts = {"runs": [{"seed": 0}], "steps": steps, "unit": "u", "versions": {}, "machine": {}}
        file.write_text(json.dumps({**facts, "episodes": episodes}))
        try:
            return "" if row_settings.stored(row, file) else "nothing is stored"
        except UserError as error:
            return str(error)

    converged = suites.Trained("soft_value_iteration", "FrozenLake-v1")
    assert refused(converged, 571, 1) == "" and "steps 200,000" in refused(converged, 200_000, 1)
    walk = suites.Trained("td_lambda", "RandomWalk19")  # 10 episodes
    assert refused(walk, 944, 1) == "" and "steps 9" in refused(walk, 9, 1)
    texts = suites.Trained("pretrain", "stories-moe")
    assert refused(texts, 600, 1) == "" and "evaluation_episodes 100" in refused(texts, 600, 100)
    assert "steps 571" in refused(suites.Trained("sac", "Pendulum-v1"), 571, 100)


def test_seeds_can_be_added_to_the_published_results() -> None:
    def refused(row: suites.Trained) -> bool:
        try:
            return row_settings.stored(row, reproduce.root() / "results" / f"{row.result}.json") is None
        except UserError:
            return True

    runs = [row for suite in suites.suites().values() for row in suite.runs]
    assert {row.result for row in runs if refused(row)} <= {"sac-Hopper-v5"}  # 300,000 of 1,000,000 steps


def test_a_row_that_is_refused_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def trained(what: Any, results: Path, *rest: Any) -> Path:
        made.append(what.result)
        return results / f"{what.result}.json"

    def more(*rows: suites.Trained, only: tuple[str, ...] = ()) -> list[str]:
        monkeypatch.setattr(reproduce, "suites", lambda: {"small": suites.Suite("small", "t", (), rows)})
        reproduce.reproduce("small", tmp_path, more=True, only=only, report=reported.append)
        return made

    monkeypatch.setattr(reproduce, "gather", lambda folder: [])
    monkeypatch.setattr(reproduce, "trained", trained)
    first, second = (suites.Trained("sarsa", "CliffWalking-v1", name, 2, 2, 40) for name in ("first", "second"))
    facts = {"runs": [{"seed": 0}], "steps": 30, "unit": "u", "versions": {}, "machine": {}, "episodes": 2}
    (tmp_path / "first.json").write_text(json.dumps(facts))
    reported: list[str] = []
    assert more(first, second) == ["second"]
    assert any("skipped" in text and "steps 30, now 40" in text for text in reported)
    with pytest.raises(UserError, match="steps 30, now 40"):
        more(first, second, only=("first",))
    with pytest.raises(UserError, match="steps 30, now 40"):  # its runs are read, and would be of two settings
        more(first, dataclasses.replace(second, after=("first",)))


def test_a_trained_row_holds_the_returns_of_its_last_fifth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = {"evaluation": {"mean": 1.0, "metric": "return", "n": 1}, "baseline": {"mean": 0.0, "n": 1}}
    summary |= {"seed": 0, "steps": 100, "unit": "u", "seconds": 1.0, "versions": {}, "machine": {}}

    def one(name: str, preset: str, seed: int, out: Path, *rest: Any, **fields: Any) -> dict[str, Any]:
        with log.Log(out, tensorboard=False) as written:
            for step, least in ((80, 1.0), (90, 7.0), (100, 8.0)):
                written.row(step, 1.0, {"ended": 2, "ended_return": least + 1, "ended_return_min": least})
        return summary

    monkeypatch.setattr(reproduce, "one", one)
    reproduce.trained(suites.Trained("ppo", "CartPole-v1", "row", 1), tmp_path, tmp_path, "c", False)
    (run,) = json.loads((tmp_path / "row.json").read_text())["runs"]
    assert run["held"] == {"mean": 8.5, "min": 7.0, "episodes": 4}


@pytest.mark.parametrize(("metric", "worst"), [("return", 1.0), ("rms_error", 3.0)])
def test_the_worst_of_errors_is_the_largest(metric: str, worst: float) -> None:
    shared = {"steps": 1, "unit": "u", "baseline": {"mean": 0.0}, "seconds": 1.0, "versions": {}, "machine": {}}
    seeds = [
        {"seed": i, "evaluation": {"mean": m, "metric": metric, "n": 1}, **shared} for i, m in enumerate((3.0, 1.0))
    ]
    assert reproduce.collect("sarsa", "x", seeds, "c")["worst"] == worst


def test_quick_trains_a_hundredth_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = suites.Suite("small", "t", (), (suites.Trained("q_learning", "Taxi-v4"),))
    monkeypatch.setattr(reproduce, "suites", lambda: {"small": suite})
    monkeypatch.setattr(reproduce, "root", lambda: tmp_path)
    (file,) = reproduce.reproduce("small", quick=True)
    assert file.is_relative_to(tmp_path / "runs" / "reproduce" / "small-quick")
    assert json.loads(file.read_text())["steps"] == 20_000


def test_a_command_is_typed_in_the_checkout_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "made.py").write_text("open('results/made.json', 'w').write('{}')")
    suite = suites.Suite("small", "t", (suites.Experiment("python benchmarks/made.py", "made"),))
    monkeypatch.setattr(reproduce, "suites", lambda: {"small": suite})
    monkeypatch.setattr(reproduce, "root", lambda: tmp_path)
    reported: list[str] = []
    assert reproduce.reproduce("small", quick=True, report=reported.append) == [] and "skipped" in reported[1]
    (file,) = reproduce.reproduce("small", report=reported.append)
    assert file == tmp_path / "results" / "made.json" and file.read_text() == "{}"
    assert not any("nothing was run again" in text for text in reported)
    reproduce.reproduce("small", report=reported.append)
    assert any(f"nothing was run again: {file} has all of it" in text for text in reported)
    (tmp_path / "benchmarks" / "made.py").write_text("raise SystemExit(3)")
    with pytest.raises(UserError, match="See its output"):
        reproduce.reproduce("small")
    (tmp_path / "benchmarks").rename(tmp_path / "gone")
    with pytest.raises(UserError, match="Clone the repository"):
        reproduce.reproduce("small")


@pytest.mark.parametrize("name", ["exact_dynamic_programming", "windy_grid_world", "cliff_walking", "random_walk_19"])
def test_experiments_reach_what_is_published(name: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    figures: dict[str, Any] = getattr(sutton_barto, name)(True, picture)
    if name == "exact_dynamic_programming":
        assert figures["met"] and figures["largest_error"] < 1e-6 and figures["environments"] >= 4
    elif name == "random_walk_19":
        assert picture.is_file() and figures["best_n"] == 16 and figures["best_rms"] < 0.36
    elif name == "windy_grid_world":
        assert picture.is_file() and figures["exact_shortest"] == pytest.approx(15)
        assert figures["steps_for_170_episodes"] == pytest.approx(8240, abs=900)
    else:
        assert picture.is_file() and figures["exact_optimum"] == pytest.approx(-13)
        assert figures["sarsa"] > figures["q_learning"] + 10


def test_the_help_names_every_suite(call: Callable) -> None:
    text = call("reproduce", "--help").out
    assert [name for name in suites.suites() if not re.search(rf"\b{name}\b", text.split("--list")[0])] == []


def test_the_command_lists_and_runs(call: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sutton-barto" in call("reproduce").out
    assert {one["name"] for one in call("reproduce", "--json").json} >= {"sutton-barto", "model-free"}
    wrong = call("reproduce", "sutton")
    assert wrong.code == 2 and "Did you mean 'sutton-barto'" in wrong.err
    table = call("reproduce", "language", "--list", "--only", "distill-smollm2-addition").out
    assert "grpo-addition-10-minutes" in table and "sft" not in table
    (row,) = call("reproduce", "model-free", "--list", "--only", "trpo-CartPole-v1", "--json").json
    assert (row["met"], row["target"], row["done_seeds"], row["steps"]) == (True, ">= 475", 5, 100_000)
    assert row["command"] == "foresight reproduce model-free --only trpo-CartPole-v1"
    assert "Did you mean" in call("reproduce", "model-free", "--only", "trpo-CartPole").err
    suite = suites.Suite("small", "t", (CORRIDOR,), (suites.Trained("trpo", "CartPole-v1", "of-no-run"),))
    for module in (reproduce, results):
        monkeypatch.setattr(module, "suites", lambda: {"small": suite})
    table = call("reproduce", "small", "--list", "--only", "of-no-run").out
    assert "of-no-run" in table and "not run" in table
    files = call("reproduce", "small", "--only", "short-corridor", "--quick", "--out", str(tmp_path), "--json").json
    assert [Path(file).name for file in files] == ["short-corridor.json", "short-corridor.png"]
