"""What the committed results say of each algorithm, against its targets. No torch, so that lists are quick.

`gather` reads the files of `results/`; `rows` reads `results.json` beside this file, which `python
benchmarks/tables.py` makes of them and which is packaged: one small file, so that `foresight list` is quick.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foresight.runtime import catalog
from foresight.runtime.results.suites import Suite, met, suites

INDEX = Path(__file__).with_name("results.json")


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure of an algorithm: what is asked for, and what was reached, which is None where nothing was run yet."""

    algorithm: str
    task: str
    name: str  # of the row in its suite: the stem of the file
    suite: str | None = None  # None: no suite asks for it
    target: str | None = None
    command: str = ""  # what makes it; "" where no code can do it yet
    seeds: int | None = None  # that the suite asks for
    steps: int | None = None  # that a seed may take, in `unit`
    unit: str = ""
    minutes: float | None = None  # that a seed may take
    value: float | None = None  # of several seeds the interquartile mean
    interval: tuple[float, float] | None = None  # 95%, bootstrapped over the seeds, or over the games of a match
    done_seeds: int | None = None
    done_steps: int | None = None
    done_minutes: float | None = None  # of the slowest seed
    episodes: int | None = None
    met: bool | None = None  # whether the target was reached; None without one, or without a result

    @property
    def file(self) -> str:
        """The result, in the checkout."""
        return f"results/{self.name}.json"

    def words(self) -> str:
        """What was reached, in a few words."""
        if self.value is None:
            return f"{self.task}: not run"
        seeds = f", {self.done_seeds} seed{'s' if self.done_seeds > 1 else ''}" if self.done_seeds else ""
        aim = {None: "", True: f" ({self.aim})", False: f" (missed: {self.aim})"}[self.met]
        return f"{figure(self.value)}{band(self.interval)} on {self.task}{seeds}{aim}"

    @property
    def aim(self) -> str:
        """The target, and the time for it."""
        words = [self.target or "", f"in {self.minutes:g} min" if self.minutes else ""]
        return " ".join(word for word in words if word)

    @property
    def budget(self) -> str:
        """Seeds and steps that were asked for."""
        parts = [f"{self.seeds} ×" if self.seeds else "", f"{self.steps:,} {self.unit}" if self.steps else ""]
        return " ".join(part for part in parts if part)

    @property
    def reached(self) -> str:
        """The figure with its interval, and of how many seeds it is where there are fewer than were asked for."""
        fewer = self.done_seeds is not None and self.seeds is not None and self.done_seeds < self.seeds
        few = f", {self.done_seeds} of {self.seeds} seeds" if fewer else ""
        return figure(self.value) + band(self.interval) + few

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return "not run" if self.value is None else {True: "met", False: "missed", None: "–"}[self.met]


def rows() -> list[Row]:
    """The rows with a result, as they were when the index was made."""
    stored = json.loads(INDEX.read_text(encoding="utf-8"))
    return [Row(**{**row, "interval": _pair(row.get("interval"))}) for row in stored]


def gather(folder: Path | None = None) -> list[Row]:
    """The rows of all suites, then the results that no suite asks for, as the files of `folder` have them.

    `folder` is by default the checkout's `results/`.
    """
    folder = folder or catalog.ROOT.parent / "results"
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}
    asked = [row for suite in suites().values() for row in _asked(suite, found)]
    named = {row.name for row in asked}
    others = (_other(stem, result) for stem, result in found.items() if stem not in named)
    return asked + [row for row in others if row is not None]


def verified(algorithm: str, among: list[Row] | None = None) -> list[Row]:
    """The rows of an algorithm that have a result: those that met their target first, and presets; a figure once."""
    mine = [row for row in (rows() if among is None else among) if row.algorithm == algorithm and row.value is not None]
    once = {(row.name, row.task): row for row in reversed(mine)}
    return sorted(reversed(once.values()), key=lambda row: ({True: 0, None: 1, False: 2}[row.met], not row.steps))


def document() -> str:
    """What `results.json` must hold."""
    found = [dataclasses.asdict(row) for row in gather() if row.value is not None]
    short = [{key: value for key, value in row.items() if value is not None and value != ""} for row in found]
    return json.dumps(short, indent=1, ensure_ascii=False) + "\n"


def figure(value: float | None, digits: int = 4) -> str:
    """A number as a table shows it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def band(interval: Sequence[float | None] | None) -> str:
    """An interval after its number."""
    low, high = interval or (None, None)
    return "" if low is None else f" [{figure(low)}, {figure(high)}]"


def _asked(suite: Suite, found: Mapping[str, Any]) -> Iterator[Row]:
    for one in suite.experiments:
        result = found.get(one.result, {})
        again = f"foresight reproduce {suite.name} --only {one.result}"
        for asked in one.figures:
            *path, last = asked.key.split("/")
            within = result
            for key in path:
                within = within.get(key) or {} if isinstance(within, dict) else within[int(key)]
            seeds = result.get("seeds")
            yield _judged(
                Row(
                    asked.algorithm, asked.task, one.result, suite.name, asked.target,
                    command=one.run if one.is_command else again if one.run else "",
                    value=within.get(last),
                    interval=_pair(within.get("interval_95")) if path and last == "score" else None,
                    done_seeds=len(seeds) if isinstance(seeds, list) else seeds or None,  # 0: nothing in it is random
                ),
                found,
            )  # fmt: skip
    for run in suite.runs:
        unit = catalog.entry(run.algorithm).unit
        env = " ".join(f"{key}={value}" for key, value in run.options.get("env_options", {}).items())
        blank = Row(
            run.algorithm, f"{run.preset} {env}".strip(), run.result, suite.name, run.target,
            f"foresight reproduce {suite.name} --only {run.result}", run.seeds, run.budget, unit, run.minutes,
        )  # fmt: skip
        yield _reached(blank, found) if run.result in found else blank


def _other(stem: str, result: dict[str, Any]) -> Row | None:
    """The row of a preset's result that no suite asks for; None if it is none."""
    algorithm, _, task = result.get("what", "").partition(" on ")
    if "iqm" not in result or algorithm not in catalog.algorithms():
        return None
    return _reached(Row(algorithm, task, stem, command=result["command"]), {stem: result})


def _reached(blank: Row, found: Mapping[str, Any]) -> Row:
    result = found[blank.name]
    row = dataclasses.replace(
        blank,
        task=blank.task if result["metric"] in ("return", "value") else f"{blank.task}, {result['metric']}",
        unit=result["unit"],
        value=result["iqm"],
        interval=_pair(result["interval_95"]),
        done_seeds=len(result["seeds"]),
        done_steps=result["steps"],
        done_minutes=round(max(result["seconds"]) / 60, 2),
        episodes=result["episodes"],
    )
    return _judged(row, found)


def _judged(row: Row, found: Mapping[str, Any]) -> Row:
    """The row with its verdict."""
    if row.target is None or row.value is None:
        return row
    known = {stem: result["iqm"] for stem, result in found.items() if "iqm" in result}
    if "baseline" in found[row.name]:
        known["baseline"] = found[row.name]["baseline"]
    verdict = met(row.target, row.value, known)
    if verdict and row.minutes is not None and row.done_minutes is not None:
        verdict = row.done_minutes <= row.minutes
    return dataclasses.replace(row, met=verdict)


def _pair(interval: Sequence[float | None] | None) -> tuple[float, float] | None:
    low, high = interval or (None, None)
    return None if low is None or high is None else (low, high)
