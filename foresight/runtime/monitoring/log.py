"""The log of a run: metrics, TensorBoard events, completions, and optional services."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from foresight.errors import UserError, unknown

METRICS = "metrics.jsonl"
SAMPLES = "media/samples.jsonl"
WANDB_ID = "wandb-id"  # the file in a run directory with the id of the run at wandb
SERVICES = {name: f"pip install 'foresight[{name}]'" for name in ("wandb", "trackio")}


class Log:
    """The writer of one run directory.

    `services` also receive the metrics ("wandb", "trackio") and show `config`. Rows are flat,
    `{"step", "seconds", **metrics}`, one line each, and flushed at once: killing the process loses none of them.
    Floats are written in full, so that they are read back bit by bit.

    Raises `UserError` if a service is unknown, not installed or cannot begin (no API key), or the directory cannot be
    written.
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
        """Write one row. `seconds` is the training time so far; "samples" go to their own file."""
        values = {key: value for key, value in metrics.items() if key != "samples"}
        self._write(METRICS, {"step": step, "seconds": seconds, **values})
        if metrics.get("samples"):
            self.samples(step, metrics["samples"])
        scalars = {k: float(v) for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        if self._use_tensorboard:
            try:
                if self._tensorboard is None:
                    self._tensorboard = _TensorBoard(self.directory / "tensorboard", self._purge)
                self._tensorboard.row(step, scalars)
            except OSError as error:
                raise _unwritable(self.directory, error) from error
        for board in self._boards:
            board.log({**scalars, "seconds": seconds}, step=step)

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append completions (prompt, completion, reward, ...) to `media/samples.jsonl`."""
        for row in rows:
            self._write(SAMPLES, {"step": step, **row})

    def truncate(self, step: int) -> None:
        """Delete the rows after `step`, which a resumed run writes again, and a half-written row."""
        for name in (METRICS, SAMPLES):
            self._close_file(name)
            path = self.directory / name
            if not path.exists():
                continue
            kept = [line for line, row in _lines(path) if row["step"] <= step]
            draft = path.with_suffix(".draft")
            try:
                draft.write_text("".join(kept), encoding="utf-8")
                os.replace(draft, path)  # atomic
            except OSError as error:
                raise _unwritable(self.directory, error) from error
        self._purge = step + 1
        self._close_tensorboard()

    def close(self) -> None:
        """Flush and close everything; closing twice is allowed."""
        for name in (METRICS, SAMPLES):
            self._close_file(name)
        self._close_tensorboard()
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

    def _close_file(self, name: str) -> None:
        file = self._metrics if name == METRICS else self._samples
        if file is not None:
            with contextlib.suppress(OSError):  # it flushes again what a full disk has refused, which is known
                file.close()
        if name == METRICS:
            self._metrics = None
        else:
            self._samples = None

    def _close_tensorboard(self) -> None:
        if self._tensorboard is not None:
            with contextlib.suppress(OSError):  # as for the files
                self._tensorboard.close()
            self._tensorboard = None


def read(directory: str | Path, name: str = METRICS) -> list[dict[str, Any]]:
    """The rows of a run directory, oldest first. A last line cut short by a kill is left out."""
    path = Path(directory) / name
    rows = [row for _, row in _lines(path)] if path.exists() else []
    return [_restore(row) for row in rows] if name == METRICS else rows


class _TensorBoard:
    """Event files without torch's writer, whose import takes seconds. Only scalars are written."""

    def __init__(self, directory: Path, purge: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory), flush_secs=30)
        if purge is not None:  # TensorBoard hides events of earlier sessions from this step on
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
        raise UserError(f"Logging to {name} needs its package. Install it with: {SERVICES[name]}") from error
    options = {"dir": str(directory), "id": _wandb_id(directory), "resume": "allow"} if name == "wandb" else {}
    try:
        return module.init(project="foresight", name=directory.name, config=config, **options)
    except Exception as error:  # of any class: each service has its own
        reason = str(error).rstrip(".") or type(error).__name__
        raise UserError(f"Logging to {name} cannot begin: {reason}. Fix this, or leave out --log {name}.") from error


def _wandb_id(directory: Path) -> str:
    """The id of the run at wandb, the same after a resume. Folders of other runs may have the name of this one."""
    file = directory / WANDB_ID
    try:
        known = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        if not known:
            known = secrets.token_hex(8)
            file.write_text(f"{known}\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(directory, error) from error
    return known


def _open(path: Path) -> TextIO:
    if path.exists() and path.stat().st_size:  # after a kill the last line may be incomplete: start a new one
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a", encoding="utf-8", errors="replace", buffering=1)  # half a surrogate pair ends no run


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and _is_step(row.get("step")) and line.endswith("\n"):
                rows.append((line, row))
    return rows


def _is_step(value: object) -> bool:
    return isinstance(value, int | float) and -(2**63) < value < 2**63


_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


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
    return {k: _NONFINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()}


def _unwritable(directory: Path, error: OSError) -> UserError:
    return UserError(f"Cannot write to {directory}: {error.strerror or error}. Free space or choose another --out.")
