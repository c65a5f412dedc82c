"""A user's reward function in a subprocess, so that a hang or a crash does not end the run.

The process leads its own session (`sandbox.process`): it is killed with everything that it started. It keeps the
user's packages, files and network, which a reward may need; for programs of a stranger there is `sandbox.run`.

python -m foresight.envs.text.worker PLACE DESCRIPTOR PARENT    is the subprocess: it serves calls over a pipe until it
                                                                closes or the process PARENT has ended
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
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
from foresight.sandbox import process

GIVEN = "given from Python"  # instead of the path of a function that cannot be imported again
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # these are for the run, even where every process receives them
START = 120.0  # seconds for the process to import its function
WATCH = 0.5  # seconds between two looks at whether the run is still there


def function(place: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function or other callable at `file.py:name` or `package.module:name`.

    Its imports are also looked up in the file's folder and the working directory. Raises UserError if it does not exist
    or cannot be imported.
    """
    if callable(place):
        return place
    where, _, name = str(place).rpartition(":")
    if str(place).startswith(GIVEN):
        raise UserError(
            f"The reward function of this run was {place}, so it cannot be imported: put it into a file, and write "
            "reward: FILE.py:NAME into the run's config.yaml, under env_options."
        )
    if not where or not name:
        raise UserError(f"'{place}' is not the path of a reward function: write file.py:name or module:name.")
    file = Path(where) if where.endswith(".py") else None
    if file is not None and not file.is_file():
        raise UserError(f"There is no file {where} with the reward function '{name}'.")
    module = _imported(where, file)
    found = getattr(module, name, None)
    if isinstance(found, type):
        raise UserError(f"'{name}' in {where} is a class: create an instance there (score = {name}()) and name that.")
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and not isinstance(value, type)]
        raise unknown("reward function", name, functions)
    return found


def class_at(place: str) -> type[Any]:
    """The class at `file.py:NAME`. Raises UserError if it does not exist or cannot be imported."""
    where, _, name = place.rpartition(":")
    if not Path(where).is_file():
        raise UserError(f"There is no file {where} with the class '{name}'. Write FILE.py:CLASS.")
    module = _imported(where, Path(where), "the module of the environment")
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise unknown("class", name, [key for key, value in vars(module).items() if isinstance(value, type)])
    return found


def place_of(given: Callable[..., Any]) -> str:
    """The path with which `function` finds `given`; a text that starts with `GIVEN` if it cannot."""
    name = str(getattr(given, "__qualname__", type(given).__name__))
    try:
        file = inspect.getsourcefile(given)
    except TypeError:  # an object
        file = None
    module = sys.modules.get(str(getattr(given, "__module__", "")))  # another one, where two files have one name
    top = getattr(module, name, None) is given or getattr(given, "__globals__", {}).get(name) is given
    if file is None or not Path(file).is_file() or not top:
        return f"{GIVEN} ({name})"
    return f"{given.__module__ if '.' in given.__module__ else Path(file).resolve()}:{name}"


def _imported(where: str, file: Path | None, what: str = "the module of the reward function") -> ModuleType:
    """The module in a file, or by its name. Raises UserError, with the line if there is one, if the import fails."""
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
        reason = f"{type(error).__name__}: {error}" + (f", {lines[-1]}" if lines else "")
        raise UserError(f"Cannot import {where}, {what}: {reason}.") from error


def _same(frame: traceback.FrameSummary, file: Path | None) -> bool:
    return file is not None and Path(frame.filename).resolve() == file.resolve()


