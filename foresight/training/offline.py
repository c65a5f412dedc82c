"""The data of algorithms that train on recorded episodes."""

from __future__ import annotations

import warnings
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


def require_rewards(found: Episodes) -> None:
    """Raise UserError if all rewards are 0: there is no return to ask for."""
    if not found.reward.any():
        raise UserError(
            "The data have no rewards, so there is no return to ask for. Train on them with: behavior_cloning"
        )


def warn_beyond(target_return: float | None, best: float) -> None:
    """Warn of a return that is asked for above the highest of the data."""
    if target_return is not None and target_return > best:
        warnings.warn(
            f"target_return {target_return:g} is above the highest return of the data, {best:g}.", stacklevel=3
        )
