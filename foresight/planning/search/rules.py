"""`Rules`: the exact rules of a game as a search `Model`, whatever it is that evaluates positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foresight.envs.games.game import Game

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions to logits `[B, A]` and values `[B]` of the mover


class Rules:
    """Positions of `game` are the model's states; logits and values are `evaluate`'s, illegal actions ruled out.

    The discount is -1 where the mover changes and 0 where the game ends, so values are always those of the player to
    move and rewards those of the player who moved. `evaluate` is asked about all rows, those that are over too: their
    values never count. Numbers are brought to where the positions are, the CPU.
    """

    def __init__(self, game: Game, evaluate: Evaluate) -> None:
        self.game, self.evaluate = game, evaluate

    def root(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `search.Model`; `position` is `[B, ...]`."""
        logits, value = self._judge(position)
        return logits, value, position

    def step(self, position: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """See `search.Model`."""
        moved = self.game.step(position, action)
        logits, value = self._judge(moved.position)
        changed = self.game.mover(moved.position) != self.game.mover(position)
        discount = torch.where(changed, -1.0, 1.0).masked_fill(moved.over, 0.0)
        return moved.position, moved.reward, discount, logits, value

    def picture(self, position: Tensor, row: int) -> str:
        """One of the positions `[B, ...]` for a terminal, where a message speaks of it."""
        return self.game.picture(position[row : row + 1])

    def _judge(self, position: Tensor) -> tuple[Tensor, Tensor]:
        logits, value = self.evaluate(position)
        logits = logits.to(position.device, torch.float32)
        return logits.masked_fill(~self.game.legal(position), -torch.inf), value.to(position.device, torch.float32)
