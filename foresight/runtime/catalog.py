"""The catalog of algorithms, read from their source without torch, so that help and lists are fast."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, get_type_hints

from foresight.errors import UserError, unknown
from foresight.runtime import legacy

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
DEEP = 5_000  # openings of lists and maps, which may all be nested, that libyaml reads
BUNDLED = ROOT / "trained"  # agents that come with the package
FAMILIES = (
    "tabular", "value", "policy", "search", "world", "sequence", "imitation", "language",
)  # fmt: skip  # in the order of lists
# The imports that a Config may need. Everything else (torch, nets) is not imported.
LIGHT = {
    "__future__", "collections", "dataclasses", "enum", "foresight.errors", "foresight.training.options", "functools",
    "math", "typing",
}  # fmt: skip
OF_A_PRESET = {"env": str, "task": str, "env_options": dict, "evaluation": dict}  # the rest are fields of the Config
# What an algorithm file states about itself, and an example of each.
CONSTANTS = {"KIND": str, "UNIT": str, "METRICS": tuple | list, "GAMES": bool, "ATTENDS": bool}
EXAMPLES = {
    "KIND": 'KIND = "control"', "UNIT": 'UNIT = "env steps"', "METRICS": 'METRICS = ("return", "loss")',
    "GAMES": "GAMES = True", "ATTENDS": "ATTENDS = True",
}  # fmt: skip
FUNCTIONS = ("build", "act", "train")  # of every algorithm
# Options of every run, in Python or on the command line: no field of a user's Config has their names.
OPTIONS = (
    "actors", "callbacks", "checkpoint_every", "completer", "config", "device", "env", "env_options", "evaluate_every",
    "evaluation_episodes", "json", "keep", "keep_optimizer", "log", "name", "out", "preset", "ray", "record", "show",
    "staleness", "task",
)  # fmt: skip
HEAD = re.compile(r'\A"{3}.*?"{3}\n.*?(?=^(?:@|class |def ))', re.DOTALL | re.MULTILINE)
_STAMPS: dict[Path, tuple[int, int]] = {}  # of users' files, when they were read


def in_checkout() -> bool:
    """Whether the package runs from a source checkout."""
    return (ROOT.parent / "benchmarks").is_dir()


def checkout() -> Path:
    """The source checkout, or the current directory if the package is installed without one."""
    return ROOT.parent if in_checkout() else Path.cwd()


class State(Protocol):
    """The state of an algorithm: a dataclass, saved and restored field by field. Most fields are specific to it."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    config: Any  # the algorithm's Config
    step: int  # in the algorithm's unit

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None: ...


Steps = Iterator[tuple[int, dict[str, Any], State]]  # yielded by `train`: step, metrics, State


class Algorithm(Protocol):
    """The module of an algorithm.

    The types of the environment, of `spaces` and of observations depend on `KIND`. Some algorithms also have
    `measure`, `assess`, `export`, `picture`, `reset_carry`, `rewarded` or
    `read_files`, which are looked up by name.
    """

    KIND: str
    Config: type[Any]

    def build(self, config: Any, spaces: Any, device: str | torch.device = "cpu") -> State:
        """A new State."""

    def act(self, state: State, obs: Any, carry: Any = None, explore: bool = False) -> tuple[Any, dict[str, Any], Any]:
        """`(actions, extras, carry)` for a batch of observations."""

    def train(self, config: Any, env: Any, state: State | None = None, device: str | torch.device = "cpu") -> Steps:
        """Train a new State, or continue from `state`."""

    def __getattr__(self, name: str) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """One algorithm file, as its source describes it."""

    name: str
    family: str
    path: Path
    title: str  # first line of the module docstring
    kind: str  # "control", "tabular", "text" or "game"
    unit: str  # what a step counts: "env steps", "sweeps", "updates"
    metrics: tuple[str, ...]  # the few shown live
    doc: str  # the whole module docstring
    games: bool = False  # whether it also plays two-player games, by their names
    attends: bool = False  # whether it acts by attention, whatever its Config

    @property
    def ours(self) -> bool:
        """Whether it is an algorithm of the library, which its name then stands for; otherwise a user's file."""
        return self.path.is_relative_to(ROOT)


@functools.cache
def algorithms() -> dict[str, Entry]:
    """All algorithms of the library by name, ordered by family."""
    paths = [path for path in (ROOT / "algorithms").glob("*/*.py") if not path.name.startswith("_")]

    def order(path: Path) -> tuple[int, str, str]:
        family = path.parent.name
        return (FAMILIES.index(family) if family in FAMILIES else len(FAMILIES), family, path.stem)

    entries = (_read(path) for path in sorted(paths, key=order))
    return {entry.name: entry for entry in entries if entry is not None}


def entry(name: str) -> Entry:
    """The entry of an algorithm: a name from `algorithms()`, or the path of a user's file (`./mine.py`).

    Raises UserError for a name that does not exist, with the most similar one that does.
    """
    if name.endswith(".py"):
        path = Path(name).expanduser().resolve()
        if not path.is_file():
            raise UserError(f"There is no algorithm file {name}. List the algorithms with: foresight list")
        found = _read(path)
        if found is None:
            raise UserError(f"{name} is not an algorithm file: it must define KIND, Config, build, act and train.")
        return found
    if name not in algorithms():
        raise unknown("algorithm", name, algorithms())
    return algorithms()[name]


