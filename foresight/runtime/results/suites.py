"""The suites of `suites.yaml`: groups of results with their budgets and targets."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foresight.errors import UserError, unknown
from foresight.runtime import catalog
from foresight.runtime.results import atari100k

FILE = Path(__file__).with_name("suites.yaml")
BOUND = re.compile(r"(?P<sign>>=|<=) (?:(?P<times>[\d.]+) × )?(?P<of>\S+)(?: - (?P<less>[\d.]+))?")


@dataclasses.dataclass(frozen=True)
class Figure:
    """One value of a result that is reported for an algorithm."""

    algorithm: str
    key: str  # in the result; "a/b" is b within a
    task: str  # what the value is of, in a few words
    target: str | None = None  # see `met`


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A function or command that writes a result, and the values of it that are reported."""

    run: str = ""  # "module:function" (see sutton_barto.py), a command to run in the checkout; "": no code does it yet
    result: str = ""  # the stem of the JSON; of a function: its name
    figures: tuple[Figure, ...] = ()
    needs: tuple[str, ...] = ()  # commands that make its input, see `made_by`; {runs} is the folder of the runs
    after: tuple[str, ...] = ()  # rows that must exist first

    @property
    def is_command(self) -> bool:
        """Whether it is a command, not a function."""
        return " " in self.run

    @property
    def seeds(self) -> int | None:
        """The number of seeds that the command names; None if it names none."""
        words = shlex.split(self.run) if self.is_command else []
        if "--seeds" not in words:
            return None
        return len(list(itertools.takewhile(str.isdigit, words[words.index("--seeds") + 1 :])))


@dataclasses.dataclass(frozen=True)
class Trained:
    """A preset to train with seeds 0 to `seeds` - 1, and the target of its evaluation."""

    algorithm: str
    preset: str
    name: str = ""  # default: of the algorithm and the preset
    seeds: int = 5
    episodes: int | None = None  # of an evaluation; None: the preset's
    steps: int | None = None  # None: the preset's
    minutes: float | None = None  # limit per seed
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the Config, env_options; {runs}, {seed}
    target: str | None = None  # see `met`
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    env: str = ""  # default: the preset's

    @property
    def result(self) -> str:
        """The stem of the JSON."""
        return self.name or "-".join(filter(None, (self.algorithm, self.preset, self.env))).replace("/", "-")

    @property
    def budget(self) -> int | None:
        """The steps per seed, in the algorithm's unit; None if something else ends a run."""
        return self.steps or catalog.presets(self.algorithm).get(self.preset, {}).get("steps")


@dataclasses.dataclass(frozen=True)
class Suite:
    """A named group of results."""

    name: str
    title: str
    experiments: tuple[Experiment, ...] = ()
    runs: tuple[Trained, ...] = ()
    atari: bool = False  # each run stands for one of every game; scores are also reported human-normalized

    def rows(self, only: tuple[str, ...] = ()) -> list[Experiment | Trained]:
        """All rows, or those named `only` and the rows they need. Raises UserError for an unknown name."""
        known: dict[str, Experiment | Trained] = {row.result: row for row in self.experiments + self.runs}
        ordered: dict[str, Experiment | Trained] = {}

        def put(name: str) -> None:
            if name not in known:
                raise unknown(f"row of {self.name}", name, known)
            for before in known[name].after:
                put(before)
            ordered.setdefault(name, known[name])

        for name in only or known:
            put(name)
        return list(ordered.values())


def suites(path: Path = FILE) -> dict[str, Suite]:
    """Every suite by name. Raises UserError for an unknown key or an invalid target."""
    return {
        name: Suite(
            name,
            entry["title"],
            tuple(_entries(path, name, "an experiment", _experiment, entry.get("experiments"))),
            tuple(_each_game(runs) if entry.get("atari") else runs),
            bool(entry.get("atari")),
        )
        for name, entry in catalog.read_yaml(path).items()
        for runs in [list(_entries(path, name, "a run", _trained, entry.get("runs")))]
    }


def met(target: str, value: float, known: Mapping[str, float] | None = None) -> bool | None:
    """Whether `value` meets `target`.

    A target is `>= 475`, `<= 1e-6`, `-25 ± 3`, or `yes` for a boolean; or relative to another value of the same result
    or to another row, `>= 2 × baseline` or `>= grpo-smollm2-addition - 0.03`: the result is None if `known` lacks it.
    Raises ValueError for other forms.
    """
    if target == "yes":
        return value is True
    center, _, width = target.partition("±")
    if width:
        return abs(value - float(center)) <= float(width)
    form = BOUND.fullmatch(target)
    if form is None:
        raise ValueError(target)
    try:
        of: float | None = float(form["of"])
    except ValueError:
        of = (known or {}).get(form["of"])
    if of is None:
        return None
    bound = float(form["times"] or 1) * of - float(form["less"] or 0)
    if math.isclose(value, bound, rel_tol=1e-12):  # rounding: a mean of 0.95 may be 0.9499999999999998
        return True
    return value > bound if form["sign"] == ">=" else value < bound


def made_by(command: str) -> Path:
    """The file that a command writes: the argument of `--out`."""
    arguments = shlex.split(command)
    return Path(arguments[arguments.index("--out") + 1])


def _entries(path: Path, name: str, kind: str, make: Any, entries: list[dict[str, Any]] | None) -> Iterator[Any]:
    for entry in entries or ():
        try:
            needs = entry.get("needs") or ()
            commands = (needs,) if isinstance(needs, str) else tuple(needs)
            yield make({**entry, "after": tuple(entry.get("after") or ()), "needs": commands})
        except (TypeError, ValueError) as error:
            raise UserError(f"{path.name}: {kind} of '{name}' is wrong: {error}.") from error


def _each_game(runs: list[Trained]) -> Iterator[Trained]:
    for run in runs:
        for game in atari100k.games():
            yield dataclasses.replace(run, env=f"ALE/{game}-v5", name=f"{run.algorithm}-{run.preset}-{game}")


def _trained(entry: dict[str, Any]) -> Trained:
    return _with_valid_target(Trained(**entry))


def _experiment(entry: dict[str, Any]) -> Experiment:
    figures = tuple(_with_valid_target(Figure(**figure)) for figure in entry.get("figures") or ())
    made = Experiment(**{**entry, "figures": figures})
    if not made.result and (made.is_command or not made.run):
        raise ValueError(f"'{made.run}' must name its result")
    return dataclasses.replace(made, result=made.result or made.run.partition(":")[2].replace("_", "-"))


def _with_valid_target(made: Any) -> Any:
    if made.target is not None:
        try:
            met(made.target, 0.0)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"the target '{made.target}' must be '>= 1', '<= 1', '>= 2 × baseline', '1 ± 0.1' or 'yes'"
            ) from error
    return made
