"""`Rules`: the exact rules of a game as a search `Model`, with any evaluation function."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from foresight.envs.games.game import Game

Evaluate = Callable[
    [Tensor], tuple[Tensor, Tensor]
]  # positions to logits `[B, A]` and values `[B]` for the player to move


class Rules:
    """Positions of `game` are the model's states; logits and values come from `evaluate`, illegal actions are masked.

    The discount is -1 where the player changes and 0 where the game ends, so values are for the player to move and
    rewards for the player who moved. `evaluate` also gets finished games; their values are not used. Its outputs are
    moved to the device of the positions, the CPU.
    """

    def __init__(self, game: Game, evaluate: Evaluate) -> None:
        self.game, self.evaluate = game, evaluate

    def root(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `mcts.Model`; `position` is `[B, ...]`."""
        logits, value = self._evaluate(position)
        return logits, value, position

    def step(self, position: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """See `mcts.Model`."""
        moved = self.game.step(position, action)
        logits, value = self._evaluate(moved.position)
        changed = self.game.mover(moved.position) != self.game.mover(position)
        discount = torch.where(changed, -1.0, 1.0).masked_fill(moved.over, 0.0)
        return moved.position, moved.reward, discount, logits, value

    def picture(self, position: Tensor, row: int) -> str:
        """One of the positions `[B, ...]` as text, for error messages."""
        return self.game.picture(position[row : row + 1])

    def _evaluate(self, position: Tensor) -> tuple[Tensor, Tensor]:
        logits, value = self.evaluate(position)
        logits = logits.to(position.device, torch.float32)
        return logits.masked_fill(~self.game.legal(position), -torch.inf), value.to(position.device, torch.float32)


def each_once(network: Evaluate) -> Evaluate:
    """`network` of planes `[B, ...]` on the CPU, which computes each position once and remembers its outputs.

    A search meets a position again: in another game of the batch, by another order of moves, and where a game is over
    (Leela Chess Zero's cache of evaluations). Make a new one whenever the weights change.
    """
    rows: dict[bytes, int] = {}
    known: tuple[Tensor, ...] = ()  # logits `[N, A]` and values `[N]` of the positions so far

    def evaluate(planes: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal known
        keys = [_key(row) for row in planes.numpy()]
        fresh = {key: i for i, key in enumerate(keys) if key not in rows}
        if fresh:
            found = network(planes[list(fresh.values())])
            rows.update(zip(fresh, range(len(rows), len(rows) + len(fresh)), strict=True))
            known = found if len(rows) == len(fresh) else tuple(torch.cat(x) for x in zip(known, found, strict=True))
        at = torch.tensor([rows[key] for key in keys], device=known[1].device)
        return known[0][at], known[1][at]

    return evaluate


def _key(planes: NDArray[Any]) -> bytes:
    """The planes themselves, or their digest: large ones of a long search would fill the memory."""
    return planes.tobytes() if planes.nbytes <= 1024 else blake2b(planes.tobytes(), digest_size=16).digest()