def reread(name: str) -> None:
    """Forget a user's file that changed since it was read, as between two trainings in a notebook.

    A run calls this once, before it begins: while it trains, its file may be edited, and be incomplete.
    """
    path = Path(name).expanduser().resolve()
    if name.endswith(".py") and path in _STAMPS and path.is_file() and _STAMPS[path] != _stamp(path):
        del _STAMPS[path]
        _config_class.cache_clear()
        sys.modules.pop(f"foresight_file_{path.stem}", None)


def _stamp(path: Path) -> tuple[int, int]:
    """What differs when a file was edited: the time of its last change, in nanoseconds, and its bytes."""
    about = path.stat()
    return about.st_mtime_ns, about.st_size


def module(name: str) -> Algorithm:
    """The algorithm's module (this imports torch). Raises UserError for a user's file without one of `FUNCTIONS`.

    Modules beside a user's file can be imported by it, as if it were run by Python.
    """
    found = entry(name)
    if found.ours:
        return cast(Algorithm, importlib.import_module(f"foresight.algorithms.{found.family}.{found.name}"))
    alias = f"foresight_file_{found.name}"
    loaded = sys.modules.get(alias)
    if loaded is not None and loaded.__file__ == str(found.path):
        return cast(Algorithm, loaded)
    spec = importlib.util.spec_from_file_location(alias, found.path)
    if spec is None or spec.loader is None:
        raise UserError(f"{found.path} cannot be imported.")
    loaded = importlib.util.module_from_spec(spec)
    _STAMPS.setdefault(found.path, _stamp(found.path))
    _parse(read_source(found.path), found.path)  # raises a sentence
    sys.modules[alias] = loaded  # before it runs: dataclasses look up their module
    try:
        with _beside(found.path.parent):
            spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[alias]
        raise
    if missing := [part for part in FUNCTIONS if not callable(getattr(loaded, part, None))]:
        del sys.modules[alias]
        raise UserError(
            f"{found.path} has no function {', '.join(missing)}. "
            "An algorithm file defines KIND, Config, build, act and train."
        )
    return cast(Algorithm, loaded)


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Modules in the folder of a user's file come first, also before those that another one's folder has so named."""
    others = {Path.cwd(), *(path.parent for path in _STAMPS)} - {folder}
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    for name in names - {"__main__", "__init__"}:
        file = Path(getattr(sys.modules.get(name), "__file__", None) or folder)
        if (file.parent.parent if file.stem == "__init__" else file.parent) in others:
            for part in [part for part in sys.modules if part == name or part.startswith(f"{name}.")]:
                del sys.modules[part]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # for what its functions import


def config_class(name: str) -> type[Any]:
    """The algorithm's `Config` without importing torch.

    Only the light imports, the constants and the class `Config` of the file are executed, in a stub
    module with the same `__file__`, so that `inspect.getsource` works (the help text is made from the
    comments on the fields). A Config that needs more is imported with its module.
    """
    found = entry(name)
    return _config_class(found.name if found.ours else str(found.path))


@functools.cache
def _config_class(name: str) -> type[Any]:
    """`name`: of an algorithm of the library, or an absolute path, as the same name elsewhere is another file."""
    found = entry(name)
    path, own = found.path, not found.ours
    if own:
        _STAMPS.setdefault(path, _stamp(path))
    kept: list[ast.stmt] = [node for node in _parse(read_source(path), path).body if _is_light(node)]
    if not any(isinstance(node, ast.ClassDef) for node in kept):
        raise UserError(f"{path} has no class Config.")
    alias = f"foresight_config_{path.stem}"
    stub = types.ModuleType(alias)
    stub.__file__ = str(path)
    sys.modules[alias] = stub
    try:
        exec(compile(ast.Module(kept, type_ignores=[]), str(path), "exec"), stub.__dict__)
        if own:
            get_type_hints(stub.__dict__["Config"])  # they may be aliases, or imported for nothing else
    except NameError:
        del sys.modules[alias]
        config = module(name).Config
    else:
        config = stub.__dict__["Config"]
    if own:
        _check_fields(path, config)
    return config


def _check_fields(path: Path, config: type[Any]) -> None:
    """Raise UserError for a Config of the user's file `path` that no run can have."""
    if not dataclasses.is_dataclass(config):
        raise UserError(f"{path}: Config is no dataclass. Write @dataclass(frozen=True) above it.")
    for field in dataclasses.fields(config):
        if field.name in OPTIONS:
            raise UserError(f"{path}: '{field.name}' is an option of every run. Give the field of Config another name.")
        if not field.init:
            raise UserError(f"{path}: the field '{field.name}' of Config has init=False. Make it a property.")


