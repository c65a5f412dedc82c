from __future__ import annotations

import errno
import json
import math
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foresight.errors import UserError
from foresight.runtime.monitoring import log as logging
from foresight.runtime.monitoring.log import METRICS, SAMPLES, Log, read


def test_floats_come_back_exactly(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 1e-300, 123456789.123456789, -0.0]
    with Log(tmp_path) as log:
        for step, value in enumerate(values):
            log.row(step, value, {"loss": value})
    rows = read(tmp_path)
    assert [row["loss"] for row in rows] == values and [row["seconds"] for row in rows] == values
    assert math.copysign(1, rows[-1]["loss"]) == -1


def test_rows_are_on_the_disk_before_close(tmp_path: Path) -> None:
    log = Log(tmp_path, tensorboard=False)
    log.row(1, 0.5, {"return": 2.0})
    assert read(tmp_path) == [{"step": 1, "seconds": 0.5, "return": 2.0}]
    log.close()


def test_strict_json_even_for_nan(tmp_path: Path) -> None:
    with Log(tmp_path, tensorboard=False) as log:
        log.row(1, 0.0, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / METRICS).read_text(), parse_constant=refuse)
    row = read(tmp_path)[0]
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_truncate_drops_what_the_checkpoint_does_not_know(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        for step in (10, 20, 30, 40):
            log.row(step, step / 10, {"x": 1.0, "samples": [{"prompt": "p", "completion": "c", "reward": 1.0}]})
    with Log(tmp_path) as log:
        log.truncate(20)
        log.row(30, 3.5, {"x": 2.0})
    assert [(row["step"], row["x"]) for row in read(tmp_path)] == [(10, 1.0), (20, 1.0), (30, 2.0)]
    assert [row["step"] for row in read(tmp_path, SAMPLES)] == [10, 20]


def test_half_a_line_from_a_kill_is_no_row(tmp_path: Path) -> None:
    with Log(tmp_path, tensorboard=False) as log:
        log.row(1, 0.1, {"x": 1.0})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 2, "sec')
    assert [row["step"] for row in read(tmp_path)] == [1]
    with Log(tmp_path, tensorboard=False) as log:  # without truncate: the next row is still a line of its own
        log.row(3, 0.3, {"x": 3.0})
    assert [row["step"] for row in read(tmp_path)] == [1, 3]


@pytest.mark.parametrize("step", ["null", '"x"', "[]", "NaN", "9" * 400, "9" * 5000, "[" * 100_000])
def test_a_row_without_a_step_is_no_row(tmp_path: Path, step: str) -> None:
    (tmp_path / METRICS).write_text(f'{{"step": {step}}}\n{{"step": 1, "x": 2.0}}\n')
    assert [row["step"] for row in read(tmp_path)] == [1]
    with Log(tmp_path, tensorboard=False) as log:
        log.truncate(3)
    assert (tmp_path / METRICS).read_text() == '{"step": 1, "x": 2.0}\n'


def test_samples_have_their_own_file(tmp_path: Path) -> None:
    sample = {"prompt": "What is 7 + 12?", "completion": "19 \N{CHECK MARK}", "reward": 1.0}
    with Log(tmp_path) as log:
        log.row(4, 0.1, {"reward": 0.5, "samples": [sample]})
    assert "samples" not in read(tmp_path)[0]
    assert read(tmp_path, SAMPLES) == [{"step": 4, **sample}]


def test_half_a_surrogate_pair_in_a_sample_ends_no_run(tmp_path: Path) -> None:
    with Log(tmp_path, tensorboard=False) as log:
        log.samples(1, [{"prompt": "caf\udce9", "completion": "\ud83d!"}])
    assert read(tmp_path, SAMPLES) == [{"step": 1, "prompt": "caf?", "completion": "?!"}]


def test_tensorboard_gets_the_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second are read in the order of their names, which end in a count: the 10th before the 9th.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with Log(tmp_path) as log:
        log.row(1, 0.1, {"return": 10.0})
        log.row(2, 0.2, {"return": 20.0})
    with Log(tmp_path) as log:
        log.truncate(1)
        log.row(2, 0.2, {"return": 25.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("return")] == [(1, 10.0), (2, 25.0)]


def test_a_missing_service_is_reported_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"pip install 'foresight\[trackio\]'"):
        Log(tmp_path, services=("trackio",))
    with pytest.raises(UserError, match="Did you mean 'wandb'"):
        Log(tmp_path, services=("wandbb",))


def test_a_service_gets_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[object] = []
    board = types.SimpleNamespace(log=lambda row, step: logged.append((step, row)), finish=lambda: logged.append("end"))
    fake = types.SimpleNamespace(init=lambda **options: (logged.append(options["config"]), board)[1])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with Log(tmp_path, services=("wandb",), config={"gamma": 0.9}, tensorboard=False) as log:
        log.row(5, 0.5, {"return": 1.0, "samples": []})
    assert logged == [{"gamma": 0.9}, (5, {"return": 1.0, "seconds": 0.5}), "end"]


def _wandb(monkeypatch: pytest.MonkeyPatch, init: Callable[..., object]) -> None:
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))


def test_runs_of_one_folder_name_are_apart_at_wandb_and_a_resumed_one_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, str]] = []

    def init(**options: Any) -> object:
        begun.append((options["id"], options["name"]))
        assert options["resume"] == "allow"
        return types.SimpleNamespace(finish=lambda: None)

    _wandb(monkeypatch, init)
    for folder in ("one/PPO: 50%", "other/PPO: 50%", "one/PPO: 50%"):
        Log(tmp_path / folder, services=("wandb",), tensorboard=False).close()
    first, other, resumed = (run for run, _ in begun)
    assert first == resumed != other
    assert {name for _, name in begun} == {"PPO: 50%"} and all(run.isalnum() for run, _ in begun)


def test_a_service_that_cannot_begin_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> object:
        raise RuntimeError("No API key configured. Use `wandb login` to log in.")

    _wandb(monkeypatch, init)
    with pytest.raises(UserError, match=r"to wandb cannot begin: No API key.*wandb login.*leave out --log wandb\.$"):
        Log(tmp_path, services=("wandb",), tensorboard=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / METRICS).symlink_to("/dev/full")
    with pytest.raises(UserError, match="No space left"), Log(tmp_path, tensorboard=False) as log:
        log.row(1, 0.0, {"x": 1.0})


def test_a_disk_that_fills_up_with_tensorboards_events_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logging, "_TensorBoard", lambda *_: types.SimpleNamespace(row=full, close=full))
    with pytest.raises(UserError, match="No space left"), Log(tmp_path) as log:
        log.row(1, 0.0, {"x": 1.0})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_directory_is_a_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Cannot write"):
        Log(tmp_path / "run")


def test_a_file_in_the_way_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a directory")
    with pytest.raises(UserError, match="Cannot write"):
        Log(tmp_path / "run")
