"""Runs as the page shows them: a table, decimated curves, completions, warnings and files. Nothing is written.

A run directory may be written, cut short or deleted while it is read: what cannot be read is left out. The table reads
only the last rows of each log; a log is read whole, and from then on only what was appended, once its curves are drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foresight.errors import UserError, resume_command, unknown
from foresight.runtime import catalog
from foresight.runtime.monitoring import log
from foresight.runtime.monitoring.health import Health
from foresight.studio import samples
from foresight.studio.encode import is_number, number

PIECE = 4_000_000  # bytes of a log that are parsed at a time: no other thread runs meanwhile
COMPARED = 50  # runs whose curves are drawn together, and whose columns are kept
TAIL = 65_536  # bytes of a log that hold at least one row
RECENT = 20  # last rows whose metrics are checked for the table
LIVE = 30.0  # seconds since the last row after which a run without a summary counts as stopped,
SLOW = 4  # or this many times the time between its last rows, if that is longer
POINTS = 600  # of a drawn curve
DEEPEST = 4  # levels of folders that are searched for runs
RUN = (log.METRICS, "config.yaml")  # a folder with one of them is a run
SAMPLES = "media/samples.jsonl"
NETWORK = ("memory", "images", "sequence_model")  # fields of a Config that choose its network
HEAD, LONGEST_ROW = 4, 1_000_000  # rows, and bytes of a row, that show whether a run logs conversations
VIDEOS = (".mp4", ".webm")
PICTURES = (".png", ".gif", ".svg", ".jpg", *VIDEOS)


@dataclasses.dataclass
class Columns:
    """The metrics of one log, read so far: per metric the indices of its rows and its values."""

    inode: int = 0
    offset: int = 0
    steps: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    seconds: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    values: dict[str, tuple[array[int], array[float]]] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    health: Health = dataclasses.field(default_factory=Health)
    drawn: dict[tuple[str, str, int], dict[str, Any]] = dataclasses.field(default_factory=dict)  # decimated curves
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # held by who reads or looks

    def read(self, file: Path) -> None:
        """Add the rows that were appended; start again if the file is another one or is shorter (a resumed run)."""
        try:
            stat = file.stat()
            if stat.st_ino != self.inode or stat.st_size < self.offset:
                fresh = Columns(inode=stat.st_ino, lock=self.lock)
                for field in dataclasses.fields(self):
                    setattr(self, field.name, getattr(fresh, field.name))
            with file.open("rb") as stream:
                stream.seek(self.offset)
                whole = True
                while whole and (lines := stream.readlines(PIECE)):
                    whole = lines[-1].endswith(b"\n")  # else it is being written, and left for the next time
                    self._add(lines if whole else lines[:-1])
        except OSError:
            return

    def _add(self, lines: Sequence[bytes]) -> None:
        if lines:
            self.offset += sum(map(len, lines))
            self.drawn = {}
        for row in _parsed(lines):
            index = len(self.steps)
            self.steps.append(float(row["step"]))
            self.seconds.append(number(row.get("seconds")))
            numbers = {}
            for name, value in row.items():
                if name in ("step", "seconds") or isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                numbers[name] = value
                where, what = self.values.setdefault(name, (array("q"), array("d")))
                where.append(index)
                what.append(float(value))
            self.warnings += self.health.check(int(row["step"]), numbers)


class Library:
    """The runs in `folders`, and in their subfolders. Safe to use from several threads."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self.folders = [Path(folder).expanduser().resolve() for folder in folders]
        for folder in self.folders:
            if not folder.is_dir():
                raise UserError(f"'{folder}' is not a folder. Give run directories, or folders that hold some: runs")
        self._lock = threading.Lock()
        self._columns: dict[Path, Columns] = {}
        self._rows: dict[Path, tuple[tuple[float, ...], dict[str, Any]]] = {}
        self._ids: dict[str, Path] = {}
        self._ended: dict[Path, float] = {}
        self._samples: dict[Path, samples.Log] = {}

    def find(self) -> list[Path]:
        """The run directories, by path."""
        found = sorted({run for folder in self.folders for run in _walk(folder, DEEPEST)})
        self._ids = {identity(run): run for run in found}
        return found

    def folders_with(self, mark: str) -> list[Path]:
        """The folders that hold a file of this name, by path."""
        return sorted({found for folder in self.folders for found in _walk(folder, DEEPEST, (mark,))})

    def path(self, run: str) -> Path:
        """The directory of the run with this id. Raises UserError if there is none."""
        if run not in self._ids:
            self.find()
        if run not in self._ids or not self._ids[run].is_dir():
            raise UserError(f"There is no run '{run[:40]}' in the folders of this studio.")
        return self._ids[run]

    def table(self) -> list[dict[str, Any]]:
        """One row a run, the newest first: what a person looks for first."""
        rows = [row for run in self.find() if (row := self._row(run)) is not None]
        return sorted(rows, key=lambda row: -row["changed"])

    def row(self, run: str) -> dict[str, Any] | None:
        """The row of one run in the table; None if it was deleted or holds no settings."""
        try:
            return self._row(self.path(run))
        except UserError:
            return None

    def _row(self, run: Path) -> dict[str, Any] | None:
        files = [run / name for name in ("config.yaml", log.METRICS, "summary.json")]
        stamps = tuple(stamp(file) for file in files)
        with self._lock:
            known = self._rows.get(run)
        now = time.time()
        if known is None or known[0] != stamps:
            row = _facts(run)
            if row is None:
                return None
            known = stamps, row
            with self._lock:
                self._rows[run] = known
        row = dict(known[1])
        patience = max(LIVE, SLOW * row.pop("interval"))
        if row["state"] == "unfinished":
            late = now - row["changed"] >= patience or row["changed"] <= self._ended.get(run, 0.0)
            row["state"] = "stopped" if late else "running"
        return {**row, **_files(run)}

    def ended(self, path: Path) -> None:
        """The process that trained in `path` has ended: until the log grows again, the run is stopped."""
        self._ended[path] = time.time()

    def detail(self, run: str) -> dict[str, Any]:
        """The config, the summary, the logged metrics, warnings, files and checkpoints of a run."""
        path = self.path(run)
        with self._read(path) as columns:
            metrics, count, warnings = sorted(columns.values), len(columns.steps), columns.warnings[-50:]
        config = _yaml(path / "config.yaml")
        row = self._row(path)
        if row is None:
            raise UserError(f"The run {path.name} was deleted or holds no settings.")
        checkpoints = path / "checkpoints"
        return {
            **row,
            "config": config,
            "summary": _summary(path, row["step"]),
            "metrics": metrics,
            "rows": count,
            "warnings": warnings,
            "media": [
                str(file.relative_to(path))
                for file in sorted(path.glob("media/**/*"))
                if file.suffix in PICTURES and file.is_file()
            ],
            "samples": (path / SAMPLES).is_file(),
            "saved": [file.name for file in sorted(checkpoints.glob("step-*")) if file.is_dir()],
            "best": read_json(checkpoints / "best.json").get("step"),
            "resume": resume_command(_short(path)),
        }

    @contextlib.contextmanager
    def _read(self, path: Path) -> Iterator[Columns]:
        """The metrics of a run, up to its last whole row. Others wait if they need the same log, and only then."""
        with self._lock:
            columns = self._columns.pop(path, None) or Columns()
            self._columns = {**dict(list(self._columns.items())[1 - COMPARED :]), path: columns}
        with columns.lock:
            columns.read(path / log.METRICS)
            yield columns

    def curve(self, run: str, metric: str, x: str = "step", points: int = POINTS) -> dict[str, Any]:
        """`x`, `low`, `high` and `last` of one metric over "step" or "seconds", with at most `points` points.

        Of each group of neighboring rows its least and greatest value are kept, so that no spike is lost.
        """
        if x not in ("step", "seconds"):
            raise unknown("x axis", x, ("step", "seconds"))
        with self._read(self.path(run)) as columns:
            if metric not in columns.values:
                raise unknown("metric", metric, sorted(columns.values))
            if (metric, x, points) not in columns.drawn:
                where, values = (
                    np.array(part) for part in columns.values[metric]
                )  # copies: a viewed array cannot grow
                at = np.array(columns.steps if x == "step" else columns.seconds)[where]
                finite = np.isfinite(values)
                drawn = {"rows": int(finite.sum()), **decimate(at[finite], values[finite], points)}
                columns.drawn[metric, x, points] = drawn
            return {"run": run, "metric": metric, "x_axis": x, **columns.drawn[metric, x, points]}

    def bands(self, runs: Sequence[str], metric: str, x: str = "step") -> list[dict[str, Any]]:
        """The interquartile mean and its 95% interval of runs of the same algorithm and environment.

        Runs that share no steps yet have none.
        """
        from foresight.runtime.results import plot

        found = []
        for label, group in plot.groups([self.path(run) for run in runs]).items():
            with contextlib.suppress(UserError):
                if len(group) > 1:
                    band = plot.group_band(label, group, metric, x)
                    arrays = {name: getattr(band, name).tolist() for name in ("steps", "middle", "low", "high")}
                    found.append({"label": label, "runs": band.runs, **arrays})
        return found

    def samples(self, run: str) -> list[dict[str, Any]]:
        """All logged completions of a run, for `samples.page` and `samples.conversation`."""
        file = self.path(run) / SAMPLES
        with self._lock:
            found = self._samples.pop(file, None) or samples.Log()
            self._samples = {**dict(list(self._samples.items())[-3:]), file: found}  # texts may be large
        with found.lock:
            return list(found.read(file))

    def talking(self) -> list[dict[str, Any]]:
        """Id, name, algorithm and environment of the runs that logged conversations."""
        found = []
        for row in self.table():
            with contextlib.suppress(OSError), (self.path(row["id"]) / SAMPLES).open("rb") as stream:
                head = [_row(stream.readline(LONGEST_ROW)) for _ in range(HEAD)]
                if samples.talks([one for one in head if one is not None]):
                    found.append({key: row[key] for key in ("id", "name", "algorithm", "env", "state")})
        return found

    def settings(self, run: str) -> dict[str, Any]:
        """The settings of a run by their names; those of the algorithm without a prefix."""
        return _flat(_yaml(self.path(run) / "config.yaml"))

    def differences(self, runs: Sequence[str]) -> list[dict[str, Any]]:
        """The settings in which runs differ: `name`, and `values` by run."""
        settings = [self.settings(run) for run in runs]
        names = list(dict.fromkeys(name for one in settings for name in one))
        found = []
        for name in names:
            values = [one.get(name) for one in settings]
            if any(value != values[0] for value in values):
                found.append({"name": name, "values": values})
        return found

    def file(self, run: str, name: str) -> Path:
        """A picture or video of a run. Raises UserError for anything else, and for paths out of its folder."""
        root = (self.path(run) / "media").resolve()
        file = resolved(self.path(run) / name)
        if not file.is_relative_to(root) or file.suffix not in PICTURES or not os.path.isfile(file):
            raise UserError("There is no such picture or video in this run.")
        return file

    def saved(self, run: str) -> str:
        """The name of the newest checkpoint of a run; "" if there is none."""
        try:
            names = [entry.name for entry in os.scandir(self.path(run) / "checkpoints") if entry.is_dir()]
        except (OSError, UserError):
            return ""
        return max((name for name in names if name.startswith("step-")), default="")

    def stamps(self) -> dict[str, float]:
        """When each run changed last, by id: what a live page watches."""
        return {
            identity(run): max(stamp(run / log.METRICS), stamp(run / "summary.json"), self._ended.get(run, 0.0))
            for run in self.find()
        }


