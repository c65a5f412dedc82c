"""Reruns results: a preset over seeds, or a suite of `suites.yaml`, each as one JSON with its command."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foresight.errors import UserError, unknown
from foresight.runtime import catalog
from foresight.runtime.evaluation import evaluate
from foresight.runtime.monitoring import ended, log
from foresight.runtime.results import atari100k
from foresight.runtime.results.results import gather
from foresight.runtime.results.row_settings import MEMORY, episodes_of, planned, settings_of, steps_of, stored
from foresight.runtime.results.suites import Experiment, Trained, made_by, suites

Report = Callable[[str], None]


def root() -> Path:
    """The source checkout, or the current directory if the package is installed without one."""
    return catalog.checkout()


def reproduce(
    name: str,
    out: str | Path | None = None,
    quick: bool = False,
    report: Report = lambda text: None,
    *,
    only: tuple[str, ...] = (),
    missing: bool = False,
    seeds: int | None = None,
    games: tuple[str, ...] = (),
    more: bool = False,
) -> list[Path]:
    """Rerun the suite `name`, or only its rows `only`, or those whose result is `missing`; returns the written files.

    In a suite of Atari games, `games` chooses among them.

    JSON goes to `results/` and pictures to `docs/media/` of the checkout, or both to `out`. `quick` is a small test
    that everything works; it writes to `runs/reproduce/NAME-quick` unless `out` is given. `seeds` limits the seeds of
    trained rows. Presets that were trained before, in `runs/reproduce`, are resumed or read, so that an interrupted
    suite continues. `more` keeps the seeds that a result file has and trains only the others and the runs that these
    read; a figure that the file has stays as it is. Experiments that are commands write only to the checkout: `out`
    and `quick` skip them, and `quick` also skips what needs other rows or data.
    Raises UserError for a name that does not exist.
    """
    rows = chosen(name, only, games)
    if seeds is not None and seeds < 1:
        raise UserError(f"--seeds must be at least 1, not {seeds}.")
    if more and missing:
        raise UserError("--missing leaves rows with a result as they are, and --more adds seeds to them: choose one.")
    if out is None and quick:
        out = root() / "runs" / "reproduce" / f"{name}-quick"
    results = Path(out) if out else root() / "results"
    media = Path(out) if out else root() / "docs" / "media"
    runs = Path(out) / "runs" if out else root() / "runs" / "reproduce"
    for folder in (results, media):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot write to {folder}: {error.strerror or error}. Choose another --out.") from error
    written: list[Path] = []
    lacking, refused = _lacking(rows, only, results, runs, quick, seeds) if more else ({}, {})
    for row in rows:
        report(row.result)
        names = only if row.result in only else (row.result,)  # a row that another one needs names itself
        command = shlex.join(
            ["foresight", "reproduce", name]
            + (["--only", *names] if only else [])
            + (["--games", *games] if games else [])
            + (["--seeds", str(seeds)] if seeds else [])
            + (["--quick"] if quick else [])
        )
        if missing and (results / f"{row.result}.json").is_file():
            report("  exists already")
            continue
        if reason := refused.get(row.result) or _skip_reason(row, out is not None, quick):
            report(f"  skipped: {reason}")
            continue
        kept: dict[int, dict[str, Any]] = {}
        if isinstance(row, Trained) and more:
            kept = stored(row, results / f"{row.result}.json", quick)
            report(f"  seeds {', '.join(map(str, kept)) or 'none'} kept")
            if not lacking[row.result]:
                continue
        for needed in row.needs:
            prepare(needed.format(runs=shlex.quote(str(runs))), report)
        if isinstance(row, Trained):
            wanted = lacking[row.result] if more else planned(row, quick, seeds)
            written.append(trained(row, results, runs, command, quick, report, wanted, kept))
        elif row.is_command:
            written.append(run_command(row, report))
        else:
            written += experiment(row, results, media, command, quick)
        for found in gather(results):
            if (found.suite, found.name) == (name, row.result):
                report(f"  {found.text()}")
    if suites()[name].atari and not quick:
        written += atari100k.write(suites()[name].runs, results, f"foresight reproduce {name}")
    return written


def chosen(name: str, only: tuple[str, ...] = (), games: tuple[str, ...] = ()) -> list[Experiment | Trained]:
    """The rows of the suite `name`, or those `only`, in the order in which they run.

    `games` chooses the rows of these Atari games. Raises UserError for bad names.
    """
    valid = suites()
    if name not in valid:
        raise unknown("suite", name, valid)
    rows = valid[name].rows(only)
    if not games:
        return rows
    if not valid[name].atari:
        raise UserError(f"'{name}' is no suite of Atari games: leave --games out, or use --only ROW.")
    for game in games:
        if game not in atari100k.games():
            raise unknown("game", game, atari100k.games())
    return [row for row in rows if isinstance(row, Trained) and row.env in {f"ALE/{game}-v5" for game in games}]


def _lacking(
    rows: Sequence[Experiment | Trained], only: tuple[str, ...], results: Path, runs: Path, quick: bool,
    seeds: int | None,
) -> tuple[dict[str, list[int]], dict[str, str]]:  # fmt: skip
    """The seeds of each trained row that have no figure, or whose runs a later row of these reads; and the refusals.

    A row whose file cannot be added to is refused: of a whole suite it is left out, and the others run. Raises
    UserError if there is `only`, if another row needs its runs, or if every row is refused.
    """
    lacking: dict[str, set[int]] = {}
    refused: dict[str, str] = {}
    for row in rows:
        if isinstance(row, Trained):
            try:
                has = stored(row, results / f"{row.result}.json", quick)
            except UserError as error:
                if only:
                    raise
                refused[row.result], lacking[row.result] = str(error), set()
                continue
            chosen = not only or row.result in only
            lacking[row.result] = {seed for seed in planned(row, quick, seeds) if chosen and seed not in has}
    for row in reversed(rows):  # a row follows those that it reads
        if isinstance(row, Trained) and not lacking[row.result]:
            continue
        own = lacking.get(row.result, set())  # an experiment has no seeds
        for other in rows:
            if isinstance(other, Trained):
                lacking[other.result] |= _read(row, own, other.result, planned(other, quick, seeds), runs)
    for name in (name for name in refused if lacking[name] or lacking.keys() == refused.keys()):
        raise UserError(refused[name])
    return {name: sorted(found) for name, found in lacking.items()}, refused


def _read(row: Experiment | Trained, own: set[int], name: str, every: Iterable[int], runs: Path) -> set[int]:
    """The seeds of the row `name`, of all its seeds `every`, whose runs `row` reads to train its seeds `own`."""
    options = [value for value in row.options.values() if isinstance(value, str)] if isinstance(row, Trained) else []
    run = re.compile(rf"\{{runs\}}/{re.escape(name)}-(\d+|\{{seed\}})(?!\d)")
    if not any(run.search(text) for text in (*options, *row.needs)):
        return set(every) if name in row.after else set()  # a command that does not tell
    lacks = [needed for needed in row.needs if not made_by(needed.format(runs=shlex.quote(str(runs)))).exists()]
    found = {seed for text in (*options, *lacks) for seed in run.findall(text)}
    return {int(seed) for seed in found if seed.isdigit()} | (own if "{seed}" in found else set())


def _skip_reason(row: Experiment | Trained, elsewhere: bool, quick: bool) -> str:
    """Why a row is skipped, or ""."""
    if isinstance(row, Experiment) and not row.run:
        return "no code can run it yet"
    if isinstance(row, Experiment) and row.is_command and elsewhere:
        return row.run
    if quick and (row.after or row.needs):
        return " && ".join(row.needs) or f"it comes after {', '.join(row.after)}"
    return ""


def prepare(command: str, report: Report = lambda text: None) -> None:
    """Run a command that makes a file, unless the file exists. Raises UserError if it fails.

    A file that is older than a run that the command names was made of another run: it is moved aside and made again.
    """
    made = made_by(command)
    named = [Path(word) for word in shlex.split(command) if Path(word) != made]
    runs = [(path.parent if path.name == "export" else path) / "summary.json" for path in named]
    if made.exists() and (newer := _newer(runs, made)):
        print(f"{made} is older than its input {newer}: moved to {_move_aside(made)}", file=sys.stderr)
    if not made.exists():
        report(f"  {command}")
        _run(command, Path.cwd())


def _run(command: str, folder: Path) -> None:
    """Run `python ...` or `foresight ...` with this interpreter, whatever is on the PATH."""
    programs = {"python": [sys.executable], "foresight": [sys.executable, "-m", "foresight"]}
    first, *rest = shlex.split(command)
    if subprocess.run([*programs.get(first, [first]), *rest], cwd=folder, check=False).returncode:
        raise UserError(f"`{command}` failed. See its output above.")


def run_command(what: Experiment, report: Report = lambda text: None) -> Path:
    """Run the command of an experiment in the checkout; returns the JSON. Raises UserError if it fails.

    Some commands train only what their JSON lacks: it is reported if they left it as it was.
    """
    if not (root() / "benchmarks").is_dir():
        raise UserError(f"`{what.run}` needs the source. Clone the repository and run it there.")
    file = root() / "results" / f"{what.result}.json"
    before = file.read_bytes() if file.is_file() else None
    _run(what.run, root())
    if before is not None and file.read_bytes() == before:
        report(f"  nothing was run again: {file} has all of it. To run it again, move that file away first.")
    return file


def experiment(what: Experiment, results: Path, media: Path, command: str, quick: bool = False) -> list[Path]:
    """Run the function of an experiment and write its JSON, and a picture of the same name if it draws one.

    The function takes `quick` and the path of its picture, and returns its values: a dict with "what" and "seeds".
    """
    from foresight.runtime import bench
    from foresight.runtime.checkpoints import checkpoint

    module, _, function = what.run.partition(":")
    picture = media / f"{what.result}.png"
    before = picture.stat().st_mtime_ns if picture.is_file() else None
    began = time.perf_counter()
    values = getattr(importlib.import_module(module), function)(quick, picture)
    seconds = time.perf_counter() - began
    document = {"what": values.pop("what"), "command": command, "seeds": values.pop("seeds"), **values}
    document |= {"versions": bench.versions(), "machine": bench.machine(), "seconds": round(seconds, 3)}
    file = results / f"{what.result}.json"
    checkpoint.write_atomic(file, json.dumps(document, indent=2) + "\n")
    drawn = picture.is_file() and picture.stat().st_mtime_ns != before
    return [file, picture] if drawn else [file]


def trained(
    what: Trained,
    results: Path,
    runs: Path,
    command: str,
    quick: bool,
    report: Report = lambda text: None,
    seeds: Iterable[int] | None = None,
    kept: Mapping[int, dict[str, Any]] | None = None,
) -> Path:
    """Train a preset with `seeds` (None: all) and write the JSON of these and those `kept`, whose figures stay."""
    from foresight.runtime.checkpoints import checkpoint

    summaries = dict(kept or {})
    for seed in planned(what, quick, None) if seeds is None else seeds:
        out = runs / f"{what.result}-{seed}"
        fields: dict[str, Any] = {key: _filled(value, runs, seed) for key, value in what.options.items()}
        if what.env:
            fields["env"] = what.env
        inputs = [runs / f"{row}-{seed}" / "summary.json" for row in what.after]
        inputs += [made_by(needed.format(runs=shlex.quote(str(runs)))) for needed in what.needs]
        if newer := _made_since(out, inputs):
            print(f"{out} is older than its input {newer}: moved to {_move_aside(out)}", file=sys.stderr)
        summary = one(
            what.algorithm, what.preset, seed, out, episodes_of(what, quick), steps_of(what, quick), False,
            **fields,
        )  # fmt: skip
        if not summary["evaluation"]["n"] or not summary["baseline"]["n"]:
            raise UserError(f"{out} has no result: the grader could score none of the answers.")
        if seed in summaries:
            report(f"  seed {seed}: only its run was needed")
            continue
        rows = log.read(out)
        held = {
            "held": ended.held(rows, summary["steps"]),
            "held_greedily": ended.held_greedily(rows, summary["evaluation"]["metric"], summary["steps"]),
        }
        summaries[seed] = {
            **summary,
            "last": last(what.algorithm, rows),
            **{name: found for name, found in held.items() if found},
        }
        report(f"  seed {seed}: {summary['evaluation']['metric']} {summary['evaluation']['mean']:.4g}")
    file = results / f"{what.result}.json"
    if summaries.keys() == (kept or {}).keys():
        return file
    document = collect(what.algorithm, what.preset, [summaries[seed] for seed in sorted(summaries)], command)
    if what.env:
        document["env"] = what.env
    document["settings"] = settings_of(what, quick)
    checkpoint.write_atomic(file, json.dumps(document, indent=2) + "\n")
    return file


def _filled(value: Any, runs: Path, seed: int) -> Any:
    """An option of a row with its `{runs}` and `{seed}` filled in; "{seed}" alone is a number."""
    if isinstance(value, Mapping):
        return {key: _filled(one, runs, seed) for key, one in value.items()}
    if value == "{seed}":
        return seed
    return value.format(runs=runs, seed=seed) if isinstance(value, str) else value


def one(
    name: str,
    preset: str,
    seed: int,
    out: Path,
    episodes: int | None,
    steps: int | None,
    show: bool = True,
    env_options: dict[str, Any] | None = None,
    env: str | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """The summary of one seed: read, resumed or trained. An existing run with other settings is moved aside.

    Fields of `MEMORY` may differ.
    """
    from foresight.runtime import run
    from foresight.runtime.config import resolve, settings

    given = {**fields, "seed": seed, **({} if steps is None else {"steps": steps})}
    if (out / "config.yaml").is_file():
        wanted = resolve.resolve(name, preset=preset, env=env, env_options=env_options, episodes=episodes, given=given)
        if changed := [x for x in settings.differences(settings.Settings.read(out), wanted) if x not in MEMORY]:
            print(f"{out} was trained with another {', '.join(changed)}: moved to {_move_aside(out)}", file=sys.stderr)
    elif any((out / part).exists() for part in run.HOLDS_A_RUN):
        print(f"{out} has no config.yaml and cannot be resumed: moved to {_move_aside(out)}", file=sys.stderr)
    if (out / "summary.json").is_file():
        return run.Run(out).summary
    if (out / "config.yaml").is_file():
        return run.resume(out, show=show).summary
    return run.train(
        name, preset=preset, env=env, seed=seed, out=out, env_options=env_options, evaluation_episodes=episodes,
        steps=steps, show=show, **fields,
    ).summary  # fmt: skip


def last(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The algorithm's metrics at the end of a run: the mean of each over the last tenth of the log."""
    found: dict[str, float] = {}
    for key in catalog.algorithms()[name].metrics:
        values = [row[key] for row in rows if math.isfinite(row.get(key, math.nan))]
        if values:
            found[key] = round(statistics.fmean(values[-math.ceil(len(values) / 10) :]), 6)
    return found


