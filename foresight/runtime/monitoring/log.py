"""What a run writes down while it runs: metrics, TensorBoard events, completions, and services if asked."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from foresight.errors import UserError, unknown

METRICS = "metrics.jsonl"
SAMPLES = "media/samples.jsonl"
SERVICES = {name: f"pip install 'foresight[{name}]'" for name in ("wandb", "trackio")}


class Log:
    """The writer of one run directory.

    `services` names what else receives the numbers ("wandb", "trackio"); `config` is what they show beside them.
    Rows are flat, `{"step", "seconds", **metrics}`, one line each, and on the disk as soon as they are written:
    killing the process loses none of them. Floats are written in full, so that reading them gives the same bits.

    Raises `UserError` where a service is unknown or not installed, or the directory cannot be written.
    """

    def __init__(
        self,
        directory: str | Path,
        services: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        tensorboard: bool = True,
    ) -> None:
        self.directory = Path(directory)
        self._boards: list[Any] = []
        self._purge: int | None = None
        self._tensorboard: _TensorBoard | None = None
        self._use_tensorboard = tensorboard
        self._metrics: TextIO | None = None
        self._samples: TextIO | None = None
        try:
            (self.directory / "media").mkdir(parents=True, exist_ok=True)
            self._metrics = _open(self.directory / METRICS)
        except OSError as error:
            raise _unwritable(self.directory, error) from error
        for name in services:
            self._boards.append(_service(name, self.directory, dict(config or {})))

    def row(self, step: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Write one row. `seconds` is training time since the beginning of the run; "samples" go to their own file."""
        numbers = {key: value for key, value in metrics.items() if key != "samples"}
        self._write(METRICS, {"step": step, "seconds": seconds, **numbers})
        if metrics.get("samples"):
            self.samples(step, metrics["samples"])
        scalars = {k: float(v) for k, v in numbers.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        if self._use_tensorboard:
            if self._tensorboard is None:
                self._tensorboard = _TensorBoard(self.directory / "tensorboard", self._purge)
            self._tensorboard.row(step, scalars)
        for board in self._boards:
            board.log({**scalars, "seconds": seconds}, step=step)

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append completions (prompt, completion, reward, ...) to `media/samples.jsonl`."""
        for row in rows:
            self._write(SAMPLES, {"step": step, **row})

    def truncate(self, step: int) -> None:
        """Forget what was written after `step`: a resumed run writes those rows again. A half-written row goes too."""
        for name in (METRICS, SAMPLES):
            self._shut(name)
            path = self.directory / name
            if not path.exists():
                continue
            kept = [line for line, row in _lines(path) if row["step"] <= step]
            draft = path.with_suffix(".draft")
            try:
                draft.write_text("".join(kept), encoding="utf-8")
                os.replace(draft, path)  # whole or not at all
            except OSError as error:
                raise _unwritable(self.directory, error) from error
        self._purge = step + 1
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def close(self) -> None:
        """Flush and close everything; closing twice is allowed."""
        for name in (METRICS, SAMPLES):
            self._shut(name)
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        for board in self._boards:
            board.finish()
        self._boards = []

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, name: str, row: dict[str, Any]) -> None:
        try:
            file = self._metrics if name == METRICS else self._samples
            if file is None:
                file = _open(self.directory / name)
                if name == METRICS:
                    self._metrics = file
                else:
                    self._samples = file
            file.write(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise _unwritable(self.directory, error) from error

    def _shut(self, name: str) -> None:
        file = self._metrics if name == METRICS else self._samples
        if file is not None:
            file.close()
        if name == METRICS:
            self._metrics = None
        else:
            self._samples = None


def read(directory: str | Path, name: str = METRICS) -> list[dict[str, Any]]:
    """The rows of a run directory, oldest first; a last line that was cut by a kill is left out."""
    path = Path(directory) / name
    rows = [row for _, row in _lines(path)] if path.exists() else []
    return [_restore(row) for row in rows] if name == METRICS else rows


class _TensorBoard:
    """Event files without torch's writer: importing that one costs seconds, and scalars are all we send."""

    def __init__(self, directory: Path, purge: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory), flush_secs=30)
        if purge is not None:  # TensorBoard hides what an earlier session wrote at or after this step
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=purge, session_log=start))

    def row(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


def _service(name: str, directory: Path, config: dict[str, Any]) -> Any:
    if name not in SERVICES:
        raise unknown("log service", name, SERVICES)
    try:
        module: Any = __import__(name)
    except ImportError as error:
        raise UserError(f"Logging to {name} needs its package: {SERVICES[name]}") from error
    options = {"dir": str(directory), "id": directory.name, "resume": "allow"} if name == "wandb" else {}
    return module.init(project="foresight", name=directory.name, config=config, **options)


def _open(path: Path) -> TextIO:
    if path.exists() and path.stat().st_size:  # after a kill, the next row must not be glued to half a line
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a", encoding="utf-8", buffering=1)


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and "step" in row and line.endswith("\n"):
                rows.append((line, row))
    return rows


_STRANGE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _plain(value: Any) -> Any:
    """JSON has no NaN: it is written as the string that `float` reads back."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if hasattr(value, "item"):
        return _plain(value.item())
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")


def _restore(row: dict[str, Any]) -> dict[str, Any]:
    return {k: _STRANGE.get(v, v) if isinstance(v, str) else v for k, v in row.items()}


def _unwritable(directory: Path, error: OSError) -> UserError:
    return UserError(f"Cannot write in '{directory}' ({error.strerror or error}). Make room or choose another --out.")
