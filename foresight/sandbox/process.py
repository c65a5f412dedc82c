"""A child process that leads its own session, so that it is killed together with everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any

CLOSING = 0.2  # seconds for a process to exit by itself


def start(
    command: Sequence[str],
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    stdin: IO[Any] | None = None,
    quiet: bool = False,
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a new session and process group. `quiet`: what it prints goes nowhere."""
    output = subprocess.DEVNULL if quiet else None
    return subprocess.Popen(
        command, env=dict(env), pass_fds=tuple(pass_fds), stdin=stdin, stdout=output, stderr=output, cwd=cwd,
        start_new_session=True,
    )  # fmt: skip


def kill(process: subprocess.Popen[bytes], patience: float = 0.0) -> int | None:
    """Kill the process and its group; returns its exit code if it exited by itself within `patience` seconds.

    What it started in its group is killed also if it exited before.
    """
    code: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(patience)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return code


def ending(code: int | None) -> str:
    """The exit code of a process in words."""
    if code is None or code >= 0:
        return "closing its pipe" if code is None else f"with the exit code {code}"
    name = {one.value: one.name for one in signal.Signals}.get(-code, f"signal {-code}")
    return f"killed by {name}" + (", perhaps because memory ran out" if name == "SIGKILL" else "")
