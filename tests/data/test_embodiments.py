"""Embodiments in shared spaces: what is padded, that padding is undone, and what is refused."""

from __future__ import annotations

from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pytest
import torch

from foresight.data import embodiments
from foresight.data.embodiments import Embodiment
from foresight.errors import UserError
from tests.sabotage import sabotaged_by

CAMERA, TEXT = gs.Box(0, 255, (32, 32, 3), np.uint8), gs.Box(0, 255, (6,), np.uint8)


def vector(size: int) -> gs.Box:
    """Floats."""
    return gs.Box(-1, 1, (size,), np.float32)


ARM = Embodiment(
    "Arm",
    gs.Dict({"mission": TEXT, "state": vector(3), "speed": vector(1), "wrist": CAMERA}),
    gs.Box(np.array([[0, -2]] * 2, np.float32), np.array([[1, 2]] * 2, np.float32)),  # a chunk of two
)
BOT = Embodiment(
    "Bot",
    gs.Dict({"camera_mask": gs.MultiBinary(1), "front": CAMERA, "mission": gs.Box(0, 255, (9,), np.uint8),
             "state": vector(2)}),
    gs.Discrete(5, start=1),
)  # fmt: skip
OBS, ACTION = embodiments.shared([ARM, BOT])


def seen(part: Embodiment, count: int = 2) -> dict[str, torch.Tensor]:
    """Observations that are ones."""
    kinds: dict[Any, torch.dtype] = {np.dtype(np.float32): torch.float32, np.dtype(np.uint8): torch.uint8}
    spaces = part.obs.spaces.items()  # type: ignore[attr-defined]
    return {name: torch.ones(count, *x.shape, dtype=kinds.get(x.dtype, torch.int64)) for name, x in spaces}


def test_shared_spaces_have_what_any_has_as_wide_as_the_widest() -> None:
    shapes = {name: space.shape for name, space in OBS.items()}
    assert shapes == {
        "camera_mask": (2,), "embodiment": (), "front": CAMERA.shape, "mission": (9,), "speed": (1,), "state": (3,),
        "wrist": CAMERA.shape,
    }  # fmt: skip
    assert ACTION.shape == (4,) and (ACTION.low == -1).all() and (ACTION.high == 1).all()


def _at_the_left(original):
    return lambda x, pad, *rest: original(x, (pad[1], pad[0]), *rest)


@sabotaged_by("torch.nn.functional.pad", _at_the_left)
def test_observations_are_padded_with_zeros_and_masked() -> None:
    arm = embodiments.pad_obs(seen(ARM), 0, ARM.obs, OBS)
    bot = embodiments.pad_obs({**seen(BOT), "camera_mask": torch.tensor([[0], [1]])}, 1, BOT.obs, OBS)
    for padded, number in ((arm, 0), (bot, 1)):
        assert {name: x.shape[1:] for name, x in padded.items()} == {name: x.shape for name, x in OBS.items()}
        assert padded["embodiment"].tolist() == [number] * 2
    assert arm["camera_mask"].tolist() == [[0, 1]] * 2 and bot["camera_mask"].tolist() == [[0, 0], [1, 0]]
    assert arm["front"].sum() == 0 and arm["wrist"].all() and bot["speed"].sum() == 0
    assert bot["state"].tolist() == [[1, 1, 0]] * 2 and arm["mission"][0].tolist() == [1] * 6 + [0] * 3


@sabotaged_by("foresight.data.embodiments._range", lambda f: lambda own: (f(own)[0], f(own)[1] + 1))
def test_actions_are_from_minus_one_to_one_and_come_back() -> None:
    arm = torch.tensor([[[0.25, -2], [1, 1]]])
    padded = embodiments.pad_action(arm, ARM.action, ACTION)
    torch.testing.assert_close(padded, torch.tensor([[-0.5, -1, 1, 0.5]]))
    torch.testing.assert_close(embodiments.own_action(padded, ARM.action), arm)
    bot = torch.arange(1, 6)
    padded = embodiments.pad_action(bot, BOT.action, ACTION)
    torch.testing.assert_close(padded[:, 0], torch.tensor([-0.8, -0.4, 0, 0.4, 0.8]))  # the middles of five parts
    assert not padded[:, 1:].any()
    assert embodiments.own_action(padded + torch.tensor([0.19, 7, 7, 7]), BOT.action).tolist() == bot.tolist()
    assert embodiments.own_action(torch.tensor([[-1.0, 0, 0, 0], [1, 0, 0, 0]]), BOT.action).tolist() == [1, 5]
    several = gs.MultiDiscrete([2, 3])
    both = torch.tensor([[0, 2], [1, 1]])
    assert torch.equal(embodiments.own_action(embodiments.pad_action(both, several, ACTION), several), both)


def test_what_cannot_be_shared_is_named() -> None:
    small = gs.Dict({"front": gs.Box(0, 255, (40, 40, 3), np.uint8), "mission": TEXT})
    symbols = gs.Dict({"grid": gs.Box(0, 255, (7, 7, 3), np.uint8), "mission": TEXT})
    for obs, action, message in (
        (vector(2), BOT.action, r"needs dict observations with 'mission' \(bytes\), but 'X' has Box"),
        (small, BOT.action, "'front' is .* of 'X', but .* Give images of one name one size"),
        (symbols, BOT.action, "'grid' of 'X' is .*images of more than 25 pixels a side"),
        (BOT.obs, vector(2).__class__(-np.inf, np.inf, (2,)), "Actions must be Discrete, MultiDiscrete or a bounded"),
    ):
        with pytest.raises(UserError, match=message):
            embodiments.shared([BOT, Embodiment("X", obs, action)])
