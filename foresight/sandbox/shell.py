"""`run`: a shell command on a tree of files, with limits; the tree goes in and comes out as data.

Nothing of the command lives on: each runs in a process of its own, on a file system in memory of its own. So a tree
may be kept, compared and copied as the dict that it is. Unlike `sandbox.run` it may start the system's programs. That
needs all of `NEEDED`: without them nothing is run.
"""

from __future__ import annotations

import functools
import json
import os
import select
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from foresight.errors import UserError, at_least
from foresight.sandbox import process
from foresight.sandbox.run import ENVIRONMENT, MIB, PYTHON, START

NEEDED = ("limits", "namespaces", "processes", "files", "landlock", "seccomp")
LAYERS = ("limits", "user", "namespaces", "processes", "files", "landlock", "seccomp")
STATUSES = ("ok", "timeout", "output", "failed")
LONGEST = 200  # characters of a path


@dataclass(frozen=True)
class Limits:
    """What one command may use."""

    seconds: float = 10.0  # of wall clock
    memory_mib: int = 256  # address space of each process
    disk_mib: int = 8  # of all files together, which are kept in memory
    open_files: int = 64  # of each process
    processes: int = 16
    printed: int = 16_384  # bytes
    tree_bytes: int = 1_000_000  # of all files that come out
    tree_files: int = 1_000

    def __post_init__(self) -> None:
        """Raises UserError for a limit that nothing can keep."""
        at_least(0.01, self, "seconds")
        at_least(16, self, "memory_mib", "open_files")
        at_least(1, self, "disk_mib", "tree_bytes", "tree_files")
        at_least(4, self, "processes")
        at_least(0, self, "printed")


@dataclass(frozen=True)
class Outcome:
    """What a command did. All of it is untrusted.

    `status`: "ok" (it ended, with the exit `code`); "timeout"; "output" (the tree is too large, or a path in it too
    long); "failed". `files` is the tree then: texts by path, and "" for an empty directory, whose path ends with `/`.
    In the last two cases it is as it was.
    """

    status: str
    code: int = 0
    printed: str = ""
    files: dict[str, str] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0


def run(command: str, files: dict[str, str], limits: Limits | None = None) -> Outcome:
    """Run `command` with `/bin/sh` in a tree of `files`.

    Raises UserError for a path that is not inside the tree, and where a shell cannot be protected.
    """
    require()
    for path in files:
        check(path)
    return _process(command, files, limits or Limits())[1]


def check(path: str) -> None:
    """Raise UserError unless `path` is inside a tree: relative, without `..`, of 1 to `LONGEST` characters."""
    parts = PurePosixPath(path).parts
    if not 0 < len(path) <= LONGEST or not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise UserError(
            f"{path[:80]!r} is no path in the tree: write a relative one without '..', such as notes/a.txt."
        )


@functools.cache
def protections() -> dict[str, bool]:
    """The layers that hold a shell on this machine, tried in a process."""
    try:
        held = _process(None, {}, Limits(seconds=5))[0]
    except (UserError, OSError):
        held = []
    return {layer: layer in held for layer in LAYERS}


def require() -> None:
    """Raise UserError where a shell cannot be protected."""
    if lacks := [layer for layer in NEEDED if not protections()[layer]]:
        raise UserError(
            f"A shell cannot be protected on this machine: it lacks {', '.join(lacks)} (see docs/sandbox.md). Use a "
            "Linux of version 6.2 or newer with user namespaces and Landlock."
        )


def _process(command: str | None, files: dict[str, str], limits: Limits) -> tuple[list[str], Outcome]:
    """The layers that held, and the outcome; without a command only the layers."""
    with tempfile.TemporaryDirectory(prefix="foresight-") as place, tempfile.TemporaryFile() as request:
        wanted = {
            "command": command, "files": files, "place": place, "needed": NEEDED, "seconds": limits.seconds,
            "printed": limits.printed, "most": limits.tree_bytes, "count": limits.tree_files,
            "longest": LONGEST,
            "limits": {
                "cpu": int(limits.seconds) + 2, "memory": limits.memory_mib * MIB, "file": limits.disk_mib * MIB,
                "disk": limits.disk_mib * MIB, "files": limits.open_files, "threads": limits.processes,
            },
        }  # fmt: skip
        request.write(json.dumps(wanted).encode())
        request.seek(0)
        reader, writer = os.pipe()
        try:
            child = process.start(
                [sys.executable, *PYTHON, str(Path(__file__).with_name("shell_child.py")), str(writer)],
                ENVIRONMENT, (writer,), request, quiet=True,
            )  # fmt: skip
        finally:
            os.close(writer)
        try:
            lines = _lines(reader, time.monotonic() + START + limits.seconds, 8 * limits.tree_bytes + MIB)
        finally:
            os.close(reader)
            process.kill(child)
    held = [str(layer) for layer in lines[0].get("held", ())] if lines else []
    if len(lines) < 2:
        return held, Outcome("failed", files=files, error="the process of the shell ended")
    return held, _outcome(lines[1], files)


def _lines(reader: int, deadline: float, most: int) -> list[dict[str, Any]]:
    """What the child writes until it ends: JSON objects. Nothing of what follows something else."""
    data = b""
    while (left := deadline - time.monotonic()) > 0 and len(data) <= most:
        if not select.select([reader], [], [], left)[0] or not (part := os.read(reader, 1 << 16)):
            break
        data += part
    found = []
    for line in data.split(b"\n")[:2]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(value, dict):
            break
        found.append(value)
    return found


def _outcome(reply: dict[str, Any], before: dict[str, str]) -> Outcome:
    try:
        status, files = str(reply["status"]), reply.get("files", before)
        if status not in STATUSES or not isinstance(files, dict):
            raise ValueError(status)
        for path, text in files.items():
            check(path)
            if not isinstance(text, str):
                raise ValueError(path)
        return Outcome(
            status, int(reply.get("code", 0)), str(reply.get("printed", "")), files, str(reply.get("error", "")),
            float(reply.get("seconds", 0.0)),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, OverflowError, UserError):
        return Outcome("failed", files=before, error="the process of the shell wrote something else than an outcome")
