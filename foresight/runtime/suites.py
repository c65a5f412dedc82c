"""What `suites.yaml` says: the results that belong together, what each costs, and the targets that they are held to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foresight.errors import UserError
from foresight.runtime import catalog

FILE = Path(__file__).with_name("suites.yaml")


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number of a result that speaks for an algorithm."""

    algorithm: str
    key: str  # of the result; "a/b" is b within a
    task: str  # what the number is of, in a few words
    target: str | None = None  # see `met`


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What a function or a command finds out, and the figures of it that count."""

    run: str  # "module:function" (see runtime/book.py for the form), or a command that is typed in the checkout
    result: str = ""  # the stem of the JSON; of a function: its name
    figures: tuple[Figure, ...] = ()

    @property
    def is_command(self) -> bool:
        """Whether it is typed instead of called."""
        return " " in self.run


@dataclasses.dataclass(frozen=True)
class Trained:
    """A preset to train over seeds 0 to `seeds` - 1, and what its evaluation is held to."""

    algorithm: str
    preset: str
    seeds: int = 5
    episodes: int | None = None  # of an evaluation; None: the preset's
    steps: int | None = None  # None: the preset's
    target: str | None = None  # see `met`

    @property
    def result(self) -> str:
        """The stem of the JSON."""
        return f"{self.algorithm}-{self.preset}".replace("/", "-")

    @property
    def budget(self) -> int | None:
        """The steps of a seed, in the algorithm's unit; None where something else than a number of steps ends a run."""
        return self.steps or catalog.presets(self.algorithm).get(self.preset, {}).get("steps")


@dataclasses.dataclass(frozen=True)
class Suite:
    """What belongs to one name."""

    name: str
    title: str
    experiments: tuple[Experiment, ...] = ()
    runs: tuple[Trained, ...] = ()


def suites(path: Path = FILE) -> dict[str, Suite]:
    """Every suite by name. Raises UserError for an entry with a key that does not exist or a target without a form."""
    return {
        name: Suite(
            name,
            entry["title"],
            tuple(_entries(path, name, "an experiment", _experiment, entry.get("experiments"))),
            tuple(_entries(path, name, "a run", _trained, entry.get("runs"))),
        )
        for name, entry in catalog.read_yaml(path).items()
    }


def met(target: str, value: float) -> bool:
    """Whether `value` is what `target` asks for: `>= 475`, `<= 1e-6`, `-25 ± 3`, or `yes` of what is true or false."""
    if target == "yes":
        return value is True
    centre, _, width = target.partition("±")
    if width:
        return abs(value - float(centre)) <= float(width)
    sign, bound = target.split()
    if sign not in (">=", "<="):
        raise ValueError(target)
    return value >= float(bound) if sign == ">=" else value <= float(bound)


def _entries(path: Path, name: str, kind: str, make: Any, entries: list[dict[str, Any]] | None) -> Iterator[Any]:
    for entry in entries or ():
        try:
            yield make(entry)
        except (TypeError, ValueError) as error:
            raise UserError(f"{path.name}: {kind} of '{name}' is wrong: {error}.") from error


def _trained(entry: dict[str, Any]) -> Trained:
    return _checked(Trained(**entry))


def _experiment(entry: dict[str, Any]) -> Experiment:
    figures = tuple(_checked(Figure(**figure)) for figure in entry.get("figures") or ())
    made = Experiment(**{**entry, "figures": figures})
    if made.is_command and not made.result:
        raise ValueError(f"'{made.run}' must name its result")
    return dataclasses.replace(made, result=made.result or made.run.partition(":")[2].replace("_", "-"))


def _checked(made: Any) -> Any:
    if made.target is not None:
        try:
            met(made.target, 0.0)
        except (AttributeError, ValueError) as error:
            raise ValueError(f"the target '{made.target}' is none of '>= 1', '<= 1', '1 ± 0.1' and 'yes'") from error
    return made
