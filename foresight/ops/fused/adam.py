"""Steps of Adam down a clipped gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from foresight.ops.fused.latent import FAST

Floats = NDArray[np.float32]


class Adam(NamedTuple):
    """Adam's settings and, for one flat parameter, its averages of gradients and of their squares, in place."""

    average: Floats
    squares: Floats
    step: int  # steps made before
    rate: float
    betas: tuple[float, float]
    eps: float


@njit(cache=True, nogil=True, error_model="numpy")
def clip_and_step(
    flat: Floats, gradient: Floats, max_norm: float, average: Floats, squares: Floats, rate: float,
    betas: tuple[float, float], eps: float, step: int,
) -> None:  # fmt: skip
    """One step of Adam (Kingma and Ba 2015, alg. 1) down the clipped gradient."""
    scale, size, root = _factors(gradient, max_norm, rate, betas, step)
    _step(flat, gradient, scale, average, squares, size, betas, eps, root)


@njit(cache=True, nogil=True, error_model="numpy")
def clip_and_step_threads(
    flat: Floats, gradient: Floats, max_norm: float, average: Floats, squares: Floats, rate: float,
    betas: tuple[float, float], eps: float, step: int,
    threads: int | None,
) -> None:  # fmt: skip
    """The same; each of `threads` has a part of the weights."""
    if threads is None:
        clip_and_step(flat, gradient, max_norm, average, squares, rate, betas, eps, step)
    else:
        scale, size, root = _factors(gradient, max_norm, rate, betas, step)
        _step_threads(flat, gradient, scale, average, squares, size, betas, eps, root, threads)


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def _step_threads(
    flat: Floats, gradient: Floats, scale: np.float32, average: Floats, squares: Floats, size: np.float32,
    betas: tuple[float, float], eps: float, root: np.float32, threads: int,
) -> None:  # fmt: skip
    for part in prange(threads):
        a, b = len(flat) * part // threads, len(flat) * (part + 1) // threads
        _step(flat[a:b], gradient[a:b], scale, average[a:b], squares[a:b], size, betas, eps, root)


@njit(cache=True, nogil=True, fastmath=FAST, error_model="numpy")
def clip_factor(gradient: Floats, max_norm: float) -> np.float32:
    """What a gradient is multiplied by so that its norm is at most `max_norm`."""
    total = np.float32(0)
    for i in range(len(gradient)):
        total += gradient[i] * gradient[i]
    norm = math.sqrt(total)
    return np.float32(max_norm / (norm + 1e-6)) if norm > max_norm else np.float32(1)


@njit(cache=True, nogil=True, fastmath=FAST, error_model="numpy")
def _factors(
    gradient: Floats, max_norm: float, rate: float, betas: tuple[float, float], step: int
) -> tuple[np.float32, np.float32, np.float32]:
    """The factor of the clipped gradient, and the rate and the root that correct the averages."""
    scale = clip_factor(gradient, max_norm)
    return scale, np.float32(rate / (1 - betas[0] ** step)), np.float32(math.sqrt(1 - betas[1] ** step))


@njit(cache=True, nogil=True, fastmath=FAST, error_model="numpy")
def _step(
    flat: Floats, gradient: Floats, scale: np.float32, average: Floats, squares: Floats, size: np.float32,
    betas: tuple[float, float], eps: float, root: np.float32,
) -> None:  # fmt: skip
    first, second, small, one = np.float32(betas[0]), np.float32(betas[1]), np.float32(eps), np.float32(1)
    for i in range(len(flat)):
        slope = gradient[i] * scale
        average[i] = first * average[i] + (one - first) * slope
        squares[i] = second * squares[i] + (one - second) * slope * slope
        flat[i] -= size * average[i] / (np.sqrt(squares[i]) / root + small)
