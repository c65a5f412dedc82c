"""The process that runs foreign code: `python -P -s -S -B child.py RESULTS`, with a request as JSON on its stdin.

It confines itself, calls the function once for each list of arguments, and writes one line of JSON per call to the
file descriptor RESULTS. Whatever comes out of this process is untrusted: the code may have written the line itself.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
import time
import traceback
from typing import Any

PROGRAM = "<program>"
LONGEST = 4000  # characters of a traceback


class OutputError(Exception):
    """The program printed more than it may."""


class Capped(io.StringIO):
    """Collects what is printed, up to `most` characters."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def write(self, text: str) -> int:
        """Raises OutputError beyond the limit."""
        if self.tell() + len(text) > self.most:
            raise OutputError(f"it printed more than {self.most} characters")
        return super().write(text)


def run(code: Any, request: dict[str, Any], arguments: list[Any]) -> dict[str, Any]:
    """Run the program in a new namespace and call its function."""
    out = sys.stdout = sys.stderr = Capped(request["printed"])
    began = time.perf_counter()
    reply: dict[str, Any]
    try:
        names: dict[str, Any] = {"__name__": PROGRAM}
        exec(code, names)
        if request["function"] not in names:
            raise NameError(f"the program defines no function {request['function']}")
        reply = answer(names[request["function"]](*arguments))
    except OutputError as error:
        reply = {"status": "output", "error": str(error)}
    except MemoryError:
        reply = {"status": "memory", "error": "MemoryError: it needed more memory than it may have"}
    except BaseException as error:
        reply = {"status": "exception", "error": f"{type(error).__name__}: {error}"[:LONGEST], "trace": trace(error)}
    return {**reply, "printed": out.getvalue(), "seconds": time.perf_counter() - began}


def answer(value: Any) -> dict[str, Any]:
    """The value, if JSON can hold it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        return {"status": "value", "error": f"it returned a {type(value).__name__}, which is not JSON ({error})"}
    return {"status": "ok", "value": value}


def trace(error: BaseException) -> str:
    """The traceback from the program's first frame on, with the program's lines."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == PROGRAM]
    text = "".join(f'  File "{PROGRAM}", line {frame.lineno}, in {frame.name}\n' for frame in inside)
    last = "".join(traceback.format_exception_only(type(error), error))
    return f"Traceback (most recent call last):\n{text}{last}"[-LONGEST:]


def main() -> None:
    """Confine this process, then serve all calls of the request."""
    request = json.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)
    results = int(sys.argv[1])
    where = os.path.join(os.path.dirname(os.path.abspath(__file__)), "confine.py")
    spec = importlib.util.spec_from_file_location("confine", where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(where)]
    held = module.confine(request["place"], request["limits"])
    module.say(results, {"held": held})
    try:
        code = compile(request["source"], PROGRAM, "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        text = "".join(traceback.format_exception_only(type(error), error))[-LONGEST:]
        failed = {"status": "exception", "error": f"{type(error).__name__}: {error}", "trace": text}
        for _ in request["calls"]:
            module.say(results, failed)
        return
    for arguments in request["calls"]:
        module.say(results, run(code, request, arguments))


if __name__ == "__main__":
    main()
