"""Board games on the page: a position, the agent's search of it, and its move.

A request is stateless: the player, the actions so far, and a number of simulations. A search without randomness is the
same each time, so scrubbing through it is asking for fewer simulations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foresight.algorithms.search import mcts
from foresight.envs.games import make
from foresight.envs.games.game import Game, replay
from foresight.envs.games.notation import colors
from foresight.errors import UserError, unknown
from foresight.planning.search.tree import Tree
from foresight.runtime import kinds, run
from foresight.studio import trees
from foresight.studio.runs import Library

# Games that MCTS with random playouts plays without training: game, options, simulations.
UNTRAINED: dict[str, tuple[str, dict[str, Any], int]] = {
    "mcts-tic_tac_toe": ("tic_tac_toe", {}, 1_000),
    "mcts-connect_four": ("connect_four", {}, 2_000),
    "mcts-hex": ("hex", {"size": 5}, 2_000),
    "mcts-go": ("go", {"size": 5}, 2_000),
}
BUNDLED = "connect_four"
MOST = 20_000  # simulations of one request
STONES = "XOxo"
EMPTY = ".-"


class Players:
    """The agents that can be played against: a bundled one, MCTS, and the game runs of a library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._loaded: dict[tuple[str, str], tuple[Any, Any, Game]] = {}  # by name and checkpoint
        self._lock = threading.Lock()

    def names(self) -> list[dict[str, Any]]:
        """Name, game and simulations of every player."""
        found = [_player(BUNDLED, "AlphaZero (bundled)", "Connect Four", 64)]
        for name, (game, options, simulations) in UNTRAINED.items():
            size = f" {options['size']}×{options['size']}" if "size" in options else ""
            title = game.replace("_", " ").title().replace("Tic Tac Toe", "tic-tac-toe") + size
            found.append(_player(name, f"MCTS at {title}", title, simulations, playouts=True))
        for row in self._library.table():
            if row["kind"] == "game":
                playouts = row["algorithm"] == "mcts"
                fields = self._library.settings(row["id"])
                usual = fields.get("simulations", 1_000) if playouts else 64
                usual = min(usual, MOST) if type(usual) is int else 64
                found.append(_player(row["id"], row["name"], str(row["env"]), usual, playouts))
        return found

    def look(self, document: dict[str, Any]) -> dict[str, Any]:
        """A position and, with `simulations`, the player's search of it.

        `moves`: the actions so far; `simulations`: of the search, 0 for the raw policy, None for no analysis.
        Returns the board as text and, where the game has one, as cells; the legal moves; and `analysis`: `value` for
        the player to move, the `moves` with visits, prior and value, and the `tree`.
        """
        name, moves = document.get("player", BUNDLED), document.get("moves", [])
        simulations = document.get("simulations")
        if not isinstance(name, str):
            raise UserError("player must be a name.")
        if not isinstance(moves, list) or not all(type(move) is int for move in moves) or len(moves) > 500:
            raise UserError("moves must be a list of action numbers.")
        if simulations is not None and (type(simulations) is not int or not 0 <= simulations <= MOST):
            raise UserError(f"simulations must be between 0 and {MOST:,}, not {simulations!r}.")
        with self._lock:  # positions and networks of one player are used by one request at a time
            module, state, game = self._load(name)
            if module is mcts:  # the same playouts for the same request
                state = mcts.build(state.config, game)
            position = replay(game, [moves])
            found = self._describe(game, position, moves)
            if simulations is not None and not found["over"]:
                found["analysis"] = _analyze(module, state, game, position, simulations)
            game.free_except(position[:0])
            return found

    def _load(self, name: str) -> tuple[Any, Any, Game]:
        fixed = name == BUNDLED or name in UNTRAINED
        key = (name, "" if fixed else self._library.saved(name))
        if key in self._loaded:
            return self._loaded[key]
        if name in UNTRAINED:
            kind, options, simulations = UNTRAINED[name]
            game = make.make(kind, **options)
            loaded: tuple[Any, Any, Game] = (mcts, mcts.build(mcts.Config(simulations=simulations), game), game)
        else:
            path = Path(BUNDLED) if name == BUNDLED else self._library.path(name)
            agent = run.load(run.find(path))
            if not kinds.get(agent.settings.kind).matches:
                valid = [player["id"] for player in self.names()]
                raise unknown("player", name, valid)
            if hasattr(agent.state, "replay"):
                agent.state.replay = None  # may be large, and is not needed to play
            loaded = agent.module, agent.state, agent.env
        others = [(old, value) for old, value in self._loaded.items() if old[0] != name]
        self._loaded = {**dict(others[-3:]), key: loaded}
        return loaded

    def _describe(self, game: Game, position: Tensor, moves: list[int]) -> dict[str, Any]:
        over = bool(game.over(position)[0])
        legal = game.legal(position)[0].nonzero().flatten().tolist()
        names = {action: game.move_name(position, action) for action in legal}
        return {
            "game": game.title,
            "moves": moves,
            "board": game.picture(position),
            "cells": cells(game, position, names),
            "legal": [{"action": action, "name": name} for action, name in names.items()],
            "mover": None if over else int(game.mover(position)[0]),
            "colors": list(colors(game)),
            "over": over,
            "first_score": float(game.first_score(position)[0]) if over else None,
        }