def presets(name: str) -> dict[str, dict[str, Any]]:
    """The presets of an algorithm by name (`foresight/presets/NAME.yaml`, or `NAME.yaml` next to a user's file).

    Raises UserError for a file that cannot be read, or that holds anything else.
    """
    found = entry(name)
    path = (ROOT / "presets" if found.ours else found.path.parent) / f"{found.name}.yaml"
    fix = "Write a name and fields for each preset, as in CartPole-v1: {env: CartPole-v1, learning_rate: 0.001}."
    read: dict[str, Any] = {}
    if path.is_file():
        read = _read_once(path, path.stat().st_mtime_ns, fix) if found.ours else read_mapping(path, fix)
    for preset, fields in read.items():
        if not isinstance(fields, dict):
            raise UserError(f"{path} cannot be read: '{preset}' is {fields!r}, not names and values. {fix}")
        for part, wanted in OF_A_PRESET.items():
            if not isinstance(fields.get(part), wanted | None):
                raise UserError(f"{path} cannot be read: {part} of '{preset}' is {fields[part]!r}. {fix}")
        for part, value in (fields.get("evaluation") or {}).items():
            if not isinstance(value, int | None):
                raise UserError(f"{path} cannot be read: {part} of the evaluation of '{preset}' is {value!r}. {fix}")
    return {str(preset): legacy.document(copy.deepcopy(fields)) for preset, fields in read.items()}


@functools.lru_cache(256)
def _read_once(path: Path, changed: int, fix: str) -> dict[str, Any]:
    """`read_mapping` of a file that was `changed` then: a table of results asks for the presets of each row."""
    return read_mapping(path, fix)


def bundled() -> list[str]:
    """The names of the agents that come with the package: `connect_four`, `ppo/LunarLander-v3`."""
    return sorted(file.parent.relative_to(BUNDLED).as_posix() for file in BUNDLED.rglob("config.yaml"))


def read_source(path: Path) -> str:
    """The text of a Python file. Raises UserError for bytes that are no UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")  # Python takes a byte order mark, and so do some editors
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read: {error}. Save it as UTF-8.") from error


def read_yaml(path: Path) -> Any:
    """The contents of a YAML file of plain values. Raises RecursionError for one that may be nested too deep."""
    import yaml

    text = path.read_text(encoding="utf-8")
    # libyaml if PyYAML was built with it: `foresight list` reads every preset, half of its time in pure Python. But it
    # has no limit of nesting: twelve thousand brackets may overflow the stack, which ends the process.
    deep = sum(text.count(opening) for opening in ("[", "{", "- ", "? ")) > DEEP
    return yaml.load(text, yaml.SafeLoader if deep else getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_mapping(path: Path, fix: str = "It was edited or is incomplete.") -> dict[str, Any]:
    """The names and values in a YAML or JSON file; none if it is empty.

    Raises UserError, whose last sentence is `fix`, for a file that cannot be read or holds anything else.
    """
    import yaml

    try:
        json_file = path.suffix == ".json"
        found = json.loads(path.read_text(encoding="utf-8")) if json_file else read_yaml(path)
        if not isinstance(found, dict | None):
            raise ValueError(f"it holds a {type(found).__name__}, not names and values")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: also bytes that are no UTF-8
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {reason}. {fix}") from error
    return found or {}


def _read(path: Path) -> Entry | None:
    source = read_source(path)
    head = HEAD.match(source)
    # The description of an algorithm stands above its first class. Parsing only that saves `foresight list` a third.
    tree = _parse(head[0] if head and "\nKIND" in head[0] else source, path)
    constants = {}
    for node in tree.body:
        target, value = _assignment(node)
        if target in CONSTANTS and value is not None:
            try:
                constants[target] = ast.literal_eval(value)
                if not isinstance(constants[target], CONSTANTS[target]):
                    raise TypeError(target)
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"{path}, line {node.lineno}: {target} must be written out, since the file is read without running "
                    f"it, as in {EXAMPLES[target]}."
                ) from error
    if "KIND" not in constants:
        return None  # a helper module, not an algorithm
    doc = ast.get_docstring(tree) or ""
    return Entry(
        name=path.stem,
        family=path.parent.name,
        path=path,
        title=doc.partition("\n")[0],
        kind=constants["KIND"],
        unit=constants.get("UNIT", "steps"),
        metrics=tuple(constants.get("METRICS", ())),
        doc=doc,
        games=constants.get("GAMES", False),
        attends=constants.get("ATTENDS", False),
    )


def _parse(source: str, path: Path) -> ast.Module:
    """The syntax tree of the file `path`. Raises UserError with the line of a mistake."""
    try:
        return ast.parse(source, str(path))
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.msg}.") from error
    except ValueError as error:  # null bytes, before Python 3.12
        raise UserError(f"{path} cannot be read: {error}.") from error


def _assignment(node: ast.stmt) -> tuple[str, ast.expr | None]:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id, node.value
    return "", None


def _is_light(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name in LIGHT for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "") in LIGHT or (node.module or "").partition(".")[0] in LIGHT - {"foresight"}
    if isinstance(node, ast.ClassDef):
        return node.name == "Config"
    name, value = _assignment(node)
    if not name or value is None:
        return False
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError):
        return False
    return True
