"""A user's function in a process of its own, so that one that hangs or dies does not take the run with it.

python -m foresight.envs.apart PLACE DESCRIPTOR    is that process: it answers over a pipe until that is closed
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from foresight.errors import LostError, UserError, unknown

START = 120.0  # seconds in which the process must have found its function: importing may take long


def function(place: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function at `file.py:name` or `package.module:name`. Raises UserError where there is none."""
    if callable(place):
        return place
    where, _, name = place.rpartition(":")
    if not where:
        raise UserError(f"'{place}' does not say where the reward function is: write file.py:name or module:name.")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            if spec is None or spec.loader is None or not Path(where).is_file():
                raise UserError(f"There is no file {where} to take the reward function '{name}' from.")
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(spec.name, module)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except ImportError as error:
        raise UserError(f"Cannot import {where}, where the reward function should be: {error}.") from error
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
    if name not in functions:
        raise unknown("reward function", name, functions)
    return getattr(module, name)  # type: ignore[no-any-return]


class Apart:
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
            self._answer(START, "was not imported")
        return self._answer(self.limit, "did not answer", arguments)

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        number = theirs.fileno()
        words = [sys.executable, "-m", "foresight.envs.apart", self.place, str(number)]
        path = os.pathsep.join(entry or "." for entry in sys.path)
        process = subprocess.Popen(words, pass_fds=[number], env={**os.environ, "PYTHONPATH": path})
        theirs.close()
        self._end = weakref.finalize(self, _kill, process, self._pipe)

    def _answer(self, limit: float, what: str, arguments: dict[str, Any] | None = None) -> Any:
        assert self._pipe is not None
        try:
            if arguments is not None:
                self._pipe.send(arguments)
            told = self._pipe.recv() if self._pipe.poll(limit) else None
        except (EOFError, OSError) as error:
            self._stop()
            raise LostError(f"The process of the reward function '{self.__name__}' ended in the middle.") from error
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

    def _stop(self) -> None:
        self._end()
        self._pipe = None


def _kill(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.wait()


def _serve(place: str, pipe: Connection) -> None:
    """Answer calls until the other side is gone."""
    found: Callable[..., Any] | None = None
    while True:
        try:
            if found is None:
                found, result = function(place), None
            else:
                result = found(**pipe.recv())
                result = list(result) if hasattr(result, "__iter__") and not isinstance(result, str) else result
            told = pickle.dumps((result, None))
        except EOFError:
            return
        except Exception as error:
            told = _told(error)
        pipe.send_bytes(told)


def _told(error: Exception) -> bytes:
    """An error as it travels: itself where that is possible, else its words under its name."""
    try:
        told = pickle.dumps((None, error))
        pickle.loads(told)
    except Exception:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return told


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which still wants its answer
    os.dup2(2, 1)  # what a user's function prints does not belong into the command's output
    _serve(sys.argv[1], Connection(int(sys.argv[2])))
