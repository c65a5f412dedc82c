"""Python processes as forks of one that has imported what others wrote: torch and its compiler alone take seconds.

    fork = forks.start(["-c", "import foresight; foresight.train(...)"], stdout=subprocess.PIPE)
    os.kill(fork.pid, signal.SIGKILL)
    fork.wait()

The words are those of `python`; foresight is imported by each process itself. A raylet whose `setup_worker_path` is
this file has its workers forked too. The one that is forked begins with the first that is asked for, and ends with
pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import runpy
import signal
import socket
import sys
import traceback
import types
from typing import Any

SOCKET = "TESTS_FORKS"  # the environment variable with the address, for raylets
BYTES = 8  # of the id of a process, and of its exit code, which may have come before the id is read
# Not Ray, which reads the environment of a worker when it is imported.
IMPORTED = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "numba", "scipy.optimize", "gymnasium",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.tokenization_auto", "jsonschema", "requests",
    "pytest",
)  # fmt: skip


class Fork:
    """A process that was forked elsewhere, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, connection: socket.socket, stdout: Any = None) -> None:
        self.pid, self.stdout, self.returncode = pid, stdout, None
        self._connection = connection

    def poll(self) -> int | None:
        """The exit code if it has ended, that of a signal negative."""
        return self.wait(0.0) if self.returncode is None else self.returncode

    def wait(self, timeout: float | None = 120.0) -> int | None:
        """Wait for its end; without one in time None is returned if `timeout` is 0, otherwise TimeoutError raised."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                code = self._connection.recv(BYTES)
            except BlockingIOError:
                return None
            self.returncode = int.from_bytes(code, "little", signed=True) if code else -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def kill(self) -> None:
        """End it, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


def start(
    words: list[str], environment: dict[str, str] | None = None, stdout: int | None = None, session: bool = False
) -> Fork:
    """Begin `python *words` in this folder. `stdout` is a file or `subprocess.PIPE`; `session`: one of its own."""
    import subprocess

    read, write = os.pipe() if stdout == subprocess.PIPE else (None, 1 if stdout is None else stdout)
    connection, pid = _ask(words, environment or dict(os.environ), [0, write, 2], session)
    if read is None:
        return Fork(pid, connection)
    os.close(write)
    return Fork(pid, connection, open(read))


@functools.cache
def address() -> str:
    """Where requests are taken; sets the environment variable of raylets."""
    import atexit
    import shutil
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="forks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[SOCKET] = path = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)  # requests wait here until all is imported
        command = [sys.executable, __file__, "--serve", str(listener.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environment)
    atexit.register(_end, server)
    return path


def _end(server: Any) -> None:
    server.stdin.close()
    server.wait(60)


def _ask(words: list[str], environment: dict[str, str], files: list[int], session: bool) -> tuple[socket.socket, int]:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(environment.get(SOCKET) or address())
    request = json.dumps([words, environment, os.getcwd(), session]).encode()
    socket.send_fds(connection, [len(request).to_bytes(4, "little")], files)
    connection.sendall(request)
    return connection, int.from_bytes(connection.recv(BYTES), "little")


def serve(listener: socket.socket) -> None:
    """Fork a process for each request, until the standard input is closed."""
    import importlib
    import selectors

    import torch

    for name in IMPORTED:
        importlib.import_module(name)
    _ready_numba()
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that hold the processes are not waited for
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(0, selectors.EVENT_READ)
    while all(key.fileobj is listener for key, _ in waiting.select()):
        connection, _ = listener.accept()
        size, files, *_ = socket.recv_fds(connection, 4, 3)
        request = connection.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
        if os.fork() == 0:
            waiting.close()
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _hold(connection, request, files)
        connection.close()
        for file in files:
            os.close(file)


def _ready_numba() -> None:
    """What numba does before the first function of a process is compiled, or read from its cache."""
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def _hold(connection: socket.socket, request: bytes, files: list[int]) -> None:
    """Begin the process, tell which it is, and how it ended: all that it held is free then."""
    child = os.fork()
    if child == 0:
        connection.close()
        os._exit(_work(request, files))
    for file in files:
        os.close(file)
    connection.sendall(child.to_bytes(BYTES, "little"))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(code.to_bytes(BYTES, "little", signed=True))
    os._exit(0)


def _work(request: bytes, files: list[int]) -> int:
    """Be the process that was asked for; its exit code."""
    words, environment, folder, session = json.loads(request)
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if session:
        os.setsid()
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        _run(words)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return int(bool(error.code)) if isinstance(error.code, str) else int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _run(words: list[str]) -> None:
    first, *rest = words
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(first, run_name="__main__")


def _of_ray(words: list[str]) -> None:
    """A raylet's child: have a worker forked that has its files and its environment, and last as long as it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context")
    parser.add_argument("--language")
    _, words = parser.parse_known_args(words)
    connection, pid = _ask(words, dict(os.environ), [0, 1, 2], False)
    sys.exit(Fork(pid, connection).wait(None))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        sys.path.pop(0)
        with socket.socket(fileno=int(sys.argv[2])) as given:
            serve(given)
    else:
        _of_ray(sys.argv[1:])
