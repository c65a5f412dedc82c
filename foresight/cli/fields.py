"""The fields of a Config with their help texts, and the options of a command line."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foresight.errors import UserError, unknown
from foresight.runtime import catalog

OF_A_TASK = ("reward", "rewards", "reward_function", "reward_funcs", "held_out")  # looked for among the fields
TEXTS = ("--prompt", "--text", "--instruction")  # options that are no paths

EXPONENT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")  # of a number; YAML 1.1 wants a dot and a sign


@dataclasses.dataclass(frozen=True)
class Field:
    """One field: `help` is its comment or docstring, with its unit and source."""

    name: str
    type: str
    default: Any
    help: str


def describe(config: type[Any], path: Path) -> list[Field]:
    """The fields of the dataclass `config`, whose source is the class of that name in `path`."""
    source = catalog.read_source(path)
    notes = _notes(source, config.__name__)
    found = list[Field]()
    for field in dataclasses.fields(config):
        default = _default(field)
        if dataclasses.is_dataclass(default):  # options that several algorithms share (`training.options`)
            shared = describe(type(default), Path(inspect.getfile(type(default))))
            found += [dataclasses.replace(one, default=getattr(default, one.name)) for one in shared]
        else:
            found.append(Field(field.name, _type(field.type), default, notes.get(field.name, "")))
    return found


def explicit(args: Sequence[str], valid: Iterable[str], switches: Iterable[str]) -> set[str]:
    """The names of the options in `args`, in snake case; `switches` may be written `--no-NAME`.

    Raises `UserError` for a name that is not `valid`, with the nearest valid one, and for a name given twice.
    """
    names, flags = set(valid), set(switches)
    given = set()
    for token in args:
        if not token.startswith("--") or token == "--":
            continue
        word = token[2:].partition("=")[0].replace("-", "_")
        if word == "help":
            continue
        name = word.removeprefix("no_") if word.removeprefix("no_") in flags else word
        if name not in names:
            if name in OF_A_TASK:
                raise UserError(
                    f"--{token[2:].partition('=')[0]} is an option of the task: write --env-options "
                    "reward=FILE.py:NAME, with a function that scores answers, or held_out=20 for held-out rows."
                )
            raise unknown("field", word, names)
        if name in given:
            raise UserError(f"--{word.replace('_', '-')} is given twice.")
        given.add(name)
    return given


def check_once(args: Sequence[str]) -> None:
    """Raise `UserError` for an option that `args` give twice: only the last one would have an effect."""
    given = set()
    for token in itertools.takewhile(lambda token: token != "--", args):
        name = token.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name in given:
            raise UserError(f"{name} is given twice: write it once, with all its values.")
        given.add(name)


def expanded(args: Sequence[str]) -> list[str]:
    """`args` with the home folder in options such as `--out=~/x`, where a shell leaves the `~`."""
    found = []
    for token in args:
        name, equals, value = token.partition("=")
        path = equals and name.startswith("--") and value.startswith("~") and name not in TEXTS
        found.append(f"{name}={os.path.expanduser(value)}" if path else token)
    return found


def value(args: Sequence[str], name: str) -> str | None:
    """The text of the option `name` in `args`, or None."""
    for index, token in enumerate(args):
        word, equals, text = token.partition("=")
        if word == f"--{name}":
            text = text if equals else (args[index + 1] if index + 1 < len(args) else "")
            return None if text in ("", "None") else text
    return None


def whole_numbers(args: Sequence[str], integers: Iterable[str]) -> list[str]:
    """`args` with whole floats of integer options as integers, so that `--steps 1e6` is accepted."""
    names, out, previous = set(integers), [], ""
    for token in args:
        name, equals, value = token.partition("=")
        if equals and name[2:].replace("-", "_") in names:
            out.append(f"{name}={_whole(value)}")
        else:
            out.append(_whole(token) if previous in names else token)
        previous = token[2:].replace("-", "_") if token.startswith("--") else ""
    return out


def options(pairs: Sequence[str], option: str = "--env-options") -> dict[str, Any]:
    """`["num_envs=16", "engine=gymnasium"]`, given by `option`, as a dict; values are parsed as YAML.

    Numbers may have an exponent, 1e-3. Raises `UserError`.
    """
    import yaml

    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UserError(f"{option} takes key=value, not '{pair}'.")
        try:
            parsed = yaml.load(value, _loader())
        except (yaml.YAMLError, RecursionError) as error:
            raise UserError(f"{option} {pair}: {value!r} is not valid YAML. Quote it if it is a text.") from error
        found[name if isinstance(parsed, dict) else name.replace("-", "_")] = parsed  # options of one of several tasks
    return found


def leave_out(command: Callable[..., Any], given: Mapping[str, Any], why: str) -> None:
    """Raise UserError for an option in `given` that is not the default of `command`, which does not use it: `why`."""
    for name, chosen in given.items():
        if chosen != inspect.signature(command).parameters[name].default:
            raise UserError(f"--{name.replace('_', '-')} {why}: leave it out.")


def check_seed(seed: int) -> None:
    """Raise UserError for a seed below 0, or too large for a generator."""
    if seed < 0:
        raise UserError(f"--seed must be at least 0, not {seed}.")
    if seed >= 2**63:
        raise UserError(f"--seed must be less than 2**63, not {seed}.")


@functools.cache
def _loader() -> Any:
    """PyYAML's safe loader, in which 1e-1 and 1e3 are numbers as in YAML 1.2; the latter is whole."""
    import yaml

    def number(loader: Any, node: Any) -> Any:
        value = float(node.value)
        return node.value if math.isinf(value) else int(value) if value.is_integer() else value

    found: Any = type("Loader", (yaml.SafeLoader,), {})
    found.add_implicit_resolver("!exponent", EXPONENT, list("-+.0123456789"))
    found.add_constructor("!exponent", number)
    return found


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


def _whole(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if ("e" in text or "E" in text or "." in text) and number.is_integer() else text


def _notes(source: str, name: str) -> dict[str, str]:
    """The help text of each field: the comments above it and on its line, and the string below it."""
    lines = source.splitlines()
    body = next((n.body for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name), [])
    notes = {}
    for index, node in enumerate(body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        parts: list[str] = []
        above = node.lineno - 2
        while above >= 0 and lines[above].strip().startswith("#"):
            parts.insert(0, lines[above].strip().lstrip("# "))
            above -= 1
        end = (node.end_lineno or node.lineno) - 1
        rest = lines[end].encode()[node.end_col_offset or 0 :].decode(errors="ignore").strip()
        if rest.startswith("#"):
            parts.append(rest.lstrip("# "))
        below = body[index + 1] if index + 1 < len(body) else None
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            parts.append(" ".join(below.value.value.split()))
        notes[node.target.id] = " ".join(parts)
    return notes


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None
