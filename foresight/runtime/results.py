"""What the committed results say of each algorithm, against its targets. No torch, so that lists are quick.

`gather` reads the files of `results/`; `rows` reads `results.json` beside this file, which `python
benchmarks/tables.py` makes of them and which is packaged: one small file, so that `foresight list` is quick.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foresight.runtime import catalog
from foresight.runtime.suites import Experiment, Trained, met, suites

INDEX = Path(__file__).with_name("results.json")


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure of an algorithm: what is asked for, and what was reached, which is None where nothing was run yet."""

    algorithm: str
    task: str
    suite: str | None  # None: no suite asks for it
    target: str | None
    file: str  # in the checkout
    seeds: int | None = None  # that the suite asks for
    steps: int | None = None  # that a seed may take, in `unit`
    unit: str = ""
    value: float | None = None  # of several seeds the interquartile mean
    interval: tuple[float, float] | None = None  # 95%, bootstrapped over the seeds
    done_seeds: int | None = None
    done_steps: int | None = None
    episodes: int | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None without one, or without a result."""
        return None if self.target is None or self.value is None else met(self.target, self.value)

    def words(self) -> str:
        """What was reached, in a few words."""
        if self.value is None:
            return f"{self.task}: not run"
        seeds = f", {self.done_seeds} seed{'s' if self.done_seeds > 1 else ''}" if self.done_seeds else ""
        aim = "" if self.target is None else f" ({self.target})" if self.met else f" (missed: {self.target})"
        return f"{figure(self.value)} on {self.task}{seeds}{aim}"


def rows() -> list[Row]:
    """The rows with a result, as they were when the index was made."""
    stored = json.loads(INDEX.read_text(encoding="utf-8"))
    return [Row(**{**row, "interval": row["interval"] and tuple(row["interval"])}) for row in stored]


def gather(folder: Path | None = None) -> list[Row]:
    """The rows of all suites, then the results that no suite asks for, as the files of `folder` have them.

    `folder` is by default the checkout's `results/`.
    """
    folder = folder or catalog.ROOT.parent / "results"
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}
    asked = [row for suite in suites().values() for row in _asked(suite.name, suite.experiments, suite.runs, found)]
    named = {row.file for row in asked}
    others = (_trained(stem, result) for stem, result in found.items() if f"results/{stem}.json" not in named)
    return asked + [row for row in others if row is not None]


def verified(algorithm: str, among: list[Row] | None = None) -> list[Row]:
    """The rows of an algorithm that have a result, those that met their target first; a figure once."""
    mine = [row for row in (rows() if among is None else among) if row.algorithm == algorithm and row.value is not None]
    once = {(row.file, row.task): row for row in reversed(mine)}
    return sorted(reversed(once.values()), key=lambda row: {True: 0, None: 1, False: 2}[row.met])


def document() -> str:
    """What `results.json` must hold."""
    found = [dataclasses.asdict(row) for row in gather() if row.value is not None]
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def figure(value: float | None, digits: int = 4) -> str:
    """A number as a table shows it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def _asked(
    suite: str, experiments: tuple[Experiment, ...], runs: tuple[Trained, ...], found: dict[str, Any]
) -> Iterator[Row]:
    for one in experiments:
        result = found.get(one.result, {})
        for asked in one.figures:
            value: Any = result
            for key in asked.key.split("/"):
                value = (value or {}).get(key)
            seeds = result.get("seeds")
            done = len(seeds) if isinstance(seeds, list) else seeds or None  # 0: nothing in it is random
            file = f"results/{one.result}.json"
            yield Row(asked.algorithm, asked.task, suite, asked.target, file, value=value, done_seeds=done)
    for run in runs:
        entry = catalog.entry(run.algorithm)
        file = f"results/{run.result}.json"
        blank = Row(run.algorithm, run.preset, suite, run.target, file, run.seeds, run.budget, entry.unit)
        yield _reached(blank, found[run.result]) if run.result in found else blank


def _trained(stem: str, result: dict[str, Any]) -> Row | None:
    """The row of a preset's result; None if it is none."""
    algorithm, _, task = result["what"].partition(" on ")
    if "iqm" not in result or algorithm not in catalog.algorithms():
        return None
    return _reached(Row(algorithm, task, None, None, f"results/{stem}.json"), result)


def _reached(blank: Row, result: dict[str, Any]) -> Row:
    low, high = result["interval_95"]
    return dataclasses.replace(
        blank,
        task=blank.task if result["metric"] in ("return", "value") else f"{blank.task}, {result['metric']}",
        unit=result["unit"],
        value=result["iqm"],
        interval=None if low is None else (low, high),
        done_seeds=len(result["seeds"]),
        done_steps=result["steps"],
        episodes=result["episodes"],
    )
