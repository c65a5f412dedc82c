"""Opponents by name: "random", "minimax:DEPTH", "mcts:SIMULATIONS", and "solver" in Connect Four."""

from __future__ import annotations

import torch
from torch import Tensor

from foresight.envs.games import boards
from foresight.envs.games.game import Chooser, Game
from foresight.errors import UserError
from foresight.planning.games import minimax
from foresight.planning.search import playouts

FORMS = "random, minimax:DEPTH, mcts:SIMULATIONS, solver (in Connect Four)"


def is_opponent(name: str) -> bool:
    """Whether `name` has the form of an opponent's name."""
    return name.partition(":")[0] in ("random", "minimax", "mcts", "solver")


def make(name: str, game: Game, seed: int = 0) -> Chooser:
    """The opponent `name` for `game`: positions `[B]` to actions int64 `[B]`, with its own random state.

    Raises UserError for an unknown name, a depth or number of simulations below 1, and a search tree that does not fit
    in memory.
    """
    kind, colon, text = name.partition(":")
    random = playouts.stream(seed)
    if kind in ("random", "solver") and not colon:
        if kind == "solver":
            from foresight.planning.games import connect_four

            connect_four.check(game)
            return lambda position: connect_four.best(position, random)
        return lambda position: _random(game, position, random)
    if kind not in ("minimax", "mcts") or not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise UserError(f"Unknown opponent '{name}'. Use {FORMS}, with an integer of at least 1, such as mcts:1000.")
    number = int(text)
    if kind == "minimax":
        number = min(number, game.longest)  # no game is deeper
        return lambda position: minimax.minimax(game, position, number, random)
    playouts.require_room(game, number, f" ({name})")

    def search(position: Tensor) -> Tensor:
        visits, values = playouts.uct(game, position, number, random)
        # The most visited action; ties go to the higher value. Illegal actions have no visits.
        score = visits + 0.25 * values.clamp(-1, 1) + torch.where(visits > 0, 0.5, -1.0)
        return score.masked_fill(~game.legal(position), -torch.inf).argmax(-1)

    return search


def _random(game: Game, position: Tensor, random: object) -> Tensor:
    stream = random.view("uint64")  # type: ignore[attr-defined]
    legal = game.legal(position)
    drawn = torch.tensor([boards.draw(stream, count) for count in legal.sum(-1).tolist()], dtype=torch.int64)
    return (legal.cumsum(-1) > drawn[:, None]).int().argmax(-1)  # the legal action that has so many before it
