"""Symmetries of boards: mirrored and turned positions, with their actions, for data augmentation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foresight.envs.games.game import Symmetry


def draw(symmetries: Sequence[Symmetry], count: int, generator: torch.Generator) -> Symmetry:
    """`count` of `symmetries`, drawn uniformly: `cells` `[count, H * W]`, `actions` `[count, A]`."""
    drawn = torch.randint(len(symmetries), (count,), generator=generator)
    return Symmetry(*(torch.stack(column)[drawn] for column in zip(*symmetries, strict=True)))


def permute(x: Tensor, order: Tensor) -> Tensor:
    """The last dim of each row of x `[N, ..., K]` in its own `order` `[N, K]`: cells of planes, or actions."""
    return x.gather(-1, order.view(len(order), *[1] * (x.dim() - 2), -1).expand_as(x))


def board_symmetry(height: int, width: int, actions: int, k: int) -> Symmetry:
    """Symmetry k of the eight of a square board: bit 0 mirrors columns, bit 1 turns by 180°, bit 2 transposes."""
    grid = np.arange(height * width).reshape(height, width)
    grid = grid[:, ::-1] if k & 1 else grid
    grid = grid[::-1, ::-1] if k & 2 else grid
    grid = grid.T if k & 4 else grid
    cells = torch.from_numpy(np.ascontiguousarray(grid).reshape(-1).copy())
    if actions == width and actions != height * width:  # columns are the actions
        return Symmetry(cells, torch.arange(width).flip(-1) if k & 1 else torch.arange(width))
    return Symmetry(cells, torch.cat([cells, torch.arange(height * width, actions)]))


def openspiel_symmetries(name: str, height: int, width: int, actions: int) -> tuple[Symmetry, ...]:
    """Those of the board where actions are cells (and a pass); in Breakthrough the mirror; else the identity alone.

    Hex has none: its planes encode which edge a stone is connected to, and turning the board changes the edges.
    """
    same = Symmetry(torch.arange(height * width), torch.arange(actions))
    if name in ("tic_tac_toe", "go") and height == width and actions - height * width in (0, 1):
        return tuple(board_symmetry(height, width, actions, k) for k in range(8))
    if name == "othello":  # the others exchange the colors of the first four stones
        return tuple(board_symmetry(height, width, actions, k) for k in (0, 2, 4, 6))
    if name == "connect_four":
        return tuple(board_symmetry(height, width, actions, k) for k in (0, 1))
    if name == "breakthrough" and actions == height * width * 12:
        # An action is (row, column, one of six directions, whether it takes); directions go left, ahead, right.
        number = np.arange(actions).reshape(height, width, 2, 3, 2)
        mirror = torch.from_numpy(np.ascontiguousarray(number[:, ::-1, :, ::-1]).reshape(-1).copy())
        return same, Symmetry(board_symmetry(height, width, actions, 1).cells, mirror)
    return (same,)
