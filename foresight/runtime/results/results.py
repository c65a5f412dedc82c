"""The committed results of each algorithm, compared with its targets. No torch, so that lists are fast.

`gather` reads the files of `results/`. `rows` reads `results.json` next to this file, one small file that is packaged,
so that `foresight list` is fast; `python benchmarks/tables.py` makes it from `results/`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foresight.runtime import catalog, legacy
from foresight.runtime.results.suites import Suite, met, suites

INDEX = Path(__file__).with_name("results.json")


@dataclasses.dataclass(frozen=True)
class Row:
    """A result of an algorithm: its target and budget, and the value reached, which is None if it was not run."""

    algorithm: str
    task: str
    name: str  # of the row in its suite: the stem of the file
    suite: str | None = None  # None: in no suite
    target: str | None = None
    command: str = ""  # that makes it; "" if no code does it yet
    seeds: int | None = None  # in the suite
    steps: int | None = None  # budget per seed, in `unit`
    unit: str = ""
    minutes: float | None = None  # limit per seed
    value: float | None = None  # the interquartile mean over seeds
    interval: tuple[float, float] | None = None  # 95%, bootstrapped over seeds, or over the games of a match
    worst: float | None = None  # of the seeds, where the interval leaves it out
    done_seeds: int | None = None
    done_steps: int | None = None
    done_minutes: float | None = None  # of the slowest seed
    episodes: int | None = None
    met: bool | None = None  # whether the target was met; None without a target or a result
    made: str | None = None  # the command that made it, if it is another one than the suite's, often of less

    @property
    def file(self) -> str:
        """The result file, in the checkout."""
        return f"results/{self.name}.json"

    def text(self) -> str:
        """The value reached, in a few words."""
        if self.value is None:
            return f"{self.task}: not run"
        seeds = f", {self.done_seeds} seed{'s' if self.done_seeds > 1 else ''}" if self.done_seeds else ""
        suffix = {None: "", True: f" ({self.aim})", False: f" (missed: {self.aim})"}[self.met]
        return f"{self.score} on {self.task}{seeds}{suffix}"

    @property
    def score(self) -> str:
        """The value with its interval, and the worst seed if it is outside."""
        worst = "" if self.worst is None else f", worst {figure(self.worst)}"
        return figure(self.value) + band(self.interval) + worst

    @property
    def aim(self) -> str:
        """The target and its time limit."""
        parts = [self.target or "", f"in {self.minutes:g} min" if self.minutes else ""]
        return " ".join(part for part in parts if part)

    @property
    def budget(self) -> str:
        """The seeds and steps of the suite."""
        if self.seeds and not self.steps:
            return f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"
        parts = [f"{self.seeds} ×" if self.seeds else "", f"{self.steps:,} {self.unit}" if self.steps else ""]
        return " ".join(part for part in parts if part)

    @property
    def reached(self) -> str:
        """The score, and the number of seeds if there are fewer than in the suite."""
        fewer = self.done_seeds is not None and self.seeds is not None and self.done_seeds < self.seeds
        few = f", {self.done_seeds} of {self.seeds} seeds" if fewer else ""
        return self.score + few

    @property
    def verdict(self) -> str:
        """Whether the target was met, in a word or two."""
        return "not run" if self.value is None else {True: "met", False: "missed", None: "–"}[self.met]


def rows() -> list[Row]:
    """The rows with a result, from `results.json`."""
    stored = json.loads(INDEX.read_text(encoding="utf-8"))
    return [Row(**{**row, "interval": _pair(row.get("interval"))}) for row in stored]


def gather(folder: Path | None = None) -> list[Row]:
    """The rows of all suites, then the results in no suite, from the files of `folder`.

    The default is `results/` in the checkout; in an installed package that of the current directory, where a row
    without a file has the published values of `results.json`.
    """
    published = rows() if folder is None and not catalog.in_checkout() else []
    folder = folder or catalog.checkout() / "results"
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}
    listed = [row for suite in suites().values() for row in _suite_rows(suite, found)]
    named = {row.name for row in listed}
    others = (_other(stem, result) for stem, result in found.items() if stem not in named)
    rest = [row for row in published if row.suite is None and row.name not in found]
    whole = listed if not published else [_published(row, published) if row.value is None else row for row in listed]
    return whole + [row for row in others if row is not None] + rest


def _published(row: Row, published: Sequence[Row]) -> Row:
    """The row as published, or itself if it was not. The task of a trained row may be followed by its metric."""
    same = [one for one in published if (one.suite, one.name, one.algorithm) == (row.suite, row.name, row.algorithm)]
    return next((one for one in same if one.task == row.task or (row.unit and one.unit)), row)


def verified(algorithm: str, among: list[Row] | None = None) -> list[Row]:
    """The rows of an algorithm with a result, without duplicates: those that met their target and presets first."""
    mine = [row for row in (rows() if among is None else among) if row.algorithm == algorithm and row.value is not None]
    unique = {(row.name, row.task): row for row in reversed(mine)}
    return sorted(reversed(unique.values()), key=lambda row: ({True: 0, None: 1, False: 2}[row.met], not row.steps))


def document() -> str:
    """The contents of `results.json`."""
    found = [dataclasses.asdict(row) for row in gather() if row.value is not None]
    short = [{key: value for key, value in row.items() if value is not None and value != ""} for row in found]
    return json.dumps(short, indent=1, ensure_ascii=False) + "\n"


def figure(value: float | None, digits: int = 4) -> str:
    """A value as tables show it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def band(interval: Sequence[float | None] | None) -> str:
    """An interval as text, to follow its value."""
    low, high = interval or (None, None)
    return "" if low is None else f" [{figure(low)}, {figure(high)}]"


