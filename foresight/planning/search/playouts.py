"""Random playouts, and Monte Carlo tree search with them: UCT, Kocsis & Szepesvári 2006.

For games with native rules both are compiled, one position after the other, on a row of integers changed in place.
OpenSpiel's games use OpenSpiel's own search, in C++.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from foresight.envs.games import boards
from foresight.envs.games.boards import Ints, Stream
from foresight.envs.games.game import Game
from foresight.envs.games.native import Native
from foresight.envs.games.openspiel import Spiel
from foresight.errors import UserError
from foresight.planning.search import memory

UCT_C = 2.0  # OpenSpiel's choice in its examples, for values in [-1, 1]
UNTRIED, ILLEGAL = -1, -2


@njit(cache=True, nogil=True)
def _finish(kind: int, height: int, width: int, line: int, komi: float, row: Ints, free: Ints, random: Stream) -> None:
    """Play `row` to its end with uniformly random moves. In Go no player fills an own eye, or passes while other
    moves remain.
    """
    n = height * width
    if kind == boards.DROP:
        while row[n + boards.RESULT] == boards.PLAYING:
            action = boards.draw(random, width)
            if row[n - width + action] == 0:
                boards.play(kind, height, width, line, komi, row, action)
        return
    count = 0
    for cell in range(n):
        if row[cell] == 0:
            free[count] = cell
            count += 1
    if kind == boards.GO:
        while row[n + boards.RESULT] == boards.PLAYING:
            # Captures free points, so the list of empty points is rebuilt every move.
            action, stone, left = n, row[n + boards.TURN] + 1, 0
            for cell in range(n):
                if row[cell] == 0:
                    free[left] = cell
                    left += 1
            while left > 0:
                at = boards.draw(random, left)
                cell = free[at]
                left -= 1
                free[at] = free[left]
                if not boards.own_eye(height, width, row, cell, stone) and boards.playable(
                    kind, height, width, row, cell
                ):
                    action = cell
                    break
            boards.play(kind, height, width, line, komi, row, action)
        return
    while row[n + boards.RESULT] == boards.PLAYING:
        at = boards.draw(random, count)
        cell = free[at]
        count -= 1
        free[at] = free[count]
        boards.play(kind, height, width, line, komi, row, cell)


@njit(cache=True, nogil=True)
def _first(n: int, row: Ints) -> float:
    """The result for the first player."""
    result = row[n + boards.RESULT]
    return 1.0 if result == boards.FIRST else (-1.0 if result == boards.SECOND else 0.0)


@njit(cache=True, nogil=True)
def _playouts(
    kind: int, height: int, width: int, line: int, komi: float, rows: Ints, count: int, random: Stream,
    out: NDArray[np.float64],
) -> None:  # fmt: skip
    n = height * width
    work, free = np.empty(rows.shape[1], np.int32), np.empty(n, np.int32)
    for b in range(len(rows)):
        total = 0.0
        for _ in range(count):
            for i in range(len(work)):
                work[i] = rows[b, i]
            _finish(kind, height, width, line, komi, work, free, random)
            total += _first(n, work)
        out[b] = total / count * (1.0 if rows[b, n + boards.TURN] == 0 else -1.0)


@njit(cache=True, nogil=True)
def _uct(
    kind: int, height: int, width: int, line: int, komi: float, root: Ints, simulations: int, c: float, random: Stream,
    counts: NDArray[np.int64], values: NDArray[np.float64],
) -> None:  # fmt: skip
    """Fill `counts` and `values` `[A]` of one position: visits, and mean results for the player to move."""
    n, actions = height * width, len(counts)
    children = np.empty((simulations + 1, actions), np.int32)
    visits, total = np.zeros(simulations + 1, np.int32), np.zeros(simulations + 1)
    mover = np.zeros(simulations + 1, np.int32)  # who moved into the node
    path, work, free = np.empty(simulations + 2, np.int32), np.empty(len(root), np.int32), np.empty(n, np.int32)
    for a in range(actions):
        children[0, a] = UNTRIED if boards.playable(kind, height, width, root, a) else ILLEGAL
    size = 1
    for _ in range(simulations):
        for i in range(len(work)):
            work[i] = root[i]
        node, depth = 0, 1
        path[0] = 0
        while work[n + boards.RESULT] == boards.PLAYING:
            best, choice, untried = -math.inf, ILLEGAL, 0
            log = math.log(max(visits[node], 1))
            for a in range(actions):
                child = children[node, a]
                if child == UNTRIED:
                    untried += 1
                    if boards.draw(random, untried) == 0:
                        choice = a
                elif child >= 0 and untried == 0:
                    score = total[child] / visits[child] + c * math.sqrt(log / visits[child])
                    if score > best:
                        best, choice = score, a
            turn = work[n + boards.TURN]
            boards.play(kind, height, width, line, komi, work, choice)
            fresh = untried > 0
            if fresh:
                children[node, choice] = size
                mover[size] = turn
                for a in range(actions):
                    children[size, a] = UNTRIED if boards.playable(kind, height, width, work, a) else ILLEGAL
                size += 1
            node = children[node, choice]
            path[depth] = node
            depth += 1
            if fresh:
                break
        _finish(kind, height, width, line, komi, work, free, random)
        result = _first(n, work)
        for i in range(depth):
            node = path[i]
            visits[node] += 1
            total[node] += result if mover[node] == 0 else -result
    for a in range(actions):
        child = children[0, a]
        counts[a] = visits[child] if child >= 0 else 0
        values[a] = total[child] / visits[child] if child >= 0 else 0.0


@njit(cache=True, nogil=True)
def _uct_all(
    kind: int, height: int, width: int, line: int, komi: float, rows: Ints, simulations: int, c: float, random: Stream,
    counts: NDArray[np.int64], values: NDArray[np.float64],
) -> None:  # fmt: skip
    for b in range(len(rows)):
        _uct(kind, height, width, line, komi, rows[b], simulations, c, random, counts[b], values[b])


def stream(seed: int) -> NDArray[np.int64]:
    """The random state of the compiled loops: int64 `[1]`, never 0."""
    return np.random.default_rng(seed).integers(1, 2**62, 1)


def playouts(game: Game, position: Tensor, count: int, random: NDArray[np.int64]) -> Tensor:
    """Mean result of `count` random games from every position, for the player to move: float32 `[B]` in [-1, 1].

    For a finished game it is the result. `random` is updated in place.
    """
    if isinstance(game, Native):
        out = np.empty(len(position))
        _playouts(*game.rules, position.numpy(), count, random.view(np.uint64), out)
        return torch.from_numpy(out).float()
    assert isinstance(game, Spiel)
    found = []
    for number in position.tolist():
        start = game.state(number)
        player, total = max(start.current_player(), 0), 0.0
        for _ in range(1 if start.is_terminal() else count):
            state = start.clone()
            while not state.is_terminal():
                legal = state.legal_actions()
                state.apply_action(legal[boards.draw(random.view(np.uint64), len(legal))])
            total += state.returns()[player]
        found.append(total / game.limit / (1 if start.is_terminal() else count))
    return torch.tensor(found, dtype=torch.float32)


def uct(
    game: Game, position: Tensor, simulations: int, random: NDArray[np.int64], c: float = UCT_C
) -> tuple[Tensor, Tensor]:
    """Search every position with random playouts: visits int64 `[B, A]` and mean values float32 `[B, A]`.

    Values are for the player to move, 0 for untried actions. `random` is updated in place. No game may be over.
    OpenSpiel's search also proves results: a proven loss counts as unvisited, and once the position itself is proven
    the best action gets all visits. Raises UserError for a tree that does not fit in memory.
    """
    require_room(game, simulations)
    counts = np.zeros((len(position), game.actions), np.int64)
    values = np.zeros((len(position), game.actions))
    if isinstance(game, Native):
        _uct_all(*game.rules, position.numpy(), simulations, c, random.view(np.uint64), counts, values)
    else:
        assert isinstance(game, Spiel)
        import pyspiel

        evaluator = pyspiel.RandomRolloutEvaluator(1, seed_of(random))
        # OpenSpiel's first simulation ends at the root: one more, so that all try an action.
        bot = pyspiel.MCTSBot(game.spiel, evaluator, c, simulations + 1, 1000, True, seed_of(random), False)
        for b, number in enumerate(position.tolist()):
            root = bot.mcts_search(game.state(number))
            lost = []
            for child in root.children:
                value = child.total_reward / max(child.explore_count, 1)
                if child.outcome:
                    value = child.outcome[child.player]
                    lost += [child.action] if value < 0 else []
                counts[b, child.action], values[b, child.action] = child.explore_count, value / game.limit
            if root.outcome:  # solved: the search stopped early
                counts[b] = 0
                counts[b, root.best_child().action] = simulations
            elif counts[b].sum() > counts[b, lost].sum():
                counts[b, lost] = 0
    return torch.from_numpy(counts), torch.from_numpy(values).float()


def require_room(game: Game, simulations: int, more: str = "") -> None:
    """Raise UserError if the tree of `uct` does not fit in memory; `more` is added to the message."""
    if isinstance(simulations, bool) or not isinstance(simulations, int):
        raise UserError(f"The number of simulations must be a whole number, not {simulations!r}{more}.")
    if isinstance(game, Native):  # OpenSpiel's search has its own limit
        memory.require(1, simulations, game.actions // 3 + 1, more=more)  # the children only


def seed_of(random: NDArray[np.int64]) -> int:
    """Draw a seed below 2³¹ from the stream."""
    return boards.draw(random.view(np.uint64), 2**31 - 1)
