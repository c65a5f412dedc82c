"""The protocol of a game: two players, zero-sum, perfect information; batches of positions as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from foresight.errors import UserError

TITLES = {
    "tic_tac_toe": "tic-tac-toe", "connect_four": "Connect Four", "othello": "Othello", "hex": "Hex",
    "breakthrough": "Breakthrough", "go": "Go", "chess": "chess", "shogi": "shogi",
}  # fmt: skip

Chooser = Callable[[Tensor], Tensor]  # positions `[B]` to actions int64 `[B]`; none of the games is over


class Moved(NamedTuple):
    """What came of an action: the new positions, the mover's reward `[B]` float32, and `over` `[B]` bool."""

    position: Tensor
    reward: Tensor
    over: Tensor


class Symmetry(NamedTuple):
    """One way in which the game looks the same: new plane p at cell i is old plane p at cell `cells[i]`, and likewise
    action a of the new position is action `actions[a]` of the old one. int64 `[H * W]` and `[A]`.
    """

    cells: Tensor
    actions: Tensor


class Game(Protocol):
    """A batch of B positions is one tensor with leading dim B, on the CPU; nothing else is known about it outside.

    `shape` is that of the planes (C, H, W), `actions` how many there are, `longest` the most moves of a game (a bound),
    `opponent` whom evaluations play, `options` what it was made with, `symmetries` all of them, identity first.
    """

    name: str
    title: str
    shape: tuple[int, int, int]
    actions: int
    longest: int
    opponent: str
    options: dict[str, Any]
    symmetries: tuple[Symmetry, ...]

    def start(self, count: int) -> Tensor:
        """`count` games before the first move."""

    def step(self, position: Tensor, action: Tensor) -> Moved:
        """Take `action` int64 `[B]`. A game that is over, and an illegal action, change nothing and earn nothing."""

    def legal(self, position: Tensor) -> Tensor:
        """Bool `[B, A]`; none where the game is over."""

    def over(self, position: Tensor) -> Tensor:
        """Bool `[B]`."""

    def mover(self, position: Tensor) -> Tensor:
        """Who moves, 0 or 1, int64 `[B]` (any number where the game is over)."""

    def planes(self, position: Tensor) -> Tensor:
        """What the player to move sees, `[B, C, H, W]`, uint8 or float32."""

    def moves(self, position: Tensor) -> Tensor:
        """How many moves were made, int64 `[B]`."""

    def first_score(self, position: Tensor) -> Tensor:
        """The first player's points where the game is over: 1 won, ½ drawn, 0 lost; NaN elsewhere. float32 `[B]`."""

    def picture(self, position: Tensor) -> str:
        """One position (B = 1) for a terminal."""

    def move_name(self, position: Tensor, action: int) -> str:
        """What people call `action` in one position (B = 1)."""

    def forget(self, keep: Tensor) -> None:
        """Every position but those in `keep` is no longer needed."""


@dataclass
class Plays:
    """Which game weights are for, as a part of a State: a checkpoint of another one is refused."""

    game: str = ""

    @classmethod
    def of(cls, game: Game | None) -> Plays:
        """Of this game with its options; None is no game."""
        if game is None:
            return cls()
        options = ", ".join(f"{key}={value}" for key, value in sorted(game.options.items()))
        return cls(f"{game.name}({options})")

    def state_dict(self) -> dict[str, Any]:
        """The game's name and options."""
        return {"game": self.game}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError if the checkpoint is of another game."""
        if state["game"] != self.game:
            raise UserError(f"The checkpoint plays {state['game']}, not {self.game}. Load it with its own game.")


def replay(game: Game, histories: Sequence[Sequence[int]]) -> Tensor:
    """The positions after these actions, `[B]` games. Raises UserError at an illegal one: game, move number."""
    rows = []
    for g, actions in enumerate(histories):
        position = game.start(1)
        for t, action in enumerate(actions):
            if not 0 <= action < game.actions or not bool(game.legal(position)[0, action]):
                raise UserError(f"Game {g + 1}, move {t + 1}: action {action} is not legal in {game.title}.")
            position = game.step(position, torch.tensor([action])).position
        rows.append(position)
    return torch.cat(rows) if rows else game.start(0)
