"""Several embodiments in one batch: what each sees and does, padded to spaces that all of them share.

Source: RT-X, Open X-Embodiment Collaboration 2023 (arXiv:2310.08864), §IV.A: one policy for robots with different
cameras and actions. A shared observation has every camera and vector that any of them has: vectors as wide as the
widest, with zeros where there is nothing, `camera_mask`, and `embodiment`, the number of the one that it is of. A
shared action is as many numbers as the longest one, each in [-1, 1]: a number of a Box by its bounds, and a choice of n
as one of n equal parts. The rest is padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces as gs
from torch import Tensor

from foresight.data import episodes
from foresight.data.episodes import Episodes
from foresight.data.trajectory import Tree
from foresight.errors import UserError

MISSION, CAMERA_MASK, EMBODIMENT = "mission", "camera_mask", "embodiment"  # keys of a dict observation
SYMBOLS = 25  # an array of at most so many rows and columns is no image but a grid of symbols, as MiniGrid's


class Embodiment(NamedTuple):
    """One of several embodiments, by its own spaces; `name` is that of its environment."""

    name: str
    obs: gs.Space[Any]
    action: gs.Space[Any]


def choices(action: gs.Space[Any]) -> list[int]:
    """For each number of an action how many choices it has, or 0 where it is continuous.

    Raises UserError for other spaces than Discrete, MultiDiscrete, and a bounded Box of one or two dims.
    """
    if isinstance(action, gs.Discrete):
        return [int(action.n)]
    if isinstance(action, gs.MultiDiscrete) and len(action.shape) == 1:
        return [int(n) for n in action.nvec]
    if isinstance(action, gs.Box) and len(action.shape) in (1, 2) and action.is_bounded():
        return [0] * math.prod(action.shape)
    raise UserError(f"Actions must be Discrete, MultiDiscrete or a bounded Box of one or two dims, not {action}.")


def shared(parts: Sequence[Embodiment]) -> tuple[gs.Dict, gs.Box]:
    """The spaces of observations and actions that all `parts` share.

    Raises UserError for observations that are no dict with a `mission`, and for images of one name and two sizes.
    """
    found: dict[str, gs.Space[Any]] = {}
    for part in parts:
        if not isinstance(part.obs, gs.Dict) or MISSION not in part.obs.spaces:
            raise UserError(
                f"An embodiment needs dict observations with '{MISSION}' (bytes), but '{part.name}' has {part.obs}."
            )
        for name, space in part.obs.items():
            if name != CAMERA_MASK:
                found[name] = _wider(part.name, name, found.get(name), space)
    cameras = [name for name, space in found.items() if len(space.shape or ()) == 3]
    if cameras:
        found[CAMERA_MASK] = gs.MultiBinary(len(cameras))
    found[EMBODIMENT] = gs.Discrete(len(parts))
    return gs.Dict(found), gs.Box(-1.0, 1.0, (max(len(choices(part.action)) for part in parts),), np.float32)


def pad_obs(obs: Tree, number: int, own: gs.Space[Any], common: gs.Space[Any]) -> dict[str, Tensor]:
    """Observations `[B, ...]` of embodiment `number`, whose space is `own`, in the shared space `common`."""
    lead, padded, there = obs[MISSION].shape[:-1], dict[str, Tensor](), list[Tensor]()
    present, mine = obs.get(CAMERA_MASK), _cameras(own)
    for name in _cameras(common):
        has = name in mine
        of_camera = None if present is None or not has else present[..., mine.index(name)]
        there.append(torch.full(lead, int(has)) if of_camera is None else of_camera.long())
    for name, space in common.items():  # type: ignore[attr-defined]
        if name == CAMERA_MASK:
            padded[name] = torch.stack(there, -1)
        elif name == EMBODIMENT:
            padded[name] = torch.full(lead, number)
        elif name not in obs:
            kind = torch.uint8 if space.dtype == np.uint8 else torch.float32
            padded[name] = torch.zeros(*lead, *space.shape, dtype=kind)
        else:
            missing = 0 if name in mine else space.shape[0] - obs[name].shape[-1]
            padded[name] = F.pad(obs[name], (0, missing)) if missing else obs[name]
    return padded


def pad_action(action: Tensor, own: gs.Space[Any], common: gs.Space[Any]) -> Tensor:
    """Actions `[B, ...]` of the space `own` as shared ones `[B, K]`; the numbers past its own are 0."""
    low, size = _range(own)
    if isinstance(own, gs.Box):
        x = action.flatten(-len(own.shape)).float() - low
    else:
        x = (action.unsqueeze(-1) if isinstance(own, gs.Discrete) else action) - low + 0.5  # the middle of its part
    return F.pad(2 * x / size - 1, (0, common.shape[0] - len(low)))  # type: ignore[index]


def own_action(action: Tensor, own: gs.Space[Any]) -> Tensor:
    """The actions `[B, ...]` of the space `own` for shared ones `[B, K]`: the inverse of `pad_action`."""
    low, size = _range(own)
    x = (action[..., : len(low)] + 1) / 2 * size
    if isinstance(own, gs.Box):
        shaped: Tensor = (low + x).unflatten(-1, own.shape)
        return shaped
    index = (low + torch.minimum(x.floor().clamp(min=0), size - 1)).long()
    return index.squeeze(-1) if isinstance(own, gs.Discrete) else index


def pad(found: Episodes, number: int, part: Embodiment, obs: gs.Space[Any], action: gs.Space[Any]) -> Episodes:
    """Episodes of embodiment `number` in the shared spaces."""
    return Episodes(
        pad_obs(found.obs, number, part.obs, obs), pad_action(found.action, part.action, action), found.reward,
        found.length, found.terminated,
    )  # fmt: skip


def join(each: Sequence[Episodes], parts: Sequence[Embodiment]) -> Episodes:
    """The padded episodes of all folders. Raises UserError if an embodiment has none."""
    found = episodes.join(each)
    has = set(found.obs[EMBODIMENT].unique().tolist())
    if missing := [part.name for number, part in enumerate(parts) if number not in has]:
        raise UserError(f"The data have no episode of '{missing[0]}': add a folder of its episodes to --data.")
    return found


def _wider(part: str, name: str, one: gs.Space[Any] | None, other: gs.Space[Any]) -> gs.Space[Any]:
    """The space of an array that is in several embodiments: vectors as wide as the widest."""
    shape, image = other.shape or (), other.dtype == np.uint8
    dims = 1 if name == MISSION or not image else 3
    valid = isinstance(other, gs.Box) and len(shape) == dims and (dims == 1 or max(shape) > SYMBOLS)
    if not valid or not (image or other.dtype == np.float32):
        raise UserError(
            f"'{name}' of '{part}' is {other}. An embodiment sees images of more than {SYMBOLS} pixels a side, vectors "
            f"of float32 and '{MISSION}'."
        )
    if one is None or one.shape == shape:
        return other
    if len(shape) != 1 or len(one.shape or ()) != 1 or one.dtype != other.dtype:
        raise UserError(
            f"'{name}' is {other} of '{part}', but {one} of another embodiment. Give images of one name one size."
        )
    widest = max(shape, one.shape or ())
    return gs.Box(0, 255, widest, np.uint8) if image else gs.Box(-np.inf, np.inf, widest, np.float32)


def _cameras(space: gs.Space[Any]) -> list[str]:
    """The names of the images of a dict observation."""
    return [name for name, part in space.items() if len(part.shape or ()) == 3]  # type: ignore[attr-defined]


def _range(own: gs.Space[Any]) -> tuple[Tensor, Tensor]:
    """The lowest value of each number of an action, and its range or the count of its choices, `[K]`."""
    if isinstance(own, gs.Box):
        low = torch.from_numpy(own.low.astype(np.float32)).flatten()
        return low, torch.from_numpy(own.high.astype(np.float32)).flatten() - low
    start = torch.as_tensor(own.start).reshape(-1)  # type: ignore[attr-defined]
    return start, torch.tensor(choices(own))
