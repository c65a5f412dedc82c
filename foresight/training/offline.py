"""The data of algorithms that train on recorded episodes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from gymnasium import spaces as gs

from foresight.data import embodiments, episodes, lerobot
from foresight.data.embodiments import Embodiment
from foresight.data.episodes import Episodes
from foresight.errors import UserError


def read(data: Sequence[str], obs: gs.Space[Any], action: gs.Space[Any], parts: Sequence[Embodiment] = ()) -> Episodes:
    """The episodes of all folders in `data`. Raises UserError if there is none or one cannot be read.

    With several embodiments, `parts`, each folder is of the one whose spaces it has, and is padded to the shared ones.
    """
    if not data:
        raise UserError(
            f"No data given: add --data DIR, with one or more folders of episodes. {episodes.how_to_write('DIR')}"
        )
    if parts and data:
        owners = [_owner(path, parts) for path in data]
        found = [
            embodiments.pad(read(own, part.obs, part.action), number, part, obs, action)
            for number, part in enumerate(parts)
            if (own := [path for path, owner in zip(data, owners, strict=True) if owner == number])
        ]
        return embodiments.join(found, parts)
    found, speeds = [], {}
    for path in data:
        if lerobot.is_data_set(path):
            part, speeds[path] = lerobot.read(path, obs, action)
        else:
            part = episodes.read(path, obs, action)
        episodes.require_values(part, obs, action, path)
        found.append(part)
    if len(set(speeds.values())) > 1:
        named = ", ".join(f"{path} {fps:g}" for path, fps in speeds.items())
        raise UserError(f"The data have different frames per second: {named}. Train on data of one speed.")
    return episodes.join(found)


def _owner(path: str, parts: Sequence[Embodiment]) -> int:
    """The number of the one embodiment whose spaces the folder `path` has. Raises UserError for none, and for two."""
    fit, refused = [], []
    for number, part in enumerate(parts):
        try:
            (lerobot if lerobot.is_data_set(path) else episodes).check(path, part.obs, part.action)
            fit.append(number)
        except UserError as error:
            refused.append(f"'{part.name}': {error}")
    if len(fit) > 1:
        raise UserError(f"{path} fits several embodiments of this run. Train one run for each of them.")
    if not fit:
        raise UserError(f"{path} is of none of the embodiments of this run. {' '.join(refused)}")
    return fit[0]


def require_rewards(found: Episodes) -> None:
    """Raise UserError if all rewards are 0: there is no return to ask for."""
    if not found.reward.any():
        raise UserError(
            "The data have no rewards, so there is no return to ask for and no best episode. Train on them with: "
            "behavior_cloning --share 1"
        )


def warn_beyond(target_return: float | None, best: float) -> None:
    """Warn of a return that is asked for above the highest of the data."""
    if target_return is not None and target_return > best:
        warnings.warn(
            f"target_return {target_return:g} is above the highest return of the data, {best:g}: what happens there is "
            f"extrapolation. Ask for at most {best:g}.",
            stacklevel=3,
        )


def check_horizon(data: Episodes, horizon: int, name: str = "horizon") -> None:
    """Raise UserError if `horizon` steps, the setting `name`, are more than any episode has."""
    longest = int(data.length.max())
    if horizon > longest:
        raise UserError(
            f"{name} {horizon} is longer than every episode of the data: the longest has {longest} steps. "
            f"Set {name} to at most {longest}, or record longer episodes."
        )
