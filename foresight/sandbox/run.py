"""`run`: calls of a function of a foreign program, each with its limits; `protections`: what holds on this machine."""

from __future__ import annotations

import functools
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresight.errors import UserError, at_least
from foresight.sandbox import confine, process

START = 20.0  # seconds for the process to start and to confine itself
# As `python -I` (no PYTHON* variables, no user's packages, no working directory on the path), without site packages.
# -I itself would also ignore PYTHONHASHSEED, and then the order of sets would differ from run to run.
PYTHON = ("-P", "-s", "-S", "-B")
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
STATUSES = ("ok", "exception", "timeout", "memory", "output", "value", "ended")
MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What one call may use."""

    seconds: float = 30.0  # of wall clock per call
    memory_mib: int = 512  # address space of the process
    disk_mib: int = 8  # of all files together, which are kept in memory
    files: int = 32  # open at the same time
    threads: int = 16
    printed: int = 65_536  # characters
    result_mib: int = 16  # JSON of all results of a process

    def __post_init__(self) -> None:
        """Raises UserError for a limit that nothing can keep."""
        at_least(0.01, self, "seconds")
        at_least(64, self, "memory_mib")
        at_least(1, self, "disk_mib", "threads", "result_mib")
        at_least(8, self, "files")
        at_least(0, self, "printed")


@dataclass(frozen=True)
class Result:
    """The outcome of one call. Its value is untrusted.

    `status`: "ok"; "exception" (`error` is its last line, `trace` its traceback); "timeout"; "memory"; "output" (it
    printed or returned too much); "value" (it returned what is not JSON); "ended" (the process ended during the call).
    """

    status: str
    value: Any = None
    error: str = ""
    trace: str = ""
    printed: str = ""
    seconds: float = 0.0


def run(source: str, function: str, calls: Sequence[Sequence[Any]], limits: Limits | None = None) -> list[Result]:
    """Run the Python `source` and call its `function` with each list of arguments; one `Result` per call.

    Arguments and values are JSON. Every call starts with a new namespace. Calls share a process as long as it lives;
    one that is killed takes no other call with it. Raises UserError for arguments that are not JSON.
    """
    limits = limits or Limits()
    try:
        json.dumps([list(call) for call in calls])
    except (TypeError, ValueError) as error:
        raise UserError(f"The arguments of a call in the sandbox must be JSON: {error}.") from error
    results: list[Result] = []
    while len(results) < len(calls):
        results += _process(source, function, [list(call) for call in calls[len(results) :]], limits)[1]
    return results


@functools.cache
def protections() -> dict[str, bool]:
    """The layers of `confine.LAYERS` that hold on this machine, tried in a process."""
    held = _process("def nothing():\n    return 0\n", "nothing", [[]], Limits(seconds=10))[0]
    return {layer: layer in held for layer in confine.LAYERS}


def _process(source: str, function: str, calls: list[list[Any]], limits: Limits) -> tuple[list[str], list[Result]]:
    """The layers that held, and the results up to the first call that the process did not survive."""
    with tempfile.TemporaryDirectory(prefix="foresight-") as place, tempfile.TemporaryFile() as request:
        wanted = {
            "source": source,
            "function": function,
            "calls": calls,
            "place": place,
            "printed": limits.printed,
            "limits": {
                "cpu": int(limits.seconds * len(calls)) + 2,
                "memory": limits.memory_mib * MIB,
                "file": limits.disk_mib * MIB,
                "disk": limits.disk_mib * MIB,
                "files": limits.files,
                "threads": limits.threads,
            },
        }
        request.write(json.dumps(wanted).encode())
        request.seek(0)
        reader, writer = os.pipe()
        try:
            child = process.start(
                [sys.executable, *PYTHON, str(Path(__file__).with_name("child.py")), str(writer)],
                ENVIRONMENT, (writer,), request, quiet=True,
            )  # fmt: skip
        finally:
            os.close(writer)
        try:
            return _collect(child, reader, len(calls), limits)
        finally:
            os.close(reader)
            process.kill(child)


def _collect(child: Any, reader: int, count: int, limits: Limits) -> tuple[list[str], list[Result]]:
    held: list[str] | None = None
    results: list[Result] = []
    waiting, total = b"", 0
    deadline = time.monotonic() + START
    while len(results) < count:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            if held is None:
                raise UserError(f"The sandbox did not start within {START:g} seconds: is the machine overloaded?")
            error = f"it did not answer within {limits.seconds:g} seconds"
            return held, [*results, Result("timeout", error=error, seconds=limits.seconds)]
        data = os.read(reader, 1 << 16)
        total += len(data)
        if not data:
            code = process.kill(child, process.CLOSING)
            if held is None:
                raise UserError(f"The process of the sandbox ended before its program, {process.ending(code)}.")
            return held, [*results, Result("ended", error=f"its process ended, {process.ending(code)}")]
        if total > limits.result_mib * MIB:
            return held or [], [*results, Result("output", error=f"it returned more than {limits.result_mib} MiB")]
        *lines, waiting = (waiting + data).split(b"\n")
        for line in lines:
            if held is None:
                held = [str(layer) for layer in json.loads(line)["held"]]
            else:
                results.append(_result(line))
            deadline = time.monotonic() + limits.seconds
    return held or [], results[:count]


def _result(line: bytes) -> Result:
    """A line of the child, which may have been written by the program."""
    try:
        reply = json.loads(line)
        error, trace, printed = (str(reply.get(key, "")) for key in ("error", "trace", "printed"))
        seconds = float(reply.get("seconds", 0.0))
        made = Result(str(reply["status"]), reply.get("value"), error, trace, printed, seconds)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return Result("ended", error="it wrote something else than a result")
    return made if made.status in STATUSES else Result("ended", error="it wrote something else than a result")
