"""Results, rerun: a preset over seeds, or a suite of `suites.yaml`, each as one JSON with the command that made it."""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foresight.errors import UserError, unknown
from foresight.runtime import catalog

SUITES = Path(__file__).with_name("suites.yaml")
QUICK = 100  # --quick trains a hundredth of the steps
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """A preset to train over seeds 0 to `seeds` - 1."""

    algorithm: str
    preset: str
    seeds: int = 5
    episodes: int | None = None  # of an evaluation; None: the preset's
    steps: int | None = None  # None: the preset's


@dataclass(frozen=True)
class Suite:
    """What belongs to one name: experiments as `module:function`, and presets to train."""

    name: str
    title: str
    experiments: tuple[str, ...] = ()
    runs: tuple[Trained, ...] = field(default=())


def suites(path: Path = SUITES) -> dict[str, Suite]:
    """Every suite by name. Raises UserError for an entry with a key that does not exist."""
    import yaml

    found = {}
    for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        try:
            runs = tuple(Trained(**run) for run in entry.get("runs") or ())
        except TypeError as error:
            raise UserError(f"{path.name}: a run of '{name}' is wrong: {error}.") from error
        found[name] = Suite(name, entry["title"], tuple(entry.get("experiments") or ()), runs)
    return found


def root() -> Path:
    """The source checkout, or the current directory where the package is installed without one."""
    checkout = catalog.ROOT.parent
    return checkout if (checkout / "benchmarks").is_dir() else Path.cwd()


def reproduce(
    name: str, out: str | Path | None = None, quick: bool = False, say: Say = lambda text: None
) -> list[Path]:
    """Rerun the suite `name`; returns the files that were written.

    JSON goes to `results/` and pictures to `docs/media/` of the checkout, or both to `out`. `quick` runs little, to see
    that everything works, and writes to `runs/reproduce/NAME-quick` unless `out` is given. Presets that were trained
    before, in `runs/reproduce`, are resumed or read. Raises UserError for a name that does not exist.
    """
    valid = suites()
    if name not in valid:
        raise unknown("suite", name, valid)
    suite = valid[name]
    if out is None and quick:
        out = root() / "runs" / "reproduce" / f"{name}-quick"
    results = Path(out) if out else root() / "results"
    media = Path(out) if out else root() / "docs" / "media"
    for folder in (results, media):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot write to {folder}: {error.strerror or error}. Choose another --out.") from error
    command = f"foresight reproduce {name}" + (" --quick" if quick else "")
    written: list[Path] = []
    for target in suite.experiments:
        say(target.partition(":")[2])
        written += experiment(target, results, media, command, quick)
    for one_run in suite.runs:
        say(f"{one_run.algorithm} on {one_run.preset}")
        folder = Path(out) / "runs" if out else root() / "runs" / "reproduce"
        written.append(trained(one_run, results, folder, command, quick, say))
    return written


def experiment(target: str, results: Path, media: Path, command: str, quick: bool = False) -> list[Path]:
    """Run the experiment `module:function` and write `FUNCTION.json`, and `FUNCTION.png` where it draws one.

    The function is given `quick` and where its picture goes, and returns its figures: a dict with "what" and "seeds".
    """
    from foresight.runtime import bench, checkpoint

    module, _, function = target.partition(":")
    title = function.replace("_", "-")
    picture = media / f"{title}.png"
    before = picture.stat().st_mtime_ns if picture.is_file() else None
    began = time.perf_counter()
    figures = getattr(importlib.import_module(module), function)(quick, picture)
    seconds = time.perf_counter() - began
    document = {"what": figures.pop("what"), "command": command, "seeds": figures.pop("seeds"), **figures}
    document |= {"versions": bench.versions(), "machine": bench.machine(), "seconds": round(seconds, 3)}
    file = results / f"{title}.json"
    checkpoint.write_whole(file, json.dumps(document, indent=2) + "\n")
    drawn = picture.is_file() and picture.stat().st_mtime_ns != before
    return [file, picture] if drawn else [file]


def trained(what: Trained, results: Path, runs: Path, command: str, quick: bool, say: Say = lambda text: None) -> Path:
    """Train a preset over its seeds and write `ALGORITHM-PRESET.json`."""
    from foresight.runtime import checkpoint, settings

    steps = what.steps
    if quick:
        preset = catalog.presets(what.algorithm).get(what.preset, {})
        steps = max(1, settings.fields(what.algorithm, preset)["steps"] // QUICK)
    label = f"{what.algorithm}-{what.preset}".replace("/", "-")
    summaries = []
    for seed in range(1 if quick else what.seeds):
        summaries.append(one(what.algorithm, what.preset, seed, runs / f"{label}-{seed}", what.episodes, steps, False))
        say(f"  seed {seed}: {summaries[-1]['evaluation']['metric']} {summaries[-1]['evaluation']['mean']:.4g}")
    file = results / f"{label}.json"
    document = collect(what.algorithm, what.preset, summaries, command)
    checkpoint.write_whole(file, json.dumps(document, indent=2) + "\n")
    return file


def one(
    name: str, preset: str, seed: int, out: Path, episodes: int | None, steps: int | None, show: bool = True
) -> dict[str, Any]:
    """The summary of one seed: read, resumed or made."""
    from foresight.runtime import run

    if (out / "summary.json").is_file():
        return run.Run(out).summary
    if (out / "config.yaml").is_file():
        return run.resume(out, show=show).summary
    return run.train(
        name, preset=preset, seed=seed, out=out, evaluation_episodes=episodes, steps=steps, show=show
    ).summary


def collect(name: str, preset: str, summaries: Sequence[dict[str, Any]], command: str) -> dict[str, Any]:
    """One result of several seeds: their means, what they share, and each seed's own figures."""
    import numpy as np

    from foresight.runtime.plot import interval, iqm

    means = [summary["evaluation"]["mean"] for summary in summaries]
    low, high = interval(np.array(means)[:, None]) if len(means) > 1 else ([None], [None])
    first = summaries[0]
    return {
        "what": f"{name} on {preset}",
        "command": command,
        "seeds": [summary["seed"] for summary in summaries],
        "steps": first["steps"],
        "unit": first["unit"],
        "metric": first["evaluation"]["metric"],
        "episodes": first["evaluation"]["n"],
        "iqm": float(iqm(np.array(means))),
        "interval_95": [None if x[0] is None else float(x[0]) for x in (low, high)],
        "worst": min(means),
        "baseline": statistics.fmean(summary["baseline"]["mean"] for summary in summaries),
        "seconds": [summary["seconds"] for summary in summaries],
        "runs": [{key: summary[key] for key in ("seed", "evaluation", "baseline", "seconds")} for summary in summaries],
        "versions": first["versions"],
        "machine": first["machine"],
    }
