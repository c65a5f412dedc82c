"""`shell`: a tree of files and a shell, sandboxed. The tree at the end of an episode is graded.

A command runs in `sandbox.shell`, on a copy of the tree, which is then the tree. Listing, reading and writing start no
process. Where a shell cannot be protected there is no such task.
"""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from foresight.envs.tools import tool
from foresight.sandbox import shell
from foresight.sandbox.shell import Limits

LIMITS = Limits(seconds=5.0, memory_mib=128)
WORDS = ("apple", "bridge", "candle", "dragon", "engine", "forest", "garden", "harbor", "island", "jacket", "kettle")
FOLDERS = ("docs", "notes", "logs", "data", "drafts")
ENDS = ("txt", "md", "log", "csv")
LARGEST = 20_000  # characters of a file that is written

Tree = dict[str, str]


class Shell:
    """Requests such as "Rename every file in docs that ends with .txt so that it ends with .md."

    The outcome is 1 if the tree ends as it should.
    """

    instruction = "You have a tree of files. Do what is asked, then end with: done."
    slow = True  # a command starts a process

    def __init__(self) -> None:
        self._files: Tree = {}
        self._wanted: Tree = {}

    @staticmethod
    def questions(size: int = 1_000, seed: int = 0) -> list[dict[str, Any]]:
        """`size` different requests of five kinds. Raises UserError where a shell cannot be protected."""
        shell.require()
        draw, rows = random.Random(f"trees {seed}"), dict[str, dict[str, Any]]()
        while len(rows) < size:
            row = _request(draw)
            rows.setdefault(row["request"] + repr(row["files"]), row)
        return list(rows.values())

    def reset(self, row: dict[str, Any]) -> str:
        """The request."""
        self._files, self._wanted = dict(row["files"]), dict(row["wanted"])
        return str(row["request"])

    def list_files(self) -> str:
        """The paths of all files, with their sizes in characters."""
        return "\n".join(f"{path} {len(text)}" for path, text in sorted(self._files.items()))

    def read_file(self, path: str) -> str:
        """The text of a file."""
        found = self._files.get(str(PurePosixPath(path)))
        if found is None:
            raise ValueError(f"there is no file {path[:80]}")
        return found

    @tool.writes
    def write_file(self, path: str, text: str) -> str:
        """Write a file, which replaces the one of that path."""
        shell.check(path)
        if len(text) > LARGEST or path.endswith(("/", "/.")):
            raise ValueError(f"a file has a name and at most {LARGEST:,} characters")
        path = str(PurePosixPath(path))  # ./a and a are one file
        if any(path.startswith(f"{other}/") or other.startswith(f"{path}/") for other in self._files):
            raise ValueError(f"{path[:80]} is a folder, or inside a file")
        if path not in self._files and len(self._files) >= LIMITS.tree_files:
            raise ValueError(f"there are {LIMITS.tree_files} files already")
        self._files[path] = text
        return "written"

    @tool.writes
    def run(self, command: str) -> str:
        """Run a command of a POSIX shell in the tree; returns what it prints, and its exit code unless that is 0."""
        found = shell.run(command, self._files, LIMITS)
        if found.status == "timeout":
            raise ValueError(f"{found.printed}\nthe command did not end within {LIMITS.seconds:g} seconds")
        if found.status != "ok":
            raise ValueError(f"{found.printed}\n{found.error}; nothing was changed")
        self._files = found.files
        return found.printed + (f"\n(exit code {found.code})" if found.code else "")

    def reward(self, answer: str) -> float:
        """1 if the tree is as it should be and the answer states that it is done. Empty folders do not count."""
        now = {path: text for path, text in self._files.items() if not path.endswith("/")}
        return float(now == self._wanted and "done" in answer.lower())

    @staticmethod
    def script(messages: list[dict[str, str]]) -> str:
        """A demonstration: one command, then done."""
        request = next(m["content"] for m in messages if m["role"] == "user")
        if any(m["content"].startswith(tool.RESULT) for m in messages):
            return "done"
        for pattern, command in COMMANDS:
            if found := re.fullmatch(pattern, request):
                return tool.write("run", command=command(*found.groups()))
        raise ValueError(request)


