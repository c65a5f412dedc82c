"""`make`: a game by its name, with native rules where there are any, else from OpenSpiel."""

from __future__ import annotations

import math
from typing import Any

from foresight.envs.games.game import Game
from foresight.envs.games.native import Native
from foresight.envs.games.openspiel import Spiel
from foresight.errors import UserError

NATIVE = ("tic_tac_toe", "connect_four", "hex", "go")
SIZES = {"hex": 11, "go": 9}  # boards with a size option, and its default: OpenSpiel's or the usual one
OPTIONS = {"hex": ("board_size",), "go": ("board_size", "komi")}  # of native rules, with OpenSpiel's names
KOMI = 7.5  # OpenSpiel's


def make(name: str, opponent: str = "mcts:100", rules: str = "auto", **options: Any) -> Game:
    """The game `name`, such as `connect_four`, `go` with `size=7`, or any other game of OpenSpiel with its own options.

    - `opponent`: the opponent in evaluations: "random", "minimax:DEPTH", "mcts:SIMULATIONS";
    - `rules`: "native" (compiled here), "openspiel", or "auto": native if there are any;
    - `size`: of the board of Hex or Go (OpenSpiel's `board_size` works, too); `komi` of Go.

    Raises UserError for an unknown name or option and for a game of another kind.
    """
    if rules not in ("auto", "native", "openspiel"):
        raise UserError(f"rules must be auto, native or openspiel, not '{rules}'.")
    if not isinstance(opponent, str):
        raise UserError(f"opponent must be a name such as random or mcts:100, not {opponent!r}.")
    name = name.lower().replace("-", "_").replace(" ", "_")
    if "size" in options or name in SIZES:
        if name not in SIZES:
            raise UserError(f"{name} has no option 'size'; {' and '.join(SIZES)} have.")
        if "size" in options and options.get("board_size", options["size"]) != options["size"]:
            raise UserError(f"size is {options['size']!r} and board_size {options['board_size']!r}: give one of them.")
        size = options.pop("size", options.get("board_size", SIZES[name]))
        if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= 19:
            raise UserError(f"size must be a whole number from 2 to 19, not {size!r}.")
        options["board_size"] = size
        if name == "go":
            komi = options.get("komi", KOMI)
            if isinstance(komi, bool) or not isinstance(komi, int | float) or not math.isfinite(komi):
                raise UserError(f"komi must be a finite number of points, not {komi!r}.")
            options["komi"] = float(komi)
    known = set(OPTIONS.get(name, ()))
    if rules == "native" or (rules == "auto" and name in NATIVE and set(options) <= known):
        if name not in NATIVE:
            raise UserError(f"There are no native rules for {name}, only for {', '.join(NATIVE)}. Use rules=openspiel.")
        if unknown := sorted(set(options) - known):
            raise UserError(
                f"The native rules of {name} have no option {', '.join(unknown)}; they take "
                f"{', '.join(['size', *sorted(known - {'board_size'})]) if known else 'none'}."
            )
        return Native(name, opponent, options)
    return Spiel(name, opponent, options)
