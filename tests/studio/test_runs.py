from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest

from foresight.errors import UserError
from foresight.runtime.monitoring import log
from foresight.studio import export, runs, samples
from foresight.studio.runs import Library, decimate, identity

FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs"
HOSTILE = "<script>alert(1)</script>"


def make(folder: Path, rows: list[dict], *, config: str = "algorithm: ppo\nenv: CartPole-v1\nseed: 0\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config + "config:\n  steps: 100\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows(count: int) -> list[dict]:
    return [{"step": i, "seconds": i / 10, "return": float(i % 7), "loss": 1.0} for i in range(1, count + 1)]


def test_the_table_has_what_the_runs_reached() -> None:
    found = {row["name"]: row for row in Library([FIXTURES]).table()}
    assert set(found) == {path.name for path in FIXTURES.iterdir() if path.is_dir()}
    summary = json.loads((FIXTURES / "ppo" / "summary.json").read_text())
    assert found["ppo"]["evaluation"]["mean"] == summary["evaluation"]["mean"]
    assert found["ppo"]["state"] == "finished"


def test_a_finished_run_that_is_continued_is_running_again(tmp_path: Path) -> None:
    run = make(tmp_path / "run", rows(50))
    (run / "summary.json").write_text(json.dumps({"steps": 50, "seconds": 9.0, "command": "foresight train ppo"}))
    library = Library([tmp_path])
    (found,) = library.table()
    assert (found["state"], found["steps"], found["seconds"]) == ("finished", 50, 9.0)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 51, "seconds": 9.5, "return": 1.0}) + "\n")
    (found,) = library.table()
    assert (found["state"], found["step"], found["steps"], found["seconds"]) == ("running", 51, 100, 9.5)
    assert library.detail(found["id"])["summary"] == {}


def test_a_curve_is_the_log_and_what_is_appended_is_read(tmp_path: Path) -> None:
    run = make(tmp_path / "run", rows(50))
    library = Library([tmp_path])
    name = identity(run)
    library.find()
    first = library.curve(name, "return")
    assert first["last"] == [row["return"] for row in log.read(run)]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 51, "seconds": 6.0, "return": 99.0}) + "\n" + '{"step": 52, "ret')
    assert library.curve(name, "return")["last"][-1] == 99.0  # the row that is being written is not there yet
    with (run / "metrics.jsonl").open("a") as file:
        file.write('urn": 7.5}\n')
    assert library.curve(name, "return")["last"][-1] == 7.5


def test_a_log_that_became_shorter_is_read_again(tmp_path: Path) -> None:
    run = make(tmp_path / "run", rows(50))
    library = Library([tmp_path])
    library.find()
    library.curve(identity(run), "return")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(3)))
    assert len(library.curve(identity(run), "return")["x"]) == 3


def test_a_log_read_in_pieces_is_the_log_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path / "run", rows(50))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 51, "note": "x" * 500, "loss": 2.0}) + "\nbroken\n" + '{"step": 52, "loss": 3.')
    found = []
    for size in (1_000_000, 200):  # bytes; the second is less than the longest row
        monkeypatch.setattr(runs, "PIECE", size)
        library = Library([tmp_path])
        detail = library.detail(identity(run))
        found.append((detail["rows"], detail["metrics"], library.curve(identity(run), "loss", "seconds")))
    assert found[0] == found[1] and found[0][0] == 51 and found[0][2]["last"] == [1.0] * 50 + [2.0]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("5}\n")
    assert library.curve(identity(run), "loss")["last"][-1] == 3.5


@pytest.mark.parametrize("read", ["detail", "samples"])
def test_the_table_does_not_wait_for_a_log_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    run = make(tmp_path / "run", rows(3))
    library = Library([tmp_path])
    library.find()
    begun, go_on = threading.Event(), threading.Event()
    reader = runs.Columns if read == "detail" else samples.Log

    def slowly(*_: object) -> list[dict]:
        begun.set()
        assert go_on.wait(20)
        return []

    monkeypatch.setattr(reader, "read", slowly)
    with futures.ThreadPoolExecutor(2) as pool:
        reading = pool.submit(getattr(library, read), identity(run))
        assert begun.wait(20)
        try:
            (row,) = pool.submit(library.table).result(5)
        finally:
            go_on.set()
        assert row["step"] == 3 and reading.result(20) is not None


