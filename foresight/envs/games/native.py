"""Tic-tac-toe, Connect Four, Hex and Go with the compiled rules of `envs.games.boards`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresight.envs.games import boards
from foresight.envs.games.game import TITLES, StepResult
from foresight.envs.games.symmetries import board_symmetry

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Native:
    """A game with compiled rules: a position is a row of int32, see `envs.games.boards`."""

    def __init__(self, name: str, opponent: str, options: dict[str, Any]) -> None:
        self.name, self.title, self.opponent, self.options = name, TITLES[name], opponent, dict(options)
        size = options.get("board_size", 0)
        self.kind, self.height, self.width, self.line = {
            "tic_tac_toe": (boards.LINE, 3, 3, 3),
            "connect_four": (boards.DROP, 6, 7, 4),
            "hex": (boards.HEX, size, size, 0),
            "go": (boards.GO, size, size, 0),
        }[name]
        self.komi = float(options.get("komi", 0.0))
        self.cells = self.height * self.width
        self.shape = (3, self.height, self.width)
        self.actions = boards.actions_of(self.kind, self.height, self.width)
        self.longest = self.cells * (2 if self.kind == boards.GO else 1)
        self.row = boards.width_of(self.kind, self.height, self.width)
        kinds = {boards.LINE: range(8), boards.DROP: (0, 1), boards.HEX: (0, 2), boards.GO: range(8)}[self.kind]
        self.symmetries = tuple(board_symmetry(self.height, self.width, self.actions, k) for k in kinds)

    @property
    def rules(self) -> tuple[int, int, int, int, float]:
        """The first arguments of the functions in `boards`."""
        return self.kind, self.height, self.width, self.line, self.komi

    def start(self, count: int) -> Tensor:
        """`count` empty boards."""
        return torch.zeros(count, self.row, dtype=torch.int32)

    def step(self, position: Tensor, action: Tensor) -> StepResult:
        """See `Game`."""
        rows = position.numpy()
        out, rewards, over = np.empty_like(rows), np.empty(len(rows), np.float32), np.empty(len(rows), np.bool_)
        boards.step_all(*self.rules, rows, action.numpy(), out, rewards, over)
        return StepResult(torch.from_numpy(out), torch.from_numpy(rewards), torch.from_numpy(over))

    def legal(self, position: Tensor) -> Tensor:
        """See `Game`."""
        out = np.empty((len(position), self.actions), np.bool_)
        boards.legal_all(self.kind, self.height, self.width, position.numpy(), out)
        return torch.from_numpy(out)

    def over(self, position: Tensor) -> Tensor:
        """See `Game`."""
        return position[:, self.cells + boards.RESULT] != boards.PLAYING

    def mover(self, position: Tensor) -> Tensor:
        """See `Game`."""
        return position[:, self.cells + boards.TURN].long()

    def planes(self, position: Tensor) -> Tensor:
        """See `Game`; uint8."""
        out = np.empty((len(position), *self.shape), np.uint8)
        boards.planes_all(self.height, self.width, position.numpy(), out)
        return torch.from_numpy(out)

    def moves(self, position: Tensor) -> Tensor:
        """See `Game`."""
        return position[:, self.cells + boards.MOVES].long()

    def first_score(self, position: Tensor) -> Tensor:
        """See `Game`."""
        scores = torch.tensor([torch.nan, 1.0, 0.0, 0.5])
        return scores[position[:, self.cells + boards.RESULT].long()]

    def picture(self, position: Tensor) -> str:
        """See `Game`: X is the first player, O the second."""
        rows = position[0, : self.cells].view(self.height, self.width).tolist()
        signs = ".XO"
        if self.kind == boards.DROP:
            lines = [" ".join(signs[stone] for stone in row) for row in rows[::-1]]
            return "\n".join([*lines, " ".join(str(c + 1) for c in range(self.width))])
        head = "   " + " ".join(LETTERS[: self.width])
        if self.kind == boards.HEX:  # each row is shifted by half a cell, like the hexagons
            body = [f"{' ' * r}{r + 1:2d} {' '.join(signs[s] for s in row)}" for r, row in enumerate(rows)]
            return "\n".join([head, *body])
        if self.kind == boards.GO:  # row 1 is at the bottom
            body = [f"{r + 1:2d} {' '.join(signs[s] for s in row)}" for r, row in enumerate(rows)]
            return "\n".join([*body[::-1], head])
        return "\n".join([head, *(f"{r + 1:2d} {' '.join(signs[s] for s in row)}" for r, row in enumerate(rows))])

    def move_name(self, position: Tensor, action: int) -> str:
        """See `Game`: a column's number in Connect Four, letter and row elsewhere."""
        if self.kind == boards.DROP:
            return str(action + 1)
        if action == self.cells:
            return "pass"
        return f"{LETTERS[action % self.width]}{action // self.width + 1}"

    def free_except(self, keep: Tensor) -> None:
        """Nothing to free."""
