"""The process of a shell: `python -P -s -S -B shell_child.py RESULTS`, with a request as JSON on its stdin.

It confines itself, writes the files of the request into its file system in memory, runs the command with `/bin/sh`,
kills whatever that left behind, and reports what was printed and the files then as JSON. Whatever comes out of
this process is untrusted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import time
from typing import Any

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/", "LC_ALL": "C.UTF-8"}
PRINTED = ".printed"  # unlinked before the command starts


def write(files: dict[str, str]) -> None:
    """Make the tree in the working directory. A path that ends with `/` is an empty directory."""
    for path, text in files.items():
        os.makedirs(path if path.endswith("/") else os.path.dirname(path) or ".", exist_ok=True)
        if not path.endswith("/"):
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)


def read(most: int, count: int, longest: int) -> dict[str, str]:
    """The tree in the working directory: links, pipes and what is no text are left out.

    Raises ValueError for more than `most` bytes or `count` files, and for a path of more than `longest` characters.
    """
    found: dict[str, str] = {}
    total = 0
    for folder, folders, names in os.walk("."):
        folders.sort()
        if folder != "." and not folders and not names:
            found[_checked(os.path.relpath(folder) + "/", longest)] = ""
        for name in sorted(names):
            path = os.path.join(folder, name)
            facts = os.lstat(path)
            if not stat.S_ISREG(facts.st_mode):
                continue
            total += facts.st_size
            if total > most or len(found) >= count:
                raise ValueError(f"the files are more than {count} or larger than {most:,} bytes together")
            with contextlib.suppress(OSError, UnicodeError), open(path, encoding="utf-8", newline="") as file:
                found[_checked(os.path.relpath(path), longest)] = file.read()
    return found


def _checked(path: str, longest: int) -> str:
    """`path`. Raises ValueError if it is too long for a tree."""
    if len(path) > longest:
        raise ValueError(f"a path has more than {longest} characters: {path[:80]}...")
    return path


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run the command; returns its exit code, what it printed, and the files."""
    out = os.open(PRINTED, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(PRINTED)
    write(request["files"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command may send it
    began = time.monotonic()
    status, code = "ok", 0
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", request["command"]], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=ENVIRONMENT
        )
        code = process.wait(request["seconds"])
    except subprocess.TimeoutExpired:
        status = "timeout"
    except OSError as error:
        return {"status": "failed", "error": f"the shell did not start: {error}"}
    finally:
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)  # all others in this namespace
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
    seconds = time.monotonic() - began
    printed = os.pread(out, request["printed"] + 1, 0)
    text = printed[: request["printed"]].decode("utf-8", "replace")
    if len(printed) > request["printed"]:
        text += " ... (the rest is left out)"
    try:
        files = read(request["most"], request["count"], request["longest"])
    except (ValueError, OSError, RecursionError) as error:
        return {"status": "output", "error": str(error), "printed": text, "code": code, "seconds": seconds}
    return {"status": status, "code": code, "printed": text, "files": files, "seconds": seconds}


def main() -> None:
    """Confine this process, then serve the request."""
    request = json.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)
    results = int(sys.argv[1])
    os.set_inheritable(results, False)
    where = os.path.join(os.path.dirname(os.path.abspath(__file__)), "confine.py")
    spec = importlib.util.spec_from_file_location("confine", where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    held = module.confine(request["place"], request["limits"], programs=True)
    module.say(results, {"held": held})
    if request["command"] is not None and set(request["needed"]) <= set(held):
        module.say(results, run(request))


if __name__ == "__main__":
    main()
