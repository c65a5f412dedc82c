"""`foresight list` and `foresight show`: the algorithms, read from their source without importing torch."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro
from rich.padding import Padding
from rich.text import Text

from foresight.cli import fields, screen
from foresight.runtime import catalog
from foresight.runtime.results import results


def list_(json: bool = False) -> int:
    """List the algorithms with their published results.

    Args:
        json: print one JSON document instead of a table.
    """
    entries, found = list(catalog.algorithms().values()), results.rows()
    if json:
        screen.emit([_facts(entry, catalog.presets(entry.name), found) for entry in entries])
        return 0
    rows = [
        (entry.name, entry.title.removesuffix("."), _best(results.verified(entry.name, found))) for entry in entries
    ]
    console = screen.stdout()
    screen.table(console, ("algorithm", "paper", "result (target)"), rows, wrap=("paper", "result (target)"))
    console.print(
        "\nDetails, presets and all results: foresight show NAME. Training: foresight train NAME.\n"
        f"Trained agents that are in the package, for foresight play: {', '.join(catalog.bundled())}.",
        style="dim",
    )
    return 0


def _best(rows: list[results.Row]) -> str:
    """The first result and the number of further ones."""
    if not rows:
        return "no published result"
    return rows[0].text() + (f"; {len(rows) - 1} more" if len(rows) > 1 else "")


def show(name: Annotated[str, tyro.conf.Positional], json: bool = False) -> int:
    """Show an algorithm: its objective, every Config field with its source, its presets and its results.

    Args:
        name: an algorithm, as `foresight list` prints it, or the path of your own algorithm file.
        json: print one JSON document instead of text.
    """
    entry = catalog.entry(name)
    described = fields.describe(catalog.config_class(name), entry.path)
    presets, found = catalog.presets(name), results.rows()
    page = catalog.ROOT.parent / "docs" / f"{entry.name}.md"
    documented = entry.ours and page.is_file()
    if json:
        config = [dataclasses.asdict(field) for field in described]
        docs = str(page) if documented else None
        screen.emit(
            {**_facts(entry, presets, found), "doc": entry.doc, "config": config, "presets": presets, "docs": docs}
        )
        return 0
    console = screen.stdout()
    console.print(entry.doc, markup=False)
    console.print(f"\nfamily: {entry.family}, environment: {entry.kind}, steps: {entry.unit}", style="dim")
    console.print("\nConfig", style="bold")
    rows = [(field.name, plain(field.default), field.help) for field in described]
    screen.table(console, ("field", "default", "meaning, unit, source"), rows, wrap="meaning, unit, source")
    if presets:
        console.print("\nPresets", style="bold")
        for key, preset in presets.items():
            text = f"{_differences(preset)}\nSource: {preset.get('source', 'none')}"
            console.print(Text(key), Padding(Text(text), (0, 0, 0, 4)))
    console.print("\nResults (targets)", style="bold")
    verified = _verified(entry, found)
    for row in verified:
        console.print(f"{row.text()}, {row.file}", markup=False, soft_wrap=True)
    if not verified:
        console.print("not run")
    console.print(f"\nCode {entry.path}" + (f"\nPage {page}" if documented else ""), style="dim")
    return 0


def _verified(entry: catalog.Entry, found: list[results.Row]) -> list[results.Row]:
    return results.verified(entry.name, found) if entry.ours else []


def plain(value: Any) -> str:
    """A value as typed on the command line."""
    if isinstance(value, tuple | list):
        return " ".join(plain(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _facts(entry: catalog.Entry, presets: dict[str, Any], found: list[results.Row]) -> dict[str, Any]:
    return {
        "name": entry.name,
        "family": entry.family,
        "kind": entry.kind,
        "unit": entry.unit,
        "title": entry.title,
        "presets": list(presets),
        "verified": [{**dataclasses.asdict(row), "file": row.file} for row in _verified(entry, found)],
    }


def _differences(preset: dict[str, Any]) -> str:
    parts: list[str] = []
    for key, value in preset.items():
        if isinstance(value, dict):
            parts.extend(f"{key}.{inner}={plain(part)}" for inner, part in value.items())
        elif key != "source":
            parts.append(f"{key}={plain(value)}")
    return ", ".join(parts)