def identity(run: Path) -> str:
    """The id of a run in URLs: its name, and a part of the hash of its path. It holds letters, digits, - and _ only."""
    plain = "".join(sign if sign.isascii() and (sign.isalnum() or sign in "-_") else "-" for sign in run.name)[:60]
    return f"{plain}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"


def resolved(path: Path) -> Path:
    """The path without links and dots; a path that no file can have, with a null byte, as it is."""
    try:
        return path.resolve()
    except ValueError:
        return path


def decimate(x: np.ndarray, y: np.ndarray, points: int) -> dict[str, list[float]]:
    """At most `points` groups of neighboring rows: `x` of the last of each, `low`, `high` and `last` of its values."""
    if len(x) == 0:
        return {"x": [], "low": [], "high": [], "last": []}
    edges = np.unique(np.linspace(0, len(x), min(max(points, 1), len(x)) + 1).astype(int))
    starts, ends = edges[:-1], edges[1:] - 1
    return {
        "x": x[ends].tolist(),
        "low": np.minimum.reduceat(y, starts).tolist(),
        "high": np.maximum.reduceat(y, starts).tolist(),
        "last": y[ends].tolist(),
    }


def _walk(folder: Path, depth: int, marks: Sequence[str] = RUN) -> Iterator[Path]:
    """Folders at most `depth` levels below that hold a file of a name in `marks`; these and runs are not searched."""
    # Not `Path.is_file`, which raises in a folder that may not be searched.
    if any(os.path.isfile(folder / mark) for mark in marks):
        yield folder
        return
    if depth == 0 or any(os.path.isfile(folder / mark) for mark in RUN):
        return
    try:
        inner = [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for path in inner:
        if not Path(path).name.startswith("."):
            yield from _walk(Path(path), depth - 1, marks)


def _short(path: Path) -> Path:
    """A path below the working directory without it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _facts(run: Path) -> dict[str, Any] | None:
    """The row of a run in the table, or None if it has no settings."""
    config = _yaml(run / "config.yaml")
    if not config:
        return None
    rows = _last_rows(run / log.METRICS, RECENT)
    before, last = [{}, {}, *rows][-2:]
    summary = _summary(run, last.get("step", 0))
    health = Health()
    warnings = [text for row in rows for text in health.check(int(row["step"]), row)]
    algorithm = Path(str(config.get("algorithm", ""))).stem
    entry = catalog.algorithms().get(algorithm)
    given = config.get("config")
    fields: dict[str, Any] = given if isinstance(given, dict) else {}
    shown = next((name for name in (entry.metrics if entry else ()) if is_number(last.get(name))), None)
    return {
        "id": identity(run),
        "name": run.name,
        "algorithm": algorithm,
        "kind": config.get("kind") or config.get("world"),  # the name in older runs
        "env": config.get("env"),
        "preset": config.get("preset"),
        "seed": config.get("seed"),
        "options": {name: fields.get(name) for name in NETWORK},
        "step": last.get("step", 0),
        "steps": summary.get("steps") or fields.get("steps"),
        "unit": summary.get("unit") or (entry.unit if entry else "steps"),
        "seconds": summary.get("seconds") or last.get("seconds", 0),
        "metric": shown,
        "value": last.get(shown) if shown else None,
        "evaluation": summary.get("evaluation"),
        "baseline": summary.get("baseline"),
        "unhealthy": warnings,
        "state": "finished" if summary else "unfinished",
        "interval": number(last.get("seconds")) - number(before.get("seconds")) if before else 0.0,
        "changed": max(stamp(run / log.METRICS), stamp(run / "config.yaml"), stamp(run / "summary.json")),
    }


def _summary(run: Path, step: int) -> dict[str, Any]:
    """The summary of a run; none while it continues after its end, as after `foresight resume RUN --steps N`."""
    summary = read_json(run / "summary.json")
    return {} if step > number(summary.get("steps"), step) else summary


def _last_rows(file: Path, count: int) -> list[dict[str, Any]]:
    """The last whole rows of a log, at most `count`, in order."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL))
            chunk = stream.read()
    except OSError:
        return []
    lines = chunk[: chunk.rfind(b"\n") + 1].splitlines()[-count - 1 :]
    return [row for line in lines if (row := _row(line)) is not None][-count:]


def _files(run: Path) -> dict[str, int]:
    """How many checkpoints, pictures and videos a run has."""
    names = [path.name for path in _inside(run / "checkpoints") if path.name.startswith("step-")]
    shown = [path.suffix for path in _inside(run / "media", 2)]
    videos = sum(suffix in VIDEOS for suffix in shown)
    return {"checkpoints": len(names), "videos": videos, "pictures": sum(one in PICTURES for one in shown) - videos}


def _inside(folder: Path, depth: int = 1) -> Iterator[Path]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        yield Path(entry.path)
        if depth > 1 and entry.is_dir(follow_symlinks=False):
            yield from _inside(Path(entry.path), depth - 1)


def _parsed(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The rows of lines; those that are none are left out. Whole logs are read at once, which is twice as fast."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]") if len(lines) > 1 else [json.loads(lines[0])]
    except (ValueError, IndexError, RecursionError):
        found = []
    if len(found) != len(lines) or not all(_is_row(row) for row in found):
        found = [row for line in lines if (row := _row(line)) is not None]
    return found


def _is_row(row: object) -> bool:
    """Whether this is a row of a log: it has a step, and no whole number that is too large for a float."""
    if not isinstance(row, dict) or not is_number(row.get("step")) or not math.isfinite(row["step"]):
        return False
    return all(is_number(value) for value in row.values() if type(value) is int)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _yaml(file: Path) -> dict[str, Any]:
    try:
        return catalog.read_mapping(file)
    except UserError:
        return {}


def _flat(document: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            found |= _flat(value, "" if name == "config" else f"{before}{name}.")
        else:
            found[before + str(name)] = value
    return found


def stamp(file: Path) -> float:
    """When a file was written last; 0 if it is not there."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
