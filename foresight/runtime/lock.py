"""One process trains a run directory: the lock that it holds, which ends with it, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from foresight.errors import BusyError, UserError

FILE = ".lock"  # in the run directory while it is trained, with the id of the process
_HELD: set[int] = set()  # file descriptors


@contextlib.contextmanager
def held(run: Path) -> Iterator[None]:
    """Hold the lock of a run directory.

    Children do not hold it: it is closed in one that is forked, and not inherited by a program. A file system without
    locks has none. Raises BusyError if the run is being trained, and UserError if the directory cannot be written.
    """
    with hold(run / FILE, f"{run} is being trained"):
        yield


@contextlib.contextmanager
def hold(file: Path, busy: str) -> Iterator[None]:
    """The same for any file that is made as a lock; `busy` begins a BusyError's message: "RUN is being trained"."""
    handle = _acquire(file, busy)
    try:
        yield
    finally:
        if handle in _HELD:  # not in a forked child
            with contextlib.suppress(OSError):
                file.unlink()
            _release(handle)


def check(run: Path) -> None:
    """Raise BusyError if a process trains the run."""
    if (run / FILE).exists():
        with held(run):
            pass


def _acquire(file: Path, busy: str) -> int:
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"Cannot write to {file.parent}: {error.strerror or error}.") from error
        _HELD.add(handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(handle, 20).decode(errors="replace").strip()
            _release(handle)
            who = f"another process (pid {owner})" if owner else "another process"
            raise BusyError(f"{busy} by {who}. Wait for it, or stop it.") from error
        except OSError:  # this file system has no locks
            return handle
        if _is(handle, file):
            with contextlib.suppress(OSError):  # a full disk
                os.ftruncate(handle, 0)
                os.write(handle, f"{os.getpid()}\n".encode())
            return handle
        _release(handle)  # the process that held it has deleted it


def _is(handle: int, file: Path) -> bool:
    """Whether the open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False


def _release(handle: int) -> None:
    _HELD.discard(handle)
    os.close(handle)


def _after_fork() -> None:
    for handle in list(_HELD):
        _release(handle)


os.register_at_fork(after_in_child=_after_fork)
