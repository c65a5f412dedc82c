"""Moves and pieces in words: what a picture shows for each player, and the action that a typed move means."""

from __future__ import annotations

from torch import Tensor

from foresight.envs.games.game import Game
from foresight.envs.games.openspiel import Spiel
from foresight.errors import UserError

COLORS = {  # the pieces of the first and the second player in a picture
    "tic_tac_toe": ("X", "O"), "connect_four": ("X", "O"), "go": ("X, black", "O, white"),
    "hex": ("X, from top to bottom", "O, from left to right"), "othello": ("x, black", "o, white"),
    "breakthrough": ("b, black, from top to bottom", "w, white, from bottom to top"),
    "chess": ("White, capitals", "Black, small letters"), "shogi": ("Black, capitals", "White, small letters"),
}  # fmt: skip


def colors(game: Game) -> tuple[str, str]:
    """The pieces of the first and the second player in `picture`; "" if unknown."""
    first, second = COLORS.get(game.name, ("", ""))
    small = isinstance(game, Spiel) and game.name in ("tic_tac_toe", "connect_four", "hex")
    return (first.lower(), second.lower()) if small else (first, second)


def named(game: Game, position: Tensor, text: str) -> int:
    """The legal action that `text` names in one position (B = 1): a move's name, or its index as in `#12`.

    Raises UserError with the legal moves.
    """
    legal = game.legal(position)[0].nonzero().flatten().tolist()
    names = {game.move_name(position, action): action for action in legal}
    folded: dict[str, list[int]] = {}
    for name, action in names.items():
        folded.setdefault(name.lower(), []).append(action)
    wish = text.strip()
    if wish in names:
        return names[wish]
    if len(folded.get(wish.lower(), [])) == 1:  # Nb3 and nb3 may differ in chess, b3 and B3 do not in Go
        return folded[wish.lower()][0]
    if wish.startswith("#") and wish[1:].isdecimal() and int(wish[1:]) in legal:
        return int(wish[1:])
    raise UserError(f"'{wish}' is not legal here. Legal: {', '.join(names) or 'none, the game is over'}.")
