"""Write docs/results.md, compare.md, comparison.md and the packaged index from results/, invariants.md from the tests.

No figure and no row is written by hand.

python benchmarks/tables.py
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import runpy
from pathlib import Path
from typing import Any

from foresight.runtime.results.results import INDEX, Row, band, document, figure, gather
from foresight.runtime.results.suites import suites

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Results

Made by `python benchmarks/tables.py` from the files in [results](../results), which also record seeds, versions and
machine. A score is the interquartile mean (IQM) over seeds, with a bootstrap interval. The baseline is the untrained
model or a random policy. "Worst" is the worst seed, where the interval leaves it out: the IQM passes over one failed
seed among many. "3 of 5" marks results with fewer seeds or steps than the suite specifies; "by" names the command of a
result that was made by another one than the suite's. Seeds that follow one another are evaluated in nearly the same
episodes, and language models on the same held-out questions unless a row draws its own: so seeds compare, and the
interval is one over runs of training, not over episodes or questions.
"""

COMPARE = """# Libraries side by side

How fast this library is at the work of another one. Each row is one command, `foresight bench NAME --against PEER`,
which runs both in turn on one machine; the ratio is the median of those of the rounds, with the smallest and the
largest. A target that was missed is marked. One round is a measurement without a spread.

Made by `python benchmarks/tables.py` from the `bench-*.json` files in [results](../results). Scores are on the page of
[results](results.md). What other libraries do and this one does not: [not here](not_here.md).
"""

INVARIANTS = """# Invariants

Bugs in reinforcement learning of language models, most of them silent, and the equation that rules out each. Each row
is a test on a tiny random model, in float32 and, where it matters, in bfloat16; most tests run on every algorithm of
the GRPO family. Entries such as "TRL 4772" are issues and pull requests of libraries that had the bug.

    pytest tests/invariants

Every test has sabotage twins: the same test is run on broken code, and must fail. To test your own algorithm, add it to
[`subjects.py`](../tests/invariants/subjects.py).

Made by `python benchmarks/tables.py` from the docstrings of the tests.
"""
SUITE = ("probabilities", "tokens", "groups", "scaling", "divergence")