def _suite_rows(suite: Suite, found: Mapping[str, Any]) -> Iterator[Row]:
    for one in suite.experiments:
        result = found.get(one.result, {})
        reproduce = f"foresight reproduce {suite.name} --only {one.result}"
        for wanted in one.figures:
            *path, last = wanted.key.split("/")
            within = result
            for key in path:
                within = within[int(key)] if isinstance(within, list) else within.get(key) or {}
                if not isinstance(within, dict | list):  # measured before this figure had parts
                    within = {}
            seeds = result.get("seeds")
            made = result.get("command") if one.is_command else None
            yield _with_verdict(
                Row(
                    wanted.algorithm, wanted.task, one.result, suite.name, wanted.target,
                    command=one.run if one.is_command else reproduce if one.run else "",
                    seeds=one.seeds,
                    value=within.get(last),
                    interval=_pair(within.get("interval_95")) if path and last == "score" else None,
                    done_seeds=len(seeds) if isinstance(seeds, list) else seeds or None,  # 0: it is deterministic
                    made=made if within.get(last) is not None and made != one.run else None,
                ),
                found,
            )  # fmt: skip
    for run in suite.runs:
        unit = catalog.entry(run.algorithm).unit
        options = run.options.get("env_options", {}).items()
        env = " ".join(f"{key}={value}" for key, value in options if value != "{seed}")
        blank = Row(
            run.algorithm, " ".join(filter(None, (run.preset, run.env, env))), run.result, suite.name, run.target,
            f"foresight reproduce {suite.name} --only {run.result}", run.seeds, run.budget, unit, run.minutes,
        )  # fmt: skip
        yield _with_result(blank, found) if run.result in found else blank


def _other(stem: str, result: dict[str, Any]) -> Row | None:
    """The row of a preset's result that is in no suite; None for other results."""
    algorithm, _, task = result.get("what", "").partition(" on ")
    if "iqm" not in result or algorithm not in catalog.algorithms():
        return None
    task, _ = legacy.preset(algorithm, task)
    return _with_result(Row(algorithm, task, stem, command=result["command"]), {stem: result})


def _with_result(blank: Row, found: Mapping[str, Any]) -> Row:
    result = found[blank.name]
    interval, worst = _pair(result["interval_95"]), result.get("worst")
    row = dataclasses.replace(
        blank,
        task=blank.task if result["metric"] in ("return", "value") else f"{blank.task}, {result['metric']}",
        unit=result["unit"],
        value=result["iqm"],
        interval=interval,
        worst=worst if _outside(worst, interval) else None,
        done_seeds=len(result["seeds"]),
        done_steps=result["steps"],
        done_minutes=round(max(result["seconds"]) / 60, 2),
        episodes=result["episodes"],
    )
    return _with_verdict(row, found)


def _with_verdict(row: Row, found: Mapping[str, Any]) -> Row:
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


def _outside(value: float | None, interval: tuple[float, float] | None) -> bool:
    """Whether a value is outside of the interval, by more than a figure shows."""
    if value is None or interval is None or interval[0] <= value <= interval[1]:
        return False
    return figure(value) not in map(figure, interval)


def _pair(interval: Sequence[float | None] | None) -> tuple[float, float] | None:
    low, high = interval or (None, None)
    return None if low is None or high is None else (low, high)
