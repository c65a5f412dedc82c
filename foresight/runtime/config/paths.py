"""Files and folders that a run is made from: found again from another directory, or in the run's own folder.

`config.yaml` says what was typed and, under `places`, where that was. Small files of data and reward functions are also
kept in the run, so that it can be moved, and sent to others. No torch here.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = "inputs"  # of a run
SMALL = 16 << 20  # bytes of a file, or of a folder, that is kept in the run
MODELS = ("model", "teacher", "reward_model", "critic")  # fields of a Config that may name a folder
DATA = ("data",)
PACKAGED = "smollm2"  # which is a model also where a folder has that name
FUNCTION = re.compile(r"(?P<path>.+\.py)(?P<name>:\w+)")


def of(env: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str]:
    """Where what was typed is, by what was typed: of a text task, of fields of its Config, of its options."""
    typed = [*_task(env), *(config.get(key) for key in (*MODELS, *DATA)), *_strings(list(options.values()))]
    known = {name: _absolute(name) for name in typed if isinstance(name, str) and name not in ("", PACKAGED)}
    return {name: place for name, place in known.items() if place is not None}


def replaced(value: Any, names: Mapping[str, str]) -> Any:
    """The value with the strings in it that `names` knows, whole ones, replaced by what they stand for."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {replaced(key, names): replaced(part, names) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replaced(part, names) for part in value)
    return value


def found(places: Mapping[str, str], run: Path) -> dict[str, str]:
    """Where things are now: where they were, or as they were typed from here, or in the run; else where they were."""
    now = {}
    for (typed, place), name in zip(places.items(), _names(places), strict=True):
        ways = (place, _absolute(typed), _with(place, run.resolve() / FOLDER / name))
        now[typed] = next((way for way in ways if way is not None and _path(way).exists()), place)
    return now


def missing(places: Mapping[str, str]) -> list[str]:
    """The places where there is nothing."""
    return [place for place in places.values() if not _path(place).exists()]


def keep(places: Mapping[str, str], config: Mapping[str, Any], run: Path) -> None:
    """Copy what is small, and no model, into the run. What cannot be copied is left where it is."""
    models = {config.get(key) for key in MODELS}
    for (typed, place), name in zip(places.items(), _names(places), strict=True):
        path, copy = _path(place), run / FOLDER / name
        if typed in models or place in models or copy.exists() or not path.exists():
            continue
        if sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*"))) > SMALL:
            continue
        copy.parent.mkdir(exist_ok=True)
        if path.is_file():
            shutil.copyfile(path, copy)
        else:
            shutil.copytree(path, copy)


def _task(env: str) -> list[str]:
    """The task, if it is data: the tasks that come along have their names to themselves."""
    if ":" in env or _absolute(env) is None:
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
    """The place of a file, of a folder, or of a function in a file (`file.py:name`, or as a module); None: no such."""
    head, colon, function = name.rpartition(":")
    if colon and function.isidentifier() and not head.endswith(".py"):
        name = f"{head.replace('.', '/')}.py:{function}"
    try:
        path = _path(name).expanduser()
        return _with(name, path.resolve()) if path.exists() else None
    except (OSError, ValueError):  # too long a name, or none at all
        return None


def _path(place: str) -> Path:
    parts = FUNCTION.fullmatch(place)
    return Path(parts["path"] if parts else place)


def _with(place: str, path: Path) -> str:
    """The place, in another file."""
    parts = FUNCTION.fullmatch(place)
    return f"{path}{parts['name'] if parts else ''}"


def _names(places: Mapping[str, str]) -> list[str]:
    """The names of the copies: the files' own, with a number before where two are equal. A file may be there twice."""
    paths = [_path(place) for place in places.values()]
    own = [path.name for path in paths]
    distinct = {name: list(dict.fromkeys(p for p in paths if p.name == name)) for name in own}
    return [
        name if (number := distinct[name].index(path)) == 0 else f"{number + 1}-{name}"
        for name, path in zip(own, paths, strict=True)
    ]