def _count(word: str, folder: str, out: str) -> str:
    return f"cat {folder}/* | grep -c {shlex.quote(word)} > {out}"


def _rename(folder: str, old: str, new: str) -> str:
    return f'for f in {folder}/*.{old}; do mv "$f" "${{f%.{old}}}.{new}"; done'


def _replace(old: str, new: str, end: str) -> str:
    inside = f'sed s/{old}/{new}/g "$f" > .new; cat .new > "$f"; rm .new'
    return f"find . -name '*.{end}' | while read -r f; do {inside}; done"


def _delete(word: str) -> str:
    return f'grep -rl {shlex.quote(word)} . | while read -r f; do rm "$f"; done'


def _merge(folder: str, out: str) -> str:
    return f"cat {folder}/* | sort -u > .new; mv .new {out}"


COMMANDS: tuple[tuple[str, Callable[..., str]], ...] = (
    (r"Count the lines in the files of (\w+) that contain (\w+), and write the number into (\S+)\.",
     lambda folder, word, out: _count(word, folder, out)),
    (r"Rename every file in (\w+) that ends with \.(\w+) so that it ends with \.(\w+)\.", _rename),
    (r"Replace every (\w+) by (\w+) in the files that end with \.(\w+)\.", _replace),
    (r"Delete every file that contains (\w+)\.", _delete),
    (r"Write all different lines of the files in (\w+), sorted, into (\S+)\.", _merge),
)  # fmt: skip


def _request(draw: random.Random) -> dict[str, Any]:
    """A tree of 5 to 9 files in two folders, a request, and the tree that fulfills it."""
    first, second = draw.sample(FOLDERS, 2)
    words = draw.sample(WORDS, 6)
    files: Tree = {}
    count = draw.randint(5, 9)
    for place in range(count):
        folder = (first, second)[place % 2]
        lines = [" ".join(draw.choices(words, k=draw.randint(1, 3))) for _ in range(draw.randint(1, 4))]
        files[f"{folder}/{draw.choice(words)}{place}.{draw.choice(ENDS[:2])}"] = "".join(f"{line}\n" for line in lines)
    wanted, (word, other) = dict(files), draw.sample(words, 2)
    inside = {path: text for path, text in files.items() if path.startswith(f"{first}/")}
    kind = draw.choice(("count", "rename", "replace", "delete", "merge"))
    if kind == "count":
        found = sum(word in line for text in inside.values() for line in text.splitlines())
        request, wanted["count.txt"] = f"Count the lines in the files of {first} that contain {word}", f"{found}\n"
        request += ", and write the number into count.txt."
    elif kind == "rename":
        old, new = draw.sample(("txt", "md"), 2) if draw.random() < 0.5 else (draw.choice(("txt", "md")), "log")
        wanted = {
            (f"{path.removesuffix(old)}{new}" if path in inside and path.endswith(f".{old}") else path): text
            for path, text in files.items()
        }
        if wanted == files:  # nothing to rename
            return _request(draw)
        request = f"Rename every file in {first} that ends with .{old} so that it ends with .{new}."
    elif kind == "replace":
        end = draw.choice(("txt", "md"))
        wanted = {path: text.replace(word, other) if path.endswith(f".{end}") else text for path, text in files.items()}
        request = f"Replace every {word} by {other} in the files that end with .{end}."
    elif kind == "delete":
        wanted = {path: text for path, text in files.items() if word not in text}
        request = f"Delete every file that contains {word}."
    else:
        lines = sorted({line for text in inside.values() for line in text.splitlines()}, key=str.encode)
        request, wanted["all.txt"] = (
            f"Write all different lines of the files in {first}, sorted",
            "\n".join(lines) + "\n",
        )
        request += ", into all.txt."
    return {"files": files, "wanted": wanted, "request": request}
