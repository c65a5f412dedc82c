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


class StepResult(NamedTuple):
    """The result of an action: the new positions, the mover's reward `[B]` float32, and `over` `[B]` bool."""

    position: Tensor
    reward: Tensor
    over: Tensor


class Symmetry(NamedTuple):
    """One symmetry of the game: new plane p at cell i is old plane p at cell `cells[i]`, and new action a is old action
    `actions[a]`. int64 `[H * W]` and `[A]`.
    """

    cells: Tensor
    actions: Tensor


class Game(Protocol):
    """A batch of B positions is one opaque tensor with leading dim B, on the CPU.

    `shape` is that of the planes (C, H, W), `actions` the number of actions, `longest` an upper bound on the moves of
    a game, `opponent` the default opponent of evaluations, `options` those of `make`, `symmetries` all symmetries, the
    identity first.
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

    def step(self, position: Tensor, action: Tensor) -> StepResult:
        """Take `action` int64 `[B]`. Finished games and illegal actions change nothing and earn 0."""

    def legal(self, position: Tensor) -> Tensor:
        """Bool `[B, A]`; none where the game is over."""

    def over(self, position: Tensor) -> Tensor:
        """Bool `[B]`."""

    def mover(self, position: Tensor) -> Tensor:
        """The player to move, 0 or 1, int64 `[B]` (undefined where the game is over)."""

    def planes(self, position: Tensor) -> Tensor:
        """The observation of the player to move, `[B, C, H, W]`, uint8 or float32."""

    def moves(self, position: Tensor) -> Tensor:
        """The number of moves so far, int64 `[B]`."""

    def first_score(self, position: Tensor) -> Tensor:
        """The first player's points where the game is over: 1 won, ½ drawn, 0 lost; NaN elsewhere. float32 `[B]`."""

    def picture(self, position: Tensor) -> str:
        """One position (B = 1) as text."""

    def move_name(self, position: Tensor, action: int) -> str:
        """The name of `action` in one position (B = 1)."""

    def free_except(self, keep: Tensor) -> None:
        """Free every position that is not in `keep`."""


@dataclass
class GameId:
    """The game of a State: a checkpoint of another game is refused."""

    game: str = ""

    @classmethod
    def of(cls, game: Game | None) -> GameId:
        """For this game with its options; None is no game."""
        if game is None:
            return cls()
        options = ", ".join(f"{key}={value}" for key, value in sorted(game.options.items()))
        return cls(f"{game.name}({options})")

    def state_dict(self) -> dict[str, Any]:
        """The game's name and options."""
        return {"game": self.game}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError if the checkpoint is for another game."""
        if state["game"] != self.game:
            raise UserError(f"The checkpoint plays {state['game']}, not {self.game}. Load it with its own game.")


def replay(game: Game, histories: Sequence[Sequence[int]]) -> Tensor:
    """The positions after these actions, `[B]` games. Raises UserError at an illegal action."""
    rows = []
    for g, actions in enumerate(histories):
        position = game.start(1)
        for t, action in enumerate(actions):
            if not 0 <= action < game.actions or not bool(game.legal(position)[0, action]):
                raise UserError(f"Game {g + 1}, move {t + 1}: action {action} is not legal in {game.title}.")
            position = game.step(position, torch.tensor([action])).position
        rows.append(position)
    return torch.cat(rows) if rows else game.start(0)
