"""The kinds of environment, one module each. Only these modules know how runs of different kinds differ.

Each module defines `KIND`, a `Kind`. They import torch and environments inside functions, so that `--help` is fast.
"""

from __future__ import annotations

from typing import Any

from foresight.errors import unknown
from foresight.runtime.kinds import control, game, images, tabular, text
from foresight.runtime.kinds.kind import Kind

KINDS: dict[str, Kind[Any]] = {
    "control": control.KIND, "tabular": tabular.KIND, "text": text.KIND, "game": game.KIND, "images": images.KIND,
}  # fmt: skip


def get(name: str) -> Kind[Any]:
    """The kind by its name, as `KIND` in an algorithm file. Raises UserError for a name that does not exist."""
    if name not in KINDS:
        raise unknown("kind of environment", name, KINDS)
    return KINDS[name]
