"""Tables in narrow terminals: no cell is cut."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from foresight.cli import screen

COLUMNS = ("method", "budget", "accuracy", "any", "mean", "tokens", "prompt tokens", "verifier calls", "seconds")
CELLS = ("self_consistency", "1,024", "0.520 ± 0.050", "0.800", "0.700", "123,456", "1,000", "10,000", "12.50")


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_a_table_is_whole_in_a_narrow_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    screen.table(console, COLUMNS, [CELLS])
    head, row = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert head.split() == " ".join(COLUMNS).split() and row.split() == " ".join(CELLS).split()


@pytest.mark.parametrize("width", [20, 40, 80])
def test_text_is_wrapped_and_its_neighbors_are_whole(width: int) -> None:
    console, text = Console(width=width, file=io.StringIO()), "a workload whose title is far longer than others are"
    screen.table(console, ("workload", "rate", "ratio"), [(text, "1,000,000 env steps/s", "0.5 of 2")], wrap="workload")
    head, first, *rest = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert head.split() == ["workload", "rate", "ratio"]
    assert "1,000,000 env steps/s" in first and "0.5 of 2" in first
    left = [first[: first.index("1,000,000")], *rest]
    assert "".join(left).split() == text.split() or " ".join(line.strip() for line in left) == text
    assert all(len(line) <= max(width, head.index("rate") + 33) for line in (head, first, *rest))


def test_a_wide_table_has_no_needless_lines() -> None:
    console = Console(width=120, file=io.StringIO())
    screen.table(console, ("a", "text"), [("1", "some words"), ("22", "two\nlines")], wrap="text")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.rstrip() for line in lines] == ["a   text", "1   some words", "22  two", "    lines"]


def test_commands_print_whole_tables(call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "WIDE", 40)
    found, printed = call("bench", "--json").json, call("bench").out
    assert found and all(one[key] in printed for one in found for key in ("name", "unit", "peer"))
