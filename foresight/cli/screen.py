"""Output of the command line: text (rich) or JSON on stdout, errors on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDE = 120  # columns if stdout is not a terminal
NARROW = 12  # columns that a column of text keeps in a narrow terminal
GAP = 2  # columns after each column of a table


def stdout() -> Console:
    """A console for stdout, with colors only on a terminal and not with NO_COLOR."""
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)


def stderr() -> Console:
    """A console for stderr."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else WIDE, highlight=False)


def note(text: str) -> None:
    """A line on stderr."""
    stderr().print(Text(text), soft_wrap=True)


def emit(data: Any) -> None:
    """Write one JSON document on stdout; NaN, which JSON does not have, is null, and infinity is a text."""
    sys.stdout.write(json.dumps(_finite(data), indent=2, ensure_ascii=False, default=str, allow_nan=False) + "\n")


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    if not isinstance(data, float) or math.isfinite(data):
        return data
    return None if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"  # as in metrics.jsonl


def table(
    console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], wrap: str | Sequence[str] = ()
) -> None:
    """Print a plain table on `console`; only the cells of the columns `wrap` may be wrapped, and no cell is cropped.

    A table that the console is too narrow for has lines that are longer than the console is wide.
    """
    made = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold")
    wrapped, rows = (wrap,) if isinstance(wrap, str) else wrap, list(rows)
    for number, column in enumerate(columns):
        longest = max(cell_len(line) for cell in (column, *(row[number] for row in rows)) for line in cell.split("\n"))
        least = min(longest, NARROW) if column in wrapped else longest
        made.add_column(column, no_wrap=column not in wrapped, overflow="fold", min_width=least)
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    needed = sum((column.min_width or 0) + GAP for column in made.columns)
    if needed > console.width:  # otherwise rich shortens cells and drops columns, without a mark
        made.width = needed
    console.print(made, crop=False)
