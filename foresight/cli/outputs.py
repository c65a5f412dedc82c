"""Whether a file or folder can be written, which a command asks before its work and not after it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from foresight.errors import UserError


def check_file(path: str | Path, option: str = "--out", suffixes: Sequence[str] = ()) -> None:
    """Raise UserError where the file `path` could not be written, or its name ends in none of `suffixes`.

    Nothing is made: a command that fails later leaves no empty folder.
    """
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise UserError(f"Cannot write {path}: the name of {option} must end in one of {', '.join(suffixes)}.")
    if path.is_dir():
        raise UserError(f"Cannot write {path}: it is a folder. Give {option} the name of a file.")
    if not (path.exists() and os.access(path, os.W_OK)):
        _check_place(path, path.parent, option)


def check_folder(path: str | Path, option: str = "--out") -> None:
    """Raise UserError where the folder `path` could not be made, or not be written to. Nothing is made."""
    _check_place(Path(path), Path(path), option)


def _check_place(path: Path, folder: Path, option: str) -> None:
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))  # "." and "/" exist
    if not nearest.is_dir():
        raise UserError(f"Cannot write {path}: {nearest} is not a folder. Choose another {option}.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"Cannot write {path}: nothing can be written to {nearest}. Choose another {option}.")