def test_only_the_columns_of_the_last_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "COMPARED", 2)
    library = Library([tmp_path])
    for name in "abac":
        run = tmp_path / name if (tmp_path / name).is_dir() else make(tmp_path / name, rows(3))
        library.detail(identity(run))
    assert [path.name for path in library._columns] == ["a", "c"]


def test_decimation_keeps_every_spike() -> None:
    x, y = np.arange(100_000.0), np.zeros(100_000)
    y[54_321], y[70_000] = 9.0, -3.0
    found = decimate(x, y, 500)
    assert len(found["x"]) == 500
    assert max(found["high"]) == 9.0 and min(found["low"]) == -3.0 and found["x"][-1] == 99_999


def test_a_run_that_writes_is_running_and_an_old_one_is_stopped(tmp_path: Path) -> None:
    make(tmp_path / "now", rows(3))
    old = make(tmp_path / "old", rows(3))
    long_ago = time.time() - 3600
    for file in old.iterdir():
        os.utime(file, (long_ago, long_ago))
    slow = make(tmp_path / "slow", [{"step": 1, "seconds": 0.0}, {"step": 2, "seconds": 1000.0}])
    for file in slow.iterdir():
        os.utime(file, (long_ago, long_ago))
    assert {row["name"]: row["state"] for row in Library([tmp_path]).table()} == {
        "now": "running", "old": "stopped", "slow": "running",
    }  # fmt: skip


def test_the_table_warns_of_runs_that_are_unhealthy_now_and_counts_what_was_saved(tmp_path: Path) -> None:
    bad = {"approx_kl": 9.0, "return": 1.0}
    sick = make(tmp_path / "sick", [{"step": i, **(bad if i > 40 else {"approx_kl": 0.0})} for i in range(1, 50)])
    healed = make(tmp_path / "healed", [{"step": i, **(bad if i < 9 else {"approx_kl": 0.0})} for i in range(1, 50)])
    for name in ("checkpoints/step-000000049", "checkpoints/best.json", "media/deep"):
        (sick / name).mkdir(parents=True)
    for name in ("a.mp4", "deep/b.png", "samples.jsonl"):
        (sick / "media" / name).write_bytes(b"")
    library = Library([tmp_path])
    found = {row["name"]: row for row in library.table()}
    assert [text.split(":")[0] for text in found["sick"]["unhealthy"]] == ["step 43"]  # the third in a row
    assert found["healed"]["unhealthy"] == [] and library.detail(identity(healed))["warnings"]
    counts = {name: [row[name] for row in found.values()] for name in ("checkpoints", "pictures", "videos")}
    assert {name: sum(row) for name, row in counts.items()} == {"checkpoints": 1, "pictures": 1, "videos": 1}
    assert (found["sick"]["checkpoints"], found["sick"]["videos"], found["healed"]["pictures"]) == (1, 1, 0)


def test_broken_and_deleted_runs_leave_the_others(tmp_path: Path) -> None:
    make(tmp_path / "good", rows(3))
    make(tmp_path / "cut", [], config="algorithm: [unclosed\n")
    gone = make(tmp_path / "gone", rows(3))
    binary = make(tmp_path / "binary", rows(2))
    (binary / "metrics.jsonl").write_bytes(b"\xff\xfe\x00garbage\n[1, 2]\n" + b'{"step": 5, "return": 1.0}\n')
    with (binary / "metrics.jsonl").open("a") as log:
        log.write('{"step": NaN}\n{"step": 1e999}\n{"step": 6, "seconds": 1' + "0" * 400 + "}\n")
    empty = make(tmp_path / "empty", rows(2))
    (empty / "metrics.jsonl").write_text('{"step": 5, "seconds": null, "return": 1.0}\n')
    (empty / "summary.json").write_text('{"steps": null}')
    library = Library([tmp_path])
    assert {row["name"] for row in library.table()} == {"good", "gone", "binary", "empty"}
    assert library.curve(identity(empty), "return")["last"] == [1.0]
    shutil.rmtree(empty)
    shutil.rmtree(gone)
    assert {row["name"] for row in library.table()} == {"good", "binary"}
    with pytest.raises(UserError, match="no run"):
        library.detail(identity(gone))
    assert library.curve(identity(binary), "return")["last"] == [1.0]


def test_looking_writes_nothing(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES, tmp_path / "runs")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    library = Library([tmp_path / "runs"])
    for row in library.table():
        detail = library.detail(row["id"])
        for metric in detail["metrics"]:
            library.curve(row["id"], metric)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before