def _made_since(out: Path, inputs: Sequence[Path]) -> Path | None:
    """The first of these files that is newer than the run at `out`, or None."""
    return _newer(inputs, out / "config.yaml") if (out / "config.yaml").is_file() else None


def _newer(files: Sequence[Path], than: Path) -> Path | None:
    """The first of these files that is newer than the file `than`, or None."""
    began = than.stat().st_mtime_ns
    return next((file for file in files if file.exists() and file.stat().st_mtime_ns > began), None)


def _move_aside(out: Path) -> Path:
    """Rename the run directory or file `out`; returns its new path."""
    target = next(path for i in itertools.count(1) if not (path := out.with_name(f"{out.name}-before-{i}")).exists())
    return out.rename(target)


def collect(name: str, preset: str, summaries: Sequence[dict[str, Any]], command: str) -> dict[str, Any]:
    """The result of several seeds: their interquartile mean, common facts, and the values of each seed."""
    import numpy as np

    from foresight.runtime.results.plot import interval, iqm

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
        "worst": max(means) if evaluate.lower_is_better(first["evaluation"]["metric"]) else min(means),
        "baseline": statistics.fmean(summary["baseline"]["mean"] for summary in summaries),
        "seconds": [summary["seconds"] for summary in summaries],
        "runs": [
            {
                key: summary[key]
                for key in ("seed", "evaluation", "baseline", "last", "held", "held_greedily", "seconds")
                if key in summary
            }
            | {key: summary[key] for key in ("versions", "machine") if summary[key] != first[key]}
            for summary in summaries
        ],
        "versions": first["versions"],
        "machine": first["machine"],
    }
