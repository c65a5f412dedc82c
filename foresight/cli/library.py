"""`foresight list` and `foresight show`: what there is, read from the source without importing torch."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro
from rich.padding import Padding
from rich.text import Text

from foresight.cli import fields, screen
from foresight.runtime import catalog


def list_(json: bool = False) -> int:
    """List the algorithms: wing, world and presets.

    Args:
        json: print one JSON document instead of a table.
    """
    entries = list(catalog.algorithms().values())
    if json:
        screen.emit([_facts(entry, catalog.presets(entry.name)) for entry in entries])
        return 0
    rows = [
        (entry.name, entry.wing, entry.world, entry.title.removesuffix("."), _few(list(catalog.presets(entry.name))))
        for entry in entries
    ]
    console = screen.stdout()
    console.print(screen.table(("algorithm", "wing", "world", "what it is", "presets"), rows, wrap="what it is"))
    console.print("\nforesight show NAME tells more; foresight train NAME starts.", style="dim")
    return 0


def _few(names: list[str], most: int = 2) -> str:
    """The first names, and how many more there are: the column must leave room for the others."""
    more = f", +{len(names) - most}" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def show(name: Annotated[str, tyro.conf.Positional], json: bool = False) -> int:
    """Tell what an algorithm is: its objective, every number with its source, its presets.

    Args:
        name: an algorithm, as `foresight list` prints it, or the path of your own algorithm file.
        json: print one JSON document instead.
    """
    entry = catalog.entry(name)
    described = fields.describe(catalog.config_class(name), entry.path)
    presets = catalog.presets(name)
    page = catalog.ROOT.parent / "docs" / f"{entry.name}.md"
    if json:
        config = [dataclasses.asdict(field) for field in described]
        docs = str(page) if page.is_file() else None
        screen.emit({**_facts(entry, presets), "doc": entry.doc, "config": config, "presets": presets, "docs": docs})
        return 0
    console = screen.stdout()
    console.print(entry.doc, markup=False)
    console.print(f"\nwing {entry.wing}, world {entry.world}, counts {entry.unit}", style="dim")
    console.print("\nConfig", style="bold")
    rows = [(field.name, plain(field.default), field.help) for field in described]
    console.print(screen.table(("field", "default", "what, unit, source"), rows, wrap="what, unit, source"))
    if presets:
        console.print("\nPresets", style="bold")
        for key, preset in presets.items():
            words = f"{_differences(preset)}\nSource: {preset.get('source', 'none')}"
            console.print(Text(key), Padding(Text(words), (0, 0, 0, 4)))
    console.print(f"\nSource {entry.path}" + (f"\nPage   {page}" if page.is_file() else ""), style="dim")
    return 0


def plain(value: Any) -> str:
    """A value as one would type it."""
    if isinstance(value, tuple | list):
        return " ".join(plain(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _facts(entry: catalog.Entry, presets: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": entry.name,
        "wing": entry.wing,
        "world": entry.world,
        "unit": entry.unit,
        "title": entry.title,
        "presets": list(presets),
    }


def _differences(preset: dict[str, Any]) -> str:
    parts: list[str] = []
    for key, value in preset.items():
        if isinstance(value, dict):
            parts.extend(f"{key}.{inner}={plain(part)}" for inner, part in value.items())
        elif key != "source":
            parts.append(f"{key}={plain(value)}")
    return ", ".join(parts)