def _player(name: str, title: str, game: str, simulations: int, playouts: bool = False) -> dict[str, Any]:
    """`simulations` at first; `least` to `most` of them; `stride` between two that are offered."""
    least, most, stride = (1, 5_000, 50) if playouts else (0, 400, 1)
    return {
        "id": name, "name": title, "game": game, "simulations": simulations, "least": least,
        "most": max(most, simulations), "stride": stride,
    }  # fmt: skip


def cells(game: Game, position: Tensor, names: dict[int, str]) -> dict[str, Any] | None:
    """The board as rows of cells `{stone, action}`, from its picture; None for games whose moves are not cells.

    `stone` is 0, 1 or None, `action` the legal action of a click there. `slant`: half cells that each row is shifted.
    """
    if game.name not in ("tic_tac_toe", "connect_four", "hex", "go", "othello"):
        return None
    by_name = {name.lower(): action for action, name in names.items()}
    rows = []
    for line in game.picture(position).splitlines():
        tokens = line.split()
        label = next((token for token in tokens if token.isdigit()), "")
        stones = [token for token in tokens if len(token) == 1 and token in STONES + EMPTY]
        if len(stones) != game.shape[2]:
            continue
        row = []
        for column, stone in enumerate(stones):
            name = str(column + 1) if game.name == "connect_four" else f"{chr(97 + column)}{label}"
            owner = None if stone in EMPTY else int(stone in "Oo")
            row.append({"stone": owner, "action": by_name.get(name)})
        rows.append(row)
    return {"rows": rows, "slant": 1 if game.name == "hex" else 0, "columns": game.name == "connect_four"}


def _analyze(module: Any, state: Any, game: Game, position: Tensor, simulations: int) -> dict[str, Any]:
    options = {"simulations": simulations}
    with torch.no_grad():
        action, extras, _ = module.act(state, position, None, explore=False, **options)
    played = int(action[0])
    tree = extras.get("tree")
    values = tree.child_values()[0] if tree is not None else extras.get("values", [None])[0]
    visits, prior = extras.get("visits"), extras.get("prior")
    legal = game.legal(position)[0].nonzero().flatten().tolist()
    rows = [
        {
            "action": one,
            "name": game.move_name(position, one),
            "visits": None if visits is None else int(visits[0, one]),
            "prior": None if prior is None else float(prior[0, one]),
            "value": float(values[one]) if values is not None and visits is not None and visits[0, one] > 0 else None,
        }
        for one in legal
    ]
    return {
        "action": played,
        "simulations": simulations,
        "value": float(extras["value"][0]) if "value" in extras else None,
        "moves": sorted(rows, key=lambda row: (row["action"] != played, -(row["visits"] or 0), -(row["prior"] or 0))),
        "tree": None if tree is None else trees.shown(tree, _names(tree, game, position)),
    }


def _names(tree: Tree, game: Game, position: Tensor) -> Callable[[int, int], str]:
    """Names of actions at the nodes of a tree: those that they have in the node's own position.

    A search in a learned model may go on after the end of the game: there, actions have numbers.
    """
    places: dict[int, Tensor | None] = {0: position}

    def place(node: int) -> Tensor | None:
        if node not in places:
            before, action = place(int(tree.parent[0, node])), int(tree.action[0, node])
            legal = before is not None and bool(game.legal(before)[0, action])
            places[node] = game.step(before, torch.tensor([action])).position if legal and before is not None else None
        return places[node]

    def name(node: int, action: int) -> str:
        here = place(node)
        legal = here is not None and bool(game.legal(here)[0, action])
        return game.move_name(here, action) if legal and here is not None else str(action)

    return name
