"""What is seen of an errand: 48 × 48 RGB pixels, four a cell."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from foresight.envs.control.errands.rules import CELLS, COLORS, KINDS, Errand

CELL = 4  # pixels
SIDE = CELLS * CELL
FLOOR, STONE, DISC = (0, 0, 0), (110, 110, 110), (255, 255, 255)
RGB = dict(zip(COLORS, (
    (230, 30, 30), (30, 200, 30), (50, 80, 255), (230, 220, 30), (190, 40, 220), (30, 210, 220)
), strict=True))  # fmt: skip
GLYPHS = {
    kind: np.array([[mark == "#" for mark in row] for row in rows])
    for kind, rows in zip(
        KINDS, ((".##.", "####", "####", ".##."), ("####", "#..#", "#..#", "####"), ("###.", "###.", ".#..", ".##.")),
        strict=True,
    )
}  # fmt: skip


def draw(errand: Errand) -> NDArray[np.uint8]:
    """The picture `[48, 48, 3]`. The disc is a white frame around a held object, or what it is over.

    A locked door has its color.
    """
    image = _rooms(errand.wall, tuple(errand.rows)).copy()
    if errand.lock is not None and not errand.opened:
        image[_doorway(errand.lock, errand.rows[errand.lock])] = RGB[errand.color]
    for thing in errand.things:
        if thing.cell is not None:
            _stamp(image, thing.cell[0] * CELL, thing.cell[1] * CELL, thing.kind, RGB[thing.color])
    left, top = (round(x * SIDE - CELL / 2) for x in errand.place)
    inside = image[top : top + CELL, left : left + CELL].copy()
    image[max(top - 1, 0) : top + CELL + 1, max(left - 1, 0) : left + CELL + 1] = DISC
    image[top : top + CELL, left : left + CELL] = FLOOR if errand.hand is not None else inside
    if errand.hand is not None:
        _stamp(image, left, top, errand.hand.kind, RGB[errand.hand.color])
    return image


@functools.lru_cache(maxsize=4096)
def _rooms(wall: int, doors: tuple[int, ...]) -> NDArray[np.uint8]:
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    image[:] = FLOOR
    image[[0, -1]] = image[:, [0, -1]] = STONE
    middle = slice(SIDE // 2 - 1, SIDE // 2 + 1)
    image[middle] = image[:, middle] = STONE
    for door, row in enumerate(doors):
        if door != wall:
            image[_doorway(door, row)] = FLOOR
    return image


def _doorway(door: int, row: int) -> tuple[slice, slice]:
    along, through = slice(row * CELL - 1, row * CELL + CELL + 1), slice(SIDE // 2 - 1, SIDE // 2 + 1)
    return (along, through) if door in (0, 2) else (through, along)


def _stamp(image: NDArray[np.uint8], left: int, top: int, kind: str, color: tuple[int, int, int]) -> None:
    image[top : top + CELL, left : left + CELL][GLYPHS[kind]] = color
