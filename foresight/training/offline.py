"""The data of algorithms that train on recorded episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import spaces as gs

from foresight.data import episodes
from foresight.data.episodes import Episodes
from foresight.errors import UserError


def read(data: Sequence[str], obs: gs.Space[Any], action: gs.Space[Any]) -> Episodes:
    """The episodes of all folders in `data`. Raises UserError if there is none or one cannot be read."""
    if not data:
        raise UserError(
            "No data given: add --data DIR, with one or more folders of episodes. "
            "Write one with: foresight data episodes RUN --episodes 100 --out DIR"
        )
    return episodes.join([episodes.read(path, obs, action) for path in data])
