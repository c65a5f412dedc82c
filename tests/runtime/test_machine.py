"""The machine of a run: its memory."""

from __future__ import annotations

import resource
import sys
from types import SimpleNamespace

import pytest

from foresight.runtime import machine


@pytest.mark.parametrize(("system", "unit"), [("darwin", 1), ("linux", 2**10)])
def test_the_peak_of_memory_is_in_gib_on_every_system(system: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(ru_maxrss=3 * 2**30 // unit)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    assert machine.peak_gib() == machine.peak_gib(usage) == 3.0
