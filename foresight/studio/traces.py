"""Traces of `foresight team` on the page: a tree of conversations with their budgets, answers, and the board."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foresight.errors import UserError
from foresight.studio import samples
from foresight.studio.runs import DEEPEST, RUN, Library, identity, read_json, stamp

HEAD = 512  # bytes that show whether a JSON file is a trace
SIGN = re.compile(rb'\A\s*\{\s*"format":\s*1,\s*"goal":\s*"')
LARGEST = 20_000_000  # bytes of a trace that is read
FACTS = ("goal", "model", "depth", "budget", "tokens", "canceled", "board")


class Traces:
    """The traces in the folders of a library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[float, bool]] = {}

    def names(self) -> list[dict[str, Any]]:
        """Id, name, goal and model of every trace, the newest first."""
        found = []
        for name, file in self._files().items():
            document = read_json(file)
            if isinstance(document.get("root"), dict):
                about = {key: str(document.get(key, "")) for key in ("goal", "model")}
                found.append({"id": name, "name": file.stem, **about, "changed": stamp(file)})
        return sorted(found, key=lambda one: -one["changed"])

    def trace(self, name: str) -> dict[str, Any]:
        """A trace, with its conversations as `samples.member` returns them."""
        files = self._files()
        document = read_json(files[name]) if name in files else {}
        if not isinstance(document.get("root"), dict):
            raise UserError(f"There is no trace '{name[:40]}' in the folders of this studio.")
        return {**{key: document.get(key) for key in FACTS}, "root": samples.member(document["root"])}

    def _files(self) -> dict[str, Path]:
        with self._lock:
            known, self._known = self._known, {}
            for folder in self._library.folders:
                for file in _json(folder, DEEPEST):
                    changed = stamp(file)
                    before = known.get(file)
                    self._known[file] = before if before and before[0] == changed else (changed, _is_trace(file))
            return {identity(file): file for file, (_, yes) in sorted(self._known.items()) if yes}


def _json(folder: Path, depth: int) -> Iterator[Path]:
    """The JSON files in a folder and below; runs are not searched."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    if any(entry.name in RUN for entry in entries):
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _json(Path(entry.path), depth - 1) if depth else ()
        elif entry.name.endswith(".json") and entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _is_trace(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return bool(SIGN.match(stream.read(HEAD))) and os.fstat(stream.fileno()).st_size <= LARGEST
    except OSError:
        return False
