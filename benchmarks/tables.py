"""Write docs/results.md from the JSON files in results/: no figure in it is typed by hand.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Results

Made by `python benchmarks/tables.py` from the files in [results](../results), which hold seeds,
versions and the machine. A baseline is the untrained model, or uniformly random actions.
"""


def figure(value: float | None, digits: int = 4) -> str:
    """A number as a table shows it."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def reached(results: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The table of trained presets: interquartile mean over seeds, 95% bootstrap interval, worst seed."""
    lines = [
        "## What was reached",
        "",
        "| task | metric | seeds × n | IQM [95% interval] | worst seed | baseline | steps | minutes a seed | command |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in results:
        low, high = r["interval_95"]
        band = "" if low is None else f" [{figure(low)}, {figure(high)}]"
        minutes = sum(r["seconds"]) / len(r["seconds"]) / 60
        lines.append(
            f"| [{r['what']}](../results/{name}) | {r['metric']} | {len(r['seeds'])} × {r['episodes']} | "
            f"{figure(r['iqm'])}{band} | {figure(r['worst'])} | {figure(r['baseline'])} | "
            f"{r['steps']:,} {r['unit']} | {minutes:.1f} | `{r['command']}` |"
        )
    return lines


def speed(results: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The table of benchmarks: medians over rounds that alternate with the peer's."""
    lines = [
        "## Speed, side by side",
        "",
        "| workload | ours | peer | ratio | target | command |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in results:
        peer = r.get("peer")
        theirs = f"{peer['name']}: {figure(peer['rate'])}" if peer else "–"
        ratio = f"{r['ratio']:.1f}×" if peer else "–"
        target = f"{r['target']:g}×{'' if r['met'] else ' (missed)'}" if peer and r.get("target") else "–"
        lines.append(
            f"| [{r['what']}](../results/{name}) ({r['unit']}) | {figure(r['ours']['rate'])} | {theirs} | {ratio} | "
            f"{target} | `{r['command']}` |"
        )
    return lines


def other(results: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Everything else, as pairs of name and figure."""
    lines = ["## Other measurements", "", "| what | figures | command |", "|---|---|---|"]
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
    tables = ["\n".join(section(rows)) for section, rows in parts.items() if rows]
    return "\n\n".join([HEAD.rstrip(), *tables]) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(page(), encoding="utf-8")
