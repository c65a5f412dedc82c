"""Learning curves: the interquartile mean over seeds, with a bootstrap interval.

Source: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice"
(arXiv 2108.13264): with few seeds, report the mean of the middle half and an interval, never the best run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foresight.errors import UserError, unknown
from foresight.runtime import catalog
from foresight.runtime.monitoring import log

Array = NDArray[np.float64]
DEFAULTS = ("return", "reward", "accuracy")  # drawn for an algorithm without METRICS
POINTS = 200  # of a drawn curve: more than a figure can resolve
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Curve:
    """One metric of one run: `steps` and `values` `[N]`, with the run's label and seed."""

    label: str
    metric: str
    seed: int | None
    steps: Array
    values: Array


@dataclass(frozen=True)
class Band:
    """Several runs on common steps `[N]`: `middle` is the interquartile mean, `low` and `high` the 95% interval."""

    label: str
    metric: str
    runs: int
    steps: Array
    middle: Array
    low: Array
    high: Array


def describe(run: str | Path) -> dict[str, Any]:
    """The facts of a run: `config.yaml`, updated by `summary.json` if the run has ended.

    Raises `UserError` if `run` is not a run directory, or one of these files cannot be read.
    """
    path = Path(run)
    if not (path / log.METRICS).is_file():
        raise UserError(f"'{run}' is not a run directory: it has no {log.METRICS}. Make a run with: foresight train")
    facts: dict[str, Any] = {}
    for file in (path / "config.yaml", path / "summary.json"):
        if file.is_file():
            facts.update(catalog.read_mapping(file))
    return facts


def curve(run: str | Path, metric: str | None = None, x: str = "step") -> Curve:
    """The curve of one run over "step" or "seconds". Raises `UserError` if the metric was never logged."""
    facts, rows = describe(run), log.read(run)
    valid = _logged(run, rows)
    name = metric or next((name for name in (*_shown(facts), *DEFAULTS) if name in valid), valid[0])
    if name not in valid:
        raise unknown("metric", name, valid)
    numbered = [row for row in rows if _is_number(row.get(x)) and _is_number(row.get(name))]
    pairs = [(row[x], row[name]) for row in numbered if np.isfinite(row[name])]
    if not pairs:
        raise UserError(f"The run '{run}' has no finite value of '{name}'.")
    steps, values = np.array(pairs, dtype=float).T
    return Curve(label(facts) or Path(run).name, name, facts.get("seed"), steps, values)


def label(facts: Mapping[str, Any], whole: bool = False) -> str:
    """Algorithm and environment of a run; `whole`: with the path of a user's algorithm, not its name alone."""
    path = Path(str(facts.get("algorithm", "")))  # a user's algorithm is stored as its absolute path
    here = Path.cwd()
    name = str(path.relative_to(here) if path.is_relative_to(here) else path) if whole else path.stem
    env = facts.get("env")
    return f"{name} on {env}" if env else name


