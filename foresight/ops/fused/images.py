"""Images as the floats that a network takes."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
SCALED = np.arange(256, dtype=np.float32) / np.float32(255)  # a table of byte / 255, as a division takes longer


def pixels(images: Tensor) -> Tensor:
    """Bytes `[N, C, H, W]` on the CPU as floats in [0, 1] in channels-last layout: the twin of `_pixels` in `conv.py`.

    Torch takes longer for this permutation than a small network for its convolutions.
    """
    count, channels, height, width = images.shape
    found = torch.empty(count, height, width, channels)
    _pixels(images.contiguous().view(count, channels, -1).numpy(), found.view(count, -1, channels).numpy(), SCALED)
    return found.permute(0, 3, 1, 2)


@njit(cache=True)
def _pixels(images: NDArray[np.uint8], found: Floats, scaled: Floats) -> None:
    count, channels, places = images.shape
    for i in range(count):
        for k in range(channels):
            for j in range(places):
                found[i, j, k] = scaled[images[i, k, j]]