class Worker:
    """The function at `place`, called in a subprocess with a limit of `limit` seconds per call.

    The process starts at the first call, and restarts after a failed one. Exceptions of the function are raised here.
    Raises LostError if it takes too long or its process ends.
    """

    def __init__(self, place: str, limit: float) -> None:
        self.place, self.limit = place, limit
        self.__name__ = place.rpartition(":")[2]
        self._pipe: Connection | None = None
        self._end: Callable[[], Any] = lambda: None

    def __call__(self, **arguments: Any) -> Any:
        """Call the function. Arguments must be picklable."""
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
        command = [sys.executable, "-m", "foresight.envs.text.worker", self.place, str(number), str(os.getpid())]
        path = os.pathsep.join(entry or "." for entry in sys.path)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # inherited: signals must not end it while it starts
        try:
            child = process.start(command, {**os.environ, "PYTHONPATH": path}, [number])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._end = weakref.finalize(self, _kill, child, self._pipe)

    def _answer(self, limit: float, what: str, arguments: dict[str, Any] | None = None) -> Any:
        assert self._pipe is not None
        try:
            if arguments is not None:
                self._pipe.send(arguments)
            reply = self._pipe.recv() if self._pipe.poll(limit) else None
        except (EOFError, OSError) as error:
            code = self._stop()
            raise LostError(
                f"The process of the reward function '{self.__name__}' ended during a call, {process.ending(code)}: "
                "fix it, or debug it with --env-options reward_timeout=0, which runs it in the main process."
            ) from error
        except BaseException:  # such as Ctrl-C: the next call must not read the reply to this one
            self._stop()
            raise
        if reply is None:
            self._stop()
            raise LostError(
                f"The reward function '{self.__name__}' {what} within {limit:g} seconds and was killed: fix it, or "
                "raise reward_timeout (--env-options reward_timeout=SECONDS)."
            )
        result, raised = reply
        if raised is not None:
            raise raised
        return result

    def _stop(self) -> int | None:
        """End the process. Returns its exit code, if it exited by itself."""
        code: int | None = self._end()
        self._pipe = None
        return code


def _kill(child: subprocess.Popen[bytes], pipe: Connection) -> int | None:
    """End the process and everything that it started; its exit code, if it exited by itself."""
    pipe.close()
    return process.kill(child, process.CLOSING)


def _serve(place: str, pipe: Connection) -> None:
    """Import the function, report that, and serve calls until the pipe is closed."""
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
            reply = pickle.dumps((result, None))
        except BaseException as error:  # of the user's function, sys.exit included
            reply = _pickled(error)
        pipe.send_bytes(reply)
        if found is None:
            return


def _awaited(result: Awaitable[Any]) -> Any:
    """The result of an `async` function, also where an event loop is running already, as in a notebook."""

    async def wait() -> Any:
        return await result

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, wait()).result()


def listed(result: Any) -> Any:
    """An iterable result, such as a generator, as a list; anything else unchanged."""
    result = _awaited(result) if inspect.isawaitable(result) else result
    single = isinstance(result, str | bytes | Mapping | Set)
    return list(result) if isinstance(result, Iterable) and not single else result


def _pickled(error: BaseException) -> bytes:
    """The pickled error: itself if it can be pickled, else a RuntimeError with its name and message."""
    try:
        if not isinstance(error, Exception | SystemExit):
            raise TypeError
        data = pickle.dumps((None, error))
        pickle.loads(data)
    except Exception:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return data


def _ignore_stops() -> None:
    """Ignore signals that stop a run: the run still waits for this call's result, and ends this process itself.

    The handler does nothing, and is not inherited by programs that the function starts, nor by its forks.
    """
    for number in STOPS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in STOPS] and None)


def _end_with(parent: int) -> None:
    """Kill this process and what it started once its parent has ended, also during a call: it may hang."""

    def look(*_: Any) -> None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)

    def watch() -> None:
        while True:
            look()
            time.sleep(WATCH)

    threading.Thread(target=watch, daemon=True).start()
    # A regular expression lets no other thread run, but signals.
    signal.signal(signal.SIGPROF, look)
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, WATCH, WATCH)


if __name__ == "__main__":
    _ignore_stops()
    _end_with(int(sys.argv[3]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no copy of the memory on the disk
    os.dup2(2, 1)  # the user's prints must not go to the command's output
    _serve(sys.argv[1], Connection(int(sys.argv[2])))
