"""`Rules`: the exact rules of a game as a search `Model`, with any evaluation function."""

from __future__ import annotations

from collections.abc import Callable

import torch
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
