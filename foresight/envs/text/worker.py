"""A user's function in a process of its own, so that one that hangs or dies does not take the run with it.

python -m foresight.envs.text.worker PLACE DESCRIPTOR    is that process: it answers over a pipe until that is closed
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from foresight.errors import LostError, UserError, unknown

GIVEN = "given from Python"  # instead of the place of a function that cannot be found again
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # which are for the run, also where all its processes get them
CLOSING = 0.2  # seconds in which a process whose pipe is closed may end by itself
START = 120.0  # seconds in which the process must have found its function: importing may take long


def function(place: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function at `file.py:name` or `package.module:name`, or another callable object there.

    What it imports is looked for beside the file, too, and in the working directory. Raises UserError where there is
    none, and where importing it fails.
    """
    if callable(place):
        return place
    where, _, name = str(place).rpartition(":")
    if str(place).startswith(GIVEN):
        raise UserError(
            f"The reward function of this run was {place}, and is not found again: put it into a file, and write "
            "reward: FILE.py:NAME into the run's config.yaml, under env_options."
        )
    if not where or not name:
        raise UserError(f"'{place}' does not say where the reward function is: write file.py:name or module:name.")
    file = Path(where) if where.endswith(".py") else None
    if file is not None and not file.is_file():
        raise UserError(f"There is no file {where} to take the reward function '{name}' from.")
    module = _imported(where, file)
    found = getattr(module, name, None)
    if isinstance(found, type):
        raise UserError(f"'{name}' in {where} is a class: make an object of it there (score = {name}()) and name that.")
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and not isinstance(value, type)]
        raise unknown("reward function", name, functions)
    return found


def place_of(given: Callable[..., Any]) -> str:
    """Where `function` finds what was given; in words (that begin with `GIVEN`) where it could not."""
    name = str(getattr(given, "__qualname__", type(given).__name__))
    try:
        file = inspect.getsourcefile(given)  # type: ignore[arg-type]
    except TypeError:  # an object
        file = None
    module = sys.modules.get(str(getattr(given, "__module__", "")))
    if file is None or not Path(file).is_file() or getattr(module, name, None) is not given:
        return f"{GIVEN} ({name})"
    return f"{given.__module__ if '.' in given.__module__ else Path(file).resolve()}:{name}"


def _imported(where: str, file: Path | None) -> ModuleType:
    """The module in a file, or by its name. Raises UserError, with the line where there is one, if that fails."""
    for folder in (os.getcwd(), *([str(file.resolve().parent)] if file else [])):
        if folder not in sys.path:
            sys.path.append(folder)
    try:
        if file is None:
            importlib.invalidate_caches()
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(file.stem, where)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        before = sys.modules.setdefault(spec.name, module)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            if before is module:
                del sys.modules[spec.name]
            raise
        return module
    except (Exception, SystemExit) as error:
        lines = [f"line {frame.lineno}" for frame in traceback.extract_tb(error.__traceback__) if _same(frame, file)]
        told = f"{type(error).__name__}: {error}" + (f", {lines[-1]}" if lines else "")
        raise UserError(f"Cannot import {where}, where the reward function should be: {told}.") from error


def _same(frame: traceback.FrameSummary, file: Path | None) -> bool:
    return file is not None and Path(frame.filename).resolve() == file.resolve()