def labels(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The group of each run: its algorithm and environment, with the paths of algorithms that have the same name."""
    algorithms: dict[str, set[str]] = {}
    for one in facts:
        algorithms.setdefault(label(one), set()).add(str(one.get("algorithm", "")))
    return [label(one, whole=len(algorithms[label(one)]) > 1) for one in facts]


def iqm(values: Array, axis: int = 0) -> Array:
    """Interquartile mean: the mean without the lowest and the highest quarter along `axis`."""
    from scipy.stats import trim_mean

    return np.asarray(trim_mean(values, 0.25, axis=axis))


def interval(values: Array, resamples: int = 2000, seed: int = 0) -> tuple[Array, Array]:
    """Percentile bootstrap 95% interval of the interquartile mean over runs; `values` `[runs, N]` gives two `[N]`.

    All runs of a group are on one environment, so this is the stratified bootstrap with a single stratum. One run has
    no interval: both ends are NaN.
    """
    if values.shape[0] < 2:
        unknown_end = np.full(values.shape[1:], np.nan)
        return unknown_end, unknown_end
    from scipy.stats import bootstrap

    found = bootstrap(
        (values,),
        lambda sample, axis: iqm(sample, axis=axis),
        axis=0,
        vectorized=True,
        n_resamples=resamples,
        batch=100,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    # If all runs agree scipy returns NaN, but the interval is that one value.
    same = np.ptp(values, axis=0) == 0
    return np.where(same, values[0], found.low), np.where(same, values[0], found.high)


def band(curves: Sequence[Curve], points: int = POINTS) -> Band:
    """Resample runs to common steps (bin means), up to the end of the shortest: nothing is extrapolated.

    Raises `UserError` if they share no steps.
    """
    start = max(float(c.steps[0]) for c in curves)
    stop = min(float(c.steps[-1]) for c in curves)
    if stop < start:
        raise UserError(
            f"The runs of {curves[0].label} share no steps: one ends at {stop:g}, another begins at {start:g}. "
            "Plot them one by one."
        )
    count = min(points, max(len(c.steps) for c in curves))
    if stop == start or count < 2:
        steps = np.array([stop])
        values = np.array([[np.interp(stop, c.steps, c.values)] for c in curves])
    else:
        steps = np.linspace(start, stop, count)
        values = np.stack([_binned(c, steps) for c in curves])
    low, high = interval(values)
    return Band(curves[0].label, curves[0].metric, len(curves), steps, iqm(values), low, high)


def bands(runs: Sequence[str | Path], metric: str | None = None, x: str = "step") -> list[Band]:
    """The bands of runs, grouped by algorithm and environment."""
    return [group_band(name, group, metric, x) for name, group in groups(runs).items()]


def groups(runs: Sequence[str | Path]) -> dict[str, list[str | Path]]:
    """The runs by their `labels`."""
    found: dict[str, list[str | Path]] = {}
    for run, name in zip(runs, labels([describe(run) for run in runs]), strict=True):
        found.setdefault(name or Path(run).name, []).append(run)
    return found


def group_band(name: str, runs: Sequence[str | Path], metric: str | None = None, x: str = "step") -> Band:
    """The band of one group, called `name`, over one metric. Raises `UserError` if the runs have none in common."""
    curves = [curve(run, metric, x) for run in runs]
    if len({one.metric for one in curves}) > 1:
        shared = _shared(name, runs)
        curves = [curve(run, shared, x) for run in runs]
    return band([replace(one, label=name) for one in curves])


def _shared(name: str, runs: Sequence[str | Path]) -> str:
    """The first metric shown of a group that all its runs logged. Raises `UserError` with a run that lacks it."""
    logged = {run: _logged(run, log.read(run)) for run in runs}
    known = {metric for names in logged.values() for metric in names}
    shown = [metric for metric in (*_shown(describe(runs[0])), *DEFAULTS) if metric in known] or logged[runs[0]]
    for metric in shown:
        if all(metric in names for names in logged.values()):
            return metric
    lacks = next(run for run, names in logged.items() if shown[0] not in names)
    raise UserError(
        f"The run '{lacks}' has not logged '{shown[0]}', as others of {name} have. "
        "Leave it out, or choose what all have logged with --metric."
    )


def draw(
    runs: Sequence[str | Path], out: str | Path, metric: str | None = None, x: str = "step", title: str = ""
) -> list[Band]:
    """Draw the learning curves of `runs` into `out` (.png, .svg or .pdf); returns what was drawn."""
    if not runs:
        raise UserError("Name at least one run directory to plot.")
    drawn = bands(runs, metric, x)
    figure, axes = _axes(out)
    for one in drawn:
        count = f" ({one.runs} runs)" if one.runs > 1 else ""
        (line,) = axes.plot(one.steps, one.middle, label=one.label + count, linewidth=1.8)
        if one.runs > 1:
            axes.fill_between(one.steps, one.low, one.high, alpha=0.2, color=line.get_color(), linewidth=0)
    unit = {"step": _unit(runs[0]), "seconds": "seconds"}[x]
    axes.set(xlabel=unit, ylabel=", ".join(dict.fromkeys(one.metric for one in drawn)), title=title)
    if any(one.runs > 1 for one in drawn):
        figure.text(0.99, 0.01, "interquartile mean, 95% bootstrap interval", ha="right", fontsize=7, color="0.5")
    axes.legend(frameon=False, fontsize=9)
    save(figure, out)
    return drawn


def before_after(run: str | Path, out: str | Path, metric: str | None = None) -> None:
    """Draw the curve of one run, with its evaluations before and after training as horizontal lines.

    The lines are drawn if the run's `summary.json` holds the evaluations.
    """
    facts, one = describe(run), curve(run, metric)
    name = one.metric
    figure, axes = _axes(out)
    axes.plot(one.steps, one.values, color="0.75", linewidth=1, label=f"{name} in training")
    if len(one.steps) > 10:
        steps = np.linspace(one.steps[0], one.steps[-1], min(40, len(one.steps) // 3))
        axes.plot(steps, _binned(one, steps), color="tab:blue", linewidth=2, label=f"{name}, averaged")
    for key, text, color in (("baseline", "before", "tab:red"), ("evaluation", "after", "tab:green")):
        measured = facts.get(key)
        if isinstance(measured, Mapping) and _is_number(measured.get("mean")):
            legend = f"{text}: {measured.get('metric', '')} {measured['mean']:.3g} (n={measured.get('n', '?')})"
            axes.axhline(measured["mean"], color=color, linestyle="--", linewidth=1.2, label=legend)
    axes.set(xlabel=_unit(run), ylabel=name, title=label(facts))
    axes.legend(frameon=False, fontsize=9)
    save(figure, out)


def _binned(one: Curve, steps: Array) -> Array:
    """The mean of the values nearest to each of `steps`, interpolated where there are none."""
    edges = (steps[:-1] + steps[1:]) / 2
    index = np.searchsorted(edges, one.steps)
    inside = (one.steps >= steps[0]) & (one.steps <= steps[-1])
    counts = np.bincount(index[inside], minlength=len(steps))
    sums = np.bincount(index[inside], weights=one.values[inside], minlength=len(steps))
    means = sums / np.maximum(counts, 1)
    return np.where(counts > 0, means, np.interp(steps, one.steps, one.values))


def _logged(run: str | Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics in the rows of a run. Raises `UserError` if there are none."""
    names = dict.fromkeys(k for row in rows for k, v in row.items() if _is_number(v))
    found = [name for name in names if name not in ("step", "seconds")]
    if not found:
        raise UserError(f"The run '{run}' has not logged any metrics yet.")
    return found


def _shown(facts: Mapping[str, Any]) -> tuple[str, ...]:
    entry = _entry(facts)
    return entry.metrics if entry else ()


def _entry(facts: Mapping[str, Any]) -> catalog.Entry | None:
    """The algorithm's catalog entry; None if a user's algorithm file no longer exists."""
    try:
        return catalog.entry(str(facts.get("algorithm")))
    except UserError:
        return None


def _unit(run: str | Path) -> str:
    facts = describe(run)
    entry = _entry(facts)
    return str(facts.get("unit") or (entry.unit if entry else "step"))


def _axes(out: str | Path) -> tuple[Any, Any]:
    figure, (axes,) = panels(out, 1)
    return figure, axes


def panels(out: str | Path, columns: int) -> tuple[Any, list[Any]]:
    """A figure and its axes in a row. Raises UserError if `out` has another suffix than those of `FORMATS`."""
    if Path(out).suffix.lower() not in FORMATS:
        raise UserError(f"Cannot draw '{out}': the name must end in one of {', '.join(FORMATS)}.")
    # Without pyplot: no window and no global state, also in a notebook.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2 if columns == 1 else 3.6 * columns, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    row = figure.subplots(1, columns, squeeze=False)[0]
    for axes in row:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure, list(row)


def save(figure: Any, out: str | Path) -> None:
    """Write the figure. Raises UserError if that fails."""
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise UserError(f"Cannot write {out}: {error.strerror or error}. Choose another --out.") from error


def _is_number(value: Any) -> bool:
    """Whether a value has a place on an axis; a whole number may be too large for that."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)
