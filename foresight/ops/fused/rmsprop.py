"""Steps of RMSProp down a clipped gradient."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foresight.ops.fused.adam import clip_factor
from foresight.ops.fused.latent import FAST

Floats = NDArray[np.float32]


class RMSProp(NamedTuple):
    """RMSProp's settings and, for one flat parameter, its average of squared gradients, in place."""

    squares: Floats
    rate: float
    decay: float
    eps: float


@njit(cache=True, nogil=True, fastmath=FAST, error_model="numpy")
def clip_and_step(
    flat: Floats, gradient: Floats, max_norm: float, squares: Floats, rate: float, decay: float, eps: float
) -> None:
    """One step of RMSProp without momentum (Mnih et al. 2016, eq. 7 and 8, ε outside the root) down the clipped one."""
    scale, kept, new = clip_factor(gradient, max_norm), np.float32(decay), np.float32(1 - decay)
    size, small = np.float32(rate), np.float32(eps)
    for i in range(len(flat)):
        slope = gradient[i] * scale
        squares[i] = kept * squares[i] + new * slope * slope
        flat[i] -= size * slope / (np.sqrt(squares[i]) + small)