class Worker:
    """The function at `place`, called in another process and given up after `limit` seconds a call.

    The process starts with the first call and anew after one that failed. What the function raises is raised here.
    Raises LostError if it takes too long or its process ends.
    """

    def __init__(self, place: str, limit: float) -> None:
        self.place, self.limit = place, limit
        self.__name__ = place.rpartition(":")[2]
        self._pipe: Connection | None = None
        self._end: Callable[[], Any] = lambda: None

    def __call__(self, **arguments: Any) -> Any:
        """The function of these arguments, which must be such as can be pickled."""
        if self._pipe is None:
            self._start()
            try:
                self._answer(START, "was not imported")
            except BaseException:
                self._stop()
                raise
        return self._answer(self.limit, "did not answer", arguments)

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        number = theirs.fileno()
        words = [sys.executable, "-m", "foresight.envs.text.worker", self.place, str(number)]
        path = os.pathsep.join(entry or "." for entry in sys.path)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # inherited: it must not be stopped while it starts
        try:
            process = subprocess.Popen(words, pass_fds=[number], env={**os.environ, "PYTHONPATH": path})
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._end = weakref.finalize(self, _kill, process, self._pipe)

    def _answer(self, limit: float, what: str, arguments: dict[str, Any] | None = None) -> Any:
        assert self._pipe is not None
        try:
            if arguments is not None:
                self._pipe.send(arguments)
            told = self._pipe.recv() if self._pipe.poll(limit) else None
        except (EOFError, OSError) as error:
            code = self._stop()
            raise LostError(
                f"The process of the reward function '{self.__name__}' ended in the middle, {_ending(code)}: mend it, "
                "or see what it does with --env-options reward_timeout=0, which runs it in the process of the run."
            ) from error
        if told is None:
            self._stop()
            raise LostError(
                f"The reward function '{self.__name__}' {what} within {limit:g} seconds and was ended: mend it, or "
                "raise reward_timeout (--env-options reward_timeout=SECONDS)."
            )
        result, raised = told
        if raised is not None:
            raise raised
        return result

    def _stop(self) -> int | None:
        """End the process. Returns how it ended, if it did so by itself."""
        code: int | None = self._end()
        self._pipe = None
        return code


def _kill(process: subprocess.Popen[bytes], pipe: Connection) -> int | None:
    pipe.close()
    try:
        return process.wait(CLOSING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _ending(code: int | None) -> str:
    """The exit code of a process in words."""
    if code is None or code >= 0:
        return "closing its pipe" if code is None else f"with the exit code {code}"
    name = {one.value: one.name for one in signal.Signals}.get(-code, f"signal {-code}")
    return f"killed by {name}" + (", perhaps because memory ran out" if name == "SIGKILL" else "")


def _serve(place: str, pipe: Connection) -> None:
    """Find the function, say so, and answer calls until the other side is gone."""
    found: Callable[..., Any] | None = None
    while True:
        try:
            arguments: dict[str, Any] = {} if found is None else pipe.recv()
        except EOFError:
            return
        try:
            if found is None:
                found, result = function(place), None
            else:
                result = listed(found(**arguments))
            told = pickle.dumps((result, None))
        except BaseException as error:  # the function's own: sys.exit too
            told = _told(error)
        pipe.send_bytes(told)
        if found is None:
            return


def _awaited(result: Awaitable[Any]) -> Any:
    """What an `async` function returns in the end, also where an event loop runs already, as in a notebook."""

    async def wait() -> Any:
        return await result

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, wait()).result()


def listed(result: Any) -> Any:
    """A result that can be iterated over, a generator among them, as a list; what is no list of rewards as it is."""
    result = _awaited(result) if inspect.isawaitable(result) else result
    single = isinstance(result, str | bytes | Mapping | Set)
    return list(result) if isinstance(result, Iterable) and not single else result


def _told(error: BaseException) -> bytes:
    """An error as it travels: itself where that is possible, else its words under its name."""
    try:
        if not isinstance(error, Exception | SystemExit):
            raise TypeError
        told = pickle.dumps((None, error))
        pickle.loads(told)
    except Exception:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return told


def _leave_stops() -> None:
    """Let signals that stop a run pass by: it still wants its answer, and ends this process when it has ended.

    By a handler that does nothing, which programs that the function starts do not inherit, nor its forks.
    """
    for number in STOPS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in STOPS] and None)


if __name__ == "__main__":
    _leave_stops()
    os.dup2(2, 1)  # what a user's function prints does not belong into the command's output
    _serve(sys.argv[1], Connection(int(sys.argv[2])))