def test_only_pictures_of_the_run_are_served(tmp_path: Path) -> None:
    run = make(tmp_path / "run", rows(3))
    (run / "media").mkdir()
    (run / "media" / "a.png").write_bytes(b"png")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (run / "media" / "link.png").symlink_to(tmp_path / "secret.png")
    library = Library([tmp_path])
    library.find()
    assert library.file(identity(run), "media/a.png").read_bytes() == b"png"
    for name in (
        "config.yaml",
        "../secret.png",
        "media/../../secret.png",
        "media/link.png",
        "/etc/passwd",
        "media",
        "media/\0.png",
        f"media/{300 * 'a'}.png",
    ):
        with pytest.raises(UserError, match="no such picture"):
            library.file(identity(run), name)


def test_completions_are_searched_and_sorted(tmp_path: Path) -> None:
    run = make(tmp_path / "run", rows(3))
    (run / "media").mkdir()
    written = [
        {"step": i, "prompt": f"q{i % 3}", "completion": HOSTILE + str(i), "reward": (i * 7) % 5} for i in range(20)
    ]
    file = run / "media" / "samples.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in written))
    library = Library([tmp_path])
    library.find()
    rows_ = library.samples(identity(run))
    best = samples.page(rows_, sort="best")["rows"]
    assert [row["reward"] for row in best] == sorted((row["reward"] for row in written), reverse=True)
    assert samples.page(rows_, search="Q1")["total"] == 7
    assert [row["step"] for row in samples.page(rows_, step=4)["rows"]] == [4]
    assert len(samples.page(rows_, start=15)["rows"]) == 5
    with file.open("a") as stream:
        stream.write(json.dumps({"step": 30, "reward": 9, "held_out": True}) + "\n" + '{"step": 31, "rew')
    held_out = samples.page(library.samples(identity(run)), held_out=True)
    assert [row["step"] for row in held_out["rows"]] == held_out["held_out_steps"] == [30]
    file.write_text(json.dumps({"step": 1}) + "\nbroken\n[3]\n" + '{"step": "x"}\n')
    assert library.samples(identity(run)) == [{"step": 1, "index": 0}]


def test_intervals_are_of_runs_of_one_algorithm(tmp_path: Path) -> None:
    """A user's file may have the name of an algorithm. Runs that share no steps yet leave the others their interval."""
    fork = tmp_path / "fork" / "ppo.py"
    for index, algorithm in enumerate(["ppo", "ppo", fork, fork, "a2c", "a2c"]):
        late = 9 * (algorithm == "a2c" and index % 2)
        logged = [{**row, "step": row["step"] + late} for row in rows(5)]
        make(tmp_path / str(index), logged, config=f"algorithm: {algorithm}\nenv: CartPole-v1\nseed: {index}\n")
    library = Library([tmp_path])
    expected = {f"{name} on CartPole-v1": 2 for name in ("ppo", fork)}
    found = library.bands([row["id"] for row in library.table()], "return")
    assert {band["label"]: band["runs"] for band in found} == expected
    kept = [one["metrics"]["return"] for one in export._bands(library, library.table())]
    assert {band["label"]: band["runs"] for band in kept} == expected


def test_settings_that_differ(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / name, rows(2), config=f"algorithm: ppo\nenv: E\nseed: {i}\n") for i, name in enumerate("ab")
    ]
    library = Library([tmp_path])
    library.find()
    assert library.differences([identity(run) for run in runs]) == [{"name": "seed", "values": [0, 1]}]


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="nowhere"):
        Library(["nowhere"])


def test_what_may_not_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusals of the system are played."""
    open_run = make(tmp_path / "open", rows(3))
    locked = make(tmp_path / "locked", rows(3))
    secret = make(tmp_path / "secret", rows(3)) / log.METRICS
    look, read = os.stat, Path.open

    def stat(path, *args, **options):
        if str(path).startswith(f"{locked}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, *args, **options)

    def opened(path, *args, **options):
        if path == secret:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, *args, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(Path, "open", opened)
    library = Library([tmp_path])
    assert set(library.stamps()) == {identity(open_run), identity(secret.parent)}
    assert library.folders_with("policy.json") == []
    assert library.detail(identity(open_run))["rows"] == 3 and library.detail(identity(secret.parent))["rows"] == 0
