"""An open list for compiled search: a binary heap over arrays, least key first, the oldest among equal keys."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foresight.envs.pddl.kernels import wider

Keys = NDArray[np.float64]
Items = NDArray[np.int64]


@njit(cache=True, nogil=True)
def before(keys: Keys, items: Items, i: int, j: int) -> bool:
    """Whether entry i comes before entry j."""
    if keys[i, 0] != keys[j, 0]:
        return keys[i, 0] < keys[j, 0]
    return items[i, 0] < items[j, 0]


@njit(cache=True, nogil=True)
def swap(keys: Keys, items: Items, i: int, j: int) -> None:
    """Exchange two entries."""
    keys[i, 0], keys[j, 0] = keys[j, 0], keys[i, 0]
    for k in range(3):
        items[i, k], items[j, k] = items[j, k], items[i, k]


@njit(cache=True, nogil=True)
def push(keys: Keys, items: Items, size: int, key: float, order: int, row: int, g: int) -> tuple[Keys, Items]:
    """Add an entry to a heap of `size`: keys `[n, 1]`, items `[n, 3]` (order, row, g); returns them, perhaps longer."""
    if size == keys.shape[0]:
        keys, items = wider(keys, size), wider(items, size)
    keys[size, 0] = key
    items[size, 0], items[size, 1], items[size, 2] = order, row, g
    i = size
    while i > 0 and before(keys, items, i, (i - 1) >> 1):
        swap(keys, items, i, (i - 1) >> 1)
        i = (i - 1) >> 1
    return keys, items


@njit(cache=True, nogil=True)
def pop(keys: Keys, items: Items, size: int) -> None:
    """Move the first entry of a heap of `size` to its end, and restore the order of the others."""
    last = size - 1
    swap(keys, items, 0, last)
    i = 0
    while True:
        least = i
        for child in (2 * i + 1, 2 * i + 2):
            if child < last and before(keys, items, child, least):
                least = child
        if least == i:
            return
        swap(keys, items, i, least)
        i = least