def targets(rows: list[Row]) -> list[str]:
    """The tables of the suites: targets, results, and budgets."""
    lines = []
    for suite in suites().values():
        lines += [
            f"## {suite.name}: {suite.title}",
            "",
            f"Rerun all rows with `foresight reproduce {suite.name}`, some of them with `--only ROW ...`.",
            *(["Games that were not run are left out."] if suite.atari else []),
            "",
            "| row | algorithm | task | target | reached [95% interval] | verdict | seeds | steps per seed | minutes |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in (row for row in rows if row.suite == suite.name and (row.value is not None or not suite.atari)):
            name = row.name if row.value is None else f"[{row.name}](../{row.file})"
            verdict = "**missed**" if row.met is False else row.verdict if row.command else "not run: no code yet"
            steps = part(row.done_steps, row.steps) + (f" {row.unit}" if row.done_steps or row.steps else "")
            seeds = part(row.done_seeds, row.seeds) + (f", by `{row.made}`" if row.made else "")
            lines.append(
                f"| {name} | {row.algorithm} | {row.task} | {row.aim or '–'} | "
                f"{row.score} | {verdict} | {seeds} | {steps} | "
                f"{figure(row.done_minutes, 2)} |"
            )
        lines.append("")
    return lines[:-1]


def part(done: int | None, planned: int | None) -> str:
    """The number that was done, with the planned number if that is larger."""
    if done is None or planned is None or done >= planned:
        return figure(done if done is not None else planned, 7)
    return f"{done:,} of {planned:,}"


def reached(results: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The table of trained presets: interquartile mean over seeds, 95% bootstrap interval, worst seed."""
    lines = [
        "## Scores",
        "",
        "| task | metric | seeds × n | IQM [95% interval] | worst seed | baseline | steps | minutes/seed | command |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in results:
        minutes = sum(r["seconds"]) / len(r["seconds"]) / 60
        lines.append(
            f"| [{r['what']}](../results/{name}) | {r['metric']} | {len(r['seeds'])} × {r['episodes']} | "
            f"{figure(r['iqm'])}{band(r['interval_95'])} | {figure(r['worst'])} | {figure(r['baseline'])} | "
            f"{r['steps']:,} {r['unit']} | {minutes:.1f} | `{r['command']}` |"
        )
    return lines


def held(results: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The table of returns over the last fifth of training, where runs hold them."""
    lines = [
        "## Held over the last fifth of training",
        "",
        "Training episodes that ended in the last fifth of the steps, exploration included; and, where the preset",
        "evaluates during training, the evaluations of the greedy policy in these steps.",
        "",
        "| task | seeds | mean of each seed | least episode of each seed | greedy: mean | least evaluation |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in results:
        runs = [run for run in r["runs"] if "held" in run or "held_greedily" in run]
        greedy = [run.get("held_greedily", {}) for run in runs]
        columns = [
            [str(run["seed"]) for run in runs],
            *([figure(run.get("held", {}).get(key)) for run in runs] for key in ("mean", "min")),
            *([figure(found.get(key), 5) for found in greedy] if any(greedy) else ["–"] for key in ("mean", "min")),
        ]
        cells = " | ".join(", ".join(column) for column in columns)
        lines.append(f"| [{r['what']}](../results/{name}) | {cells} |")
    return lines


def speed(results: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The table of benchmarks: medians over rounds that alternate with those of the peer."""
    lines = [
        "## Speed compared with peer libraries",
        "",
        "| workload | ours | peer | ratio | target | command |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in results:
        peer = r.get("peer")
        theirs = f"{peer['name']}: {figure(peer['rate'])}" if peer else "–"
        ratio = times(r) if peer else "–"
        target = f"{r['target']:g}×{'' if r['met'] else ' (missed)'}" if peer and r.get("target") else "–"
        lines.append(
            f"| [{r['what']}](../results/{name}) ({r['unit']}) | {figure(r['ours']['rate'])} | {theirs} | {ratio} | "
            f"{target} | `{r['command']}` |"
        )
    return lines


def times(result: dict[str, Any]) -> str:
    """The ratio of a benchmark, and its spread if there is more than one round."""
    ratio, (low, high) = result["ratio"], result["spread"]
    return f"{ratio:.4g}×" if result["rounds"] == 1 else f"{ratio:.4g}× ({low:.3g} to {high:.3g})"


def compare() -> str:
    """The page of peer libraries: a table for each, from the benchmarks that measured it."""
    files = sorted((ROOT / "results").glob("bench-*.json"))
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for file in files:
        result = json.loads(file.read_text(encoding="utf-8"))
        if result.get("peer") and result["peer"]["name"] != "foresight":
            found.setdefault(result["peer"]["name"], []).append((file.name, result))
    lines = [COMPARE.rstrip()]
    for peer, results in sorted(found.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        lines += ["", f"## {peer}", "", "| workload | foresight | peer | ratio | target | rounds, versions, machine |"]
        lines.append("|---|---|---|---|---|---|")
        for name, r in results:
            title, _, what = r["what"].partition(": ")
            target = f"{r['target']:g}×{'' if r['met'] else ' (**missed**)'}" if r.get("target") else "–"
            version = r["versions"].get(peer, "")
            machine = f"{r['machine']['cores']} cores, torch {r['versions']['torch'].partition('+')[0]}"
            made = f"{r['rounds']}, {peer} {version}, {machine}" if version else f"{r['rounds']}, {machine}"
            lines.append(
                f"| [`{title}`](../results/{name}): {what} | {figure(r['ours']['rate'])} {r['unit']} | "
                f"{figure(r['peer']['rate'])} | {times(r)} | {target} | {made} |"
            )
    return "\n".join(lines) + "\n"


def other(results: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """All other results, as pairs of name and value."""
    lines = ["## Other measurements", "", "| measurement | figures | command |", "|---|---|---|"]
    for name, r in results:
        shown = {k: v for k, v in r.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        figures = ", ".join(f"{key.replace('_', ' ')} {figure(value)}" for key, value in shown.items())
        lines.append(f"| [{r['what']}](../results/{name}) | {figures} | `{r['command']}` |")
    return lines


def page() -> str:
    """The whole page."""
    files = sorted((ROOT / "results").glob("*.json"))
    results = [(file.name, json.loads(file.read_text(encoding="utf-8"))) for file in files]
    parts: dict[Any, list[tuple[str, dict[str, Any]]]] = {reached: [], speed: [], other: []}
    for name, result in results:
        parts[reached if "iqm" in result else speed if "rounds" in result else other].append((name, result))
    kept = [
        (name, r)
        for name, r in parts[reached]
        if any(run.keys() & {"held", "held_greedily"} for run in r.get("runs", []))
    ]
    sections = [(reached, parts[reached]), (held, kept), (speed, parts[speed]), (other, parts[other])]
    tables = ["\n".join(section(found)) for section, found in sections if found]
    return "\n\n".join([HEAD.rstrip(), "\n".join(targets(gather())), *tables]) + "\n"


def pitfalls(file: Path) -> list[tuple[str, str, str, str]]:
    """Case, what goes wrong, invariant, and the test's name, for every test whose docstring has these parts."""
    found = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        parts = re.fullmatch(r"(.*)\n\nWrong: (.*)\nInvariant: (.*)", inspect.cleandoc(text or ""), re.DOTALL)
        if parts and node.name.startswith("test_"):  # type: ignore[attr-defined]
            found.append((*(" ".join(part.split()) for part in parts.groups()), node.name))  # type: ignore[attr-defined]
    return found


def invariants() -> str:
    """The page of pitfalls: the suite, then the tests next to the code that they test."""
    tests = ROOT / "tests"
    files = [file for name in SUITE if (file := tests / "invariants" / f"test_{name}.py").is_file()]
    sections = [(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "", [file]) for file in files]
    others = [file for file in sorted(tests.rglob("test_*.py")) if file.parent.name != "invariants"]
    sections.append(("Tests next to the code that they test.", others))
    lines = [INVARIANTS.rstrip()]
    for title, group in sections:
        heading, _, rest = title.partition("\n\n")
        lines += ["", f"## {' '.join(heading.split()).rstrip('.')}", "", *([rest, ""] if rest else [])]
        lines += ["| case | what goes wrong | invariant | test |", "|---|---|---|---|"]
        for file in group:
            path = file.relative_to(ROOT).as_posix()
            for *cells, name in pitfalls(file):
                shown = " | ".join(cell.replace("|", "\\|") for cell in cells)
                lines.append(f"| {shown} | [`{name}`](../{path}) |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(page(), encoding="utf-8")
    (ROOT / "docs" / "compare.md").write_text(compare(), encoding="utf-8")
    INDEX.write_text(document(), encoding="utf-8")
    (ROOT / "docs" / "invariants.md").write_text(invariants(), encoding="utf-8")
    runpy.run_path(str(ROOT / "benchmarks" / "comparison.py"))["write_page"]()
    runpy.run_path(str(ROOT / "benchmarks" / "stack.py"))["write_page"]()
