"""Files and folders that a run reads: found again from another directory, or in the run's own folder.

`config.yaml` holds the names that the user typed and, under `paths`, where they were. Small data files and reward
functions are also copied into the run, so that it can be moved and shared. No torch here.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = "inputs"  # of a run
SMALL = 16 << 20  # bytes of a file or folder that is copied into the run
MODELS = ("model", "teacher", "reward_model", "critic", "policy")  # fields of a Config that may name a folder
DATA = ("data",)  # these may name several
PACKAGED = "smollm2"  # always the packaged model, even where a folder has this name
FUNCTION = re.compile(r"(?P<path>.+\.py)(?P<name>:\w+)")


def locate(env: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str]:
    """The absolute path of every file or folder that is named by a text task, Config fields or the task's options.

    The keys are the names as typed.
    """
    fields = [config.get(key) for key in (*MODELS, *DATA)]
    typed = [*_task(env), *_strings(fields), *_strings(list(options.values()))]
    known = {name: _absolute(name) for name in typed if name not in ("", PACKAGED)}
    return {name: path for name, path in known.items() if path is not None}


def substitute(value: Any, names: Mapping[str, str]) -> Any:
    """The value with each string in it that is a key of `names` (whole strings only) replaced by its value."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {substitute(key, names): substitute(part, names) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(substitute(part, names) for part in value)
    return value


def relocate(paths: Mapping[str, str], run: Path) -> dict[str, str]:
    """Where the files are now: at the old path, else as typed from here, else in the run; otherwise the old path."""
    now = {}
    for (typed, path), name in zip(paths.items(), _copy_names(paths), strict=True):
        candidates = (path, _absolute(typed), _in_file(path, run.resolve() / FOLDER / name))
        now[typed] = next((one for one in candidates if one is not None and _file(one).exists()), path)
    return now


def missing(paths: Mapping[str, str]) -> list[str]:
    """The paths that do not exist."""
    return [path for path in paths.values() if not _file(path).exists()]


def copy_inputs(paths: Mapping[str, str], config: Mapping[str, Any], run: Path) -> None:
    """Copy small files and folders, but no models, into the run. What is large or missing is skipped."""
    models = {config.get(key) for key in MODELS}
    for (typed, path), name in zip(paths.items(), _copy_names(paths), strict=True):
        source, copy = _file(path), run / FOLDER / name
        if typed in models or path in models or copy.exists() or not source.exists():
            continue
        if sum(file.stat().st_size for file in ([source] if source.is_file() else source.rglob("*"))) > SMALL:
            continue
        copy.parent.mkdir(exist_ok=True)
        if source.is_file():
            shutil.copyfile(source, copy)
        else:
            shutil.copytree(source, copy)


def _task(env: str) -> list[str]:
    """The task, if it is a data file or folder: the names of bundled tasks are never paths."""
    if not env or ":" in env or _absolute(env) is None:
        return []
    from foresight.envs.text.make import TASKS  # late: it is slow

    return [] if env in TASKS else [env]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in (*value.keys(), *value.values()):
            yield from _strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)


def _absolute(name: str) -> str | None:
    """The absolute path of a file, a folder, or a function in a file (`file.py:name`, `module:name`); else None."""
    head, colon, function = name.rpartition(":")
    if colon and function.isidentifier() and not head.endswith(".py"):
        name = f"{head.replace('.', '/')}.py:{function}"
    try:
        path = _file(name).expanduser()
        return _in_file(name, path.resolve()) if path.exists() else None
    except (OSError, ValueError):  # the name is too long, or not a valid path
        return None


def _file(path: str) -> Path:
    """The file of `file.py:name`; any other path as it is."""
    parts = FUNCTION.fullmatch(path)
    return Path(parts["path"] if parts else path)


def _in_file(path: str, file: Path) -> str:
    """`path`, which may end in `:name`, in another file."""
    parts = FUNCTION.fullmatch(path)
    return f"{file}{parts['name'] if parts else ''}"


def _copy_names(paths: Mapping[str, str]) -> list[str]:
    """The name of each copy: the file's own, numbered where different files share a name. A file may occur twice."""
    files = [_file(path) for path in paths.values()]
    own = [file.name for file in files]
    distinct = {name: list(dict.fromkeys(file for file in files if file.name == name)) for name in own}
    return [
        name if (number := distinct[name].index(file)) == 0 else f"{number + 1}-{name}"
        for name, file in zip(own, files, strict=True)
    ]
