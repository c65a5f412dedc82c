"""`make`: labeled images by name, split into those to train on and those held out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight import errors
from foresight.envs.base import Spaces
from foresight.errors import UserError

NAMES = ("digits",)


@dataclasses.dataclass(frozen=True)
class Images:
    """Images `[N, C, H, W]` in bytes and their labels `[N]` int64, to train on and held out."""

    name: str
    train: Tensor
    train_label: Tensor
    test: Tensor
    test_label: Tensor
    classes: tuple[str, ...]

    @property
    def spaces(self) -> Spaces:
        """Observations are images, actions are classes."""
        return Spaces(gs.Box(0, 255, tuple(self.train.shape[1:]), np.uint8), gs.Discrete(len(self.classes)))

    def sizes(self) -> str:
        """The number of images on each side."""
        return f"{len(self.train):,} images to train on, {len(self.test):,} held out"


def make(name: str, held_out: float = 0.2, split: int = 0, **others: Any) -> Images:
    """The labeled images `name`; a share `held_out` of them, drawn with the seed `split`, is held out.

    `digits`: 1,797 handwritten digits of 8 × 8 pixels, which scikit-learn brings along (Alpaydin and Kaynak 1998,
    Optical Recognition of Handwritten Digits). Raises UserError for another name, for `others` (unknown
    options), and for an empty side.
    """
    if name not in NAMES:
        raise errors.unknown("set of images", name, NAMES)
    for option in others:
        raise errors.unknown(f"option of '{name}'", option, ("held_out", "split"))
    if type(split) is not int:
        raise UserError(f"split must be a whole number, not {split}.")
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.as_tensor(found.images * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    labels = torch.as_tensor(found.target, dtype=torch.int64)
    share = isinstance(held_out, int | float) and 0 < held_out < 1
    count = round(held_out * len(labels)) if share else 0
    if not 0 < count < len(labels):
        raise UserError(f"held_out must be a share between 0 and 1, such as 0.2, not {held_out}.")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(split))
    test, train = order[:count], order[count:]
    return Images(name, images[train], labels[train], images[test], labels[test], tuple(map(str, range(10))))
