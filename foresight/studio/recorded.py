"""What a static page shows of the views that compute: answers that are computed beforehand, of a bounded number.

The grid world step by step with its first settings; of agents that search, a game that they play against themselves,
or an episode, with searches of a few sizes at each position; of transformers, one text or one episode in every view.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foresight.errors import UserError
from foresight.studio import attention, grid, trees
from foresight.studio.attention import Readers
from foresight.studio.boards import BUNDLED, Players
from foresight.studio.decisions import Decisions

EVERY = 20  # steps of the grid world that are all kept
SHARE = 8  # then some, each an eighth later than the one before
EPISODES = 200  # of a sampled method
AGENTS = 6  # runs of which searches are kept, the newest; and of which attention is
POSITIONS = 8  # of a game, or steps of an episode
HALVINGS = 3  # of the number of simulations
NODES = 60  # of a tree
DIGITS = 5  # after the decimal point
TEXT = "When Mary and John went to the store, John gave a drink to"


def worlds() -> Iterator[tuple[str, Any]]:
    """`grids`, with the `recorded` steps of each method, and a document of each method, `steps` by their number."""
    found = {}
    for method in grid.METHODS:
        steps, model, step = {}, None, 0
        while True:
            state = grid.solve(grid.Request(method=method, step=step))
            model = state.pop("model")
            steps[str(state["step"])] = state
            if state["done"] or step >= (EPISODES if method in grid.SAMPLED else grid.MOST_STEPS):
                break
            step += max(1, step // SHARE) if step >= EVERY else 1
        found[method] = [int(name) for name in steps]
        yield f"grid/{method}", rounded({"model": model, "steps": steps})
    yield "grids", {**grid.choices(), "recorded": found}


def searches(players: Players, decisions: Decisions) -> Iterator[tuple[str, Any]]:
    """`players`, those whose searches are kept, and a document of each: `counts` of simulations, and `positions`.

    A position is what the page shows of it, with `analyses` by the number of simulations.
    """
    kept, runs = [], 0
    for one in [*players.names(), *decisions.names()]:
        if one["id"] != BUNDLED and (one["id"].startswith("mcts-") or runs == AGENTS):
            continue
        counts = sorted({max(one["least"], one["simulations"] >> k, 1) for k in range(HALVINGS + 1)})
        try:
            positions = list(_episode(decisions, one, counts) if one.get("episode") else _game(players, one, counts))
        except UserError:
            continue  # no checkpoint yet, or one that is gone
        runs += one["id"] != BUNDLED
        kept.append(one)
        yield f"search/{one['id']}", rounded({"counts": counts, "positions": positions})
    yield "players", kept


def _game(players: Players, player: dict[str, Any], counts: list[int]) -> Iterator[dict[str, Any]]:
    """The positions of the game that a player plays against itself, with the largest number of simulations."""
    moves: list[int] = []
    for _ in range(POSITIONS):
        analyses = {}
        for count in counts:
            board = players.look({"player": player["id"], "moves": moves, "simulations": count})
            if board["over"]:
                yield {**board, "analyses": {}}
                return
            analyses[str(count)] = _small(board.pop("analysis"))
        yield {**board, "analyses": analyses}
        moves = [*moves, analyses[str(counts[-1])]["action"]]


def _episode(decisions: Decisions, run: dict[str, Any], counts: list[int]) -> Iterator[dict[str, Any]]:
    for step in range(POSITIONS):
        analyses = {}
        for count in counts:
            seen = decisions.look({"player": run["id"], "step": step, "simulations": count})
            if seen["step"] < step:
                return
            found = seen.pop("analysis")
            if found is not None:
                analyses[str(count)] = _small(found)
        yield {**seen, "analyses": analyses}


def _small(analysis: dict[str, Any]) -> dict[str, Any]:
    if analysis["tree"] is not None:
        trees.prune(analysis["tree"], NODES)
    return analysis


def looks(readers: Readers) -> Iterator[tuple[str, Any]]:
    """`readers`, those whose attention is kept, and a document of each: what they read, and the layers by view."""
    kept = []
    for i, one in enumerate(readers.names()[: AGENTS + 1]):
        asked = {"source": one["id"], **({"text": TEXT} if one["text"] else {})}
        try:
            views = {}
            first = readers.read({**asked, "view": "mean", "without_first": False})
            names = [*first["views"], *(str(head) for head in range(min(first["heads"])))]
            for view in names:
                for without_first in (False, True):
                    found = readers.read({**asked, "view": view, "without_first": without_first})
                    views[f"{view}/{int(without_first)}"] = {
                        name: found[name] for name in ("view", "layers", "heats") if name in found
                    }
        except UserError:
            continue  # no model here, no checkpoint yet, or a text that is too long for it
        name = f"network-{i}"  # the id of a language model may be a path
        kept.append({**one, "id": name, **({"read": TEXT} if one["text"] else {"steps": attention.STEPS, "seed": 0})})
        yield f"attention/{name}", rounded({"pass": first, "views": views})
    yield "readers", kept


def rounded(value: Any) -> Any:
    """A document whose numbers have `DIGITS` decimals: the page shows at most four."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value
