"""Alpha-beta search to a fixed depth: an opponent of fixed strength.

Leaves have a static evaluation: in k-in-a-row games by the lines that only one side can still complete, in Hex by the
stones that each side still needs, in Go by the area. In OpenSpiel's other games leaves have value 0.
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
from foresight.envs.games.openspiel import Spiel, State

WON = 1_000_000.0


@njit(cache=True, nogil=True)
def _lines(kind: int, height: int, width: int, line: int, row: Ints, stone: int) -> float:
    """The sum over all straight lines of `line` cells with stones of one side only: 4^stones for that side."""
    total = 0.0
    for direction in range(4):
        dr = 0 if direction == 0 else 1
        dc = 1 if direction < 2 else (0 if direction == 2 else -1)
        for r in range(height):
            for c in range(width):
                y, x = r + (line - 1) * dr, c + (line - 1) * dc
                if y >= height or x < 0 or x >= width:
                    continue
                mine, theirs = 0, 0
                for k in range(line):
                    found = row[(r + k * dr) * width + c + k * dc]
                    mine += found == stone
                    theirs += found != stone and found != 0
                if theirs == 0 and mine > 0:
                    total += 4.0**mine
                elif mine == 0 and theirs > 0:
                    total -= 4.0**theirs
    return total


@njit(cache=True, nogil=True)
def _missing(height: int, width: int, row: Ints, stone: int) -> int:
    """The fewest stones with which a side connects its edges in Hex; more than the number of cells if it cannot."""
    n = height * width
    best = np.full(n, 2 * n, np.int64)
    for cell in range(n):
        place = cell // width if stone == 1 else cell % width
        if place == 0 and (row[cell] == 0 or row[cell] == stone):
            best[cell] = 0 if row[cell] == stone else 1
    changed = True
    while changed:
        changed = False
        for cell in range(n):
            if best[cell] >= 2 * n:
                continue
            r, c = cell // width, cell % width
            for k in range(6):
                y, x = r + (-1, -1, 0, 0, 1, 1)[k], c + (0, 1, -1, 1, -1, 0)[k]
                if 0 <= y < height and 0 <= x < width:
                    to = y * width + x
                    if row[to] == 0 or row[to] == stone:
                        cost = best[cell] + (0 if row[to] == stone else 1)
                        if cost < best[to]:
                            best[to] = cost
                            changed = True
    least = 2 * n
    for cell in range(n):
        place, last = (cell // width, height - 1) if stone == 1 else (cell % width, width - 1)
        if place == last:
            least = min(least, best[cell])
    return least


@njit(cache=True, nogil=True)
def _evaluate(kind: int, height: int, width: int, line: int, komi: float, row: Ints) -> float:
    """The static evaluation of a position for the player to move."""
    stone = row[height * width + boards.TURN] + 1
    if kind == boards.HEX:
        return float(_missing(height, width, row, 3 - stone) - _missing(height, width, row, stone))
    if kind == boards.GO:
        return (boards.area(height, width, row) - komi) * (1.0 if stone == 1 else -1.0)
    return _lines(kind, height, width, line, row, stone)


@njit(cache=True, nogil=True)
def _negamax(
    kind: int, height: int, width: int, line: int, komi: float, rows: Ints, depth: int, floor: float, ceiling: float,
    order: NDArray[np.int64],
) -> float:  # fmt: skip
    """The value of position `rows[0]` for the player to move, between floor and ceiling; earlier wins are better.

    `rows` has space for the position of every ply. A loop, because recursive numba functions cannot be cached safely.
    """
    if depth == 0:
        return _evaluate(kind, height, width, line, komi, rows[0])
    n = height * width
    alpha, beta, best = np.empty(depth), np.empty(depth), np.empty(depth)
    tried = np.zeros(depth, np.int64)
    alpha[0], beta[0], best[0], ply = floor, ceiling, -math.inf, 0
    while True:
        action = -1
        while action < 0 and best[ply] < beta[ply] and tried[ply] < len(order):
            if boards.playable(kind, height, width, rows[ply], order[tried[ply]]):
                action = order[tried[ply]]
            tried[ply] += 1
        if action < 0:  # all moves tried: back up the value
            if ply == 0:
                return best[0]
            ply -= 1
            best[ply] = max(best[ply], -best[ply + 1])
            continue
        for k in range(rows.shape[1]):
            rows[ply + 1, k] = rows[ply, k]
        reward = boards.play(kind, height, width, line, komi, rows[ply + 1], action)
        if rows[ply + 1, n + boards.RESULT] != boards.PLAYING:
            best[ply] = max(best[ply], reward * (WON - ply))
        elif ply + 1 == depth:
            best[ply] = max(best[ply], -_evaluate(kind, height, width, line, komi, rows[ply + 1]))
        else:
            alpha[ply + 1], beta[ply + 1] = -beta[ply], -max(alpha[ply], best[ply])
            ply += 1
            best[ply], tried[ply] = -math.inf, 0


@njit(cache=True, nogil=True)
def _best(
    kind: int, height: int, width: int, line: int, komi: float, positions: Ints, depth: int,
    order: NDArray[np.int64], random: Stream, out: NDArray[np.int64],
) -> None:  # fmt: skip
    n = height * width
    rows = np.empty((depth + 1, positions.shape[1]), np.int32)
    for b in range(len(positions)):
        best, ties = -math.inf, 0
        for i in range(len(order)):
            if not boards.playable(kind, height, width, positions[b], order[i]):
                continue
            for k in range(rows.shape[1]):
                rows[0, k] = positions[b, k]
            reward = boards.play(kind, height, width, line, komi, rows[0], order[i])
            if rows[0, n + boards.RESULT] != boards.PLAYING:
                value = reward * (WON + 1)
            else:  # a window that starts just below the best value so far, so that ties are detected
                value = -_negamax(kind, height, width, line, komi, rows, depth - 1, -math.inf, -(best - 1e-6), order)
            if value > best + 1e-7:
                best, ties = value, 0
            if value >= best - 1e-7:
                ties += 1
                if boards.draw(random, ties) == 0:
                    out[b] = order[i]


def minimax(game: Game, position: Tensor, depth: int, random: NDArray[np.int64]) -> Tensor:
    """The best action of every position by alpha-beta to `depth` plies (at least 1), ties broken at random: `[B]`.

    No game may be over. `random` is a `playouts.stream`, updated in place.
    """
    if isinstance(game, Native):
        out = np.zeros(len(position), np.int64)
        order = np.argsort(np.abs(np.arange(game.actions) - (game.actions - 1) / 2), kind="stable")  # center first
        _best(*game.rules, position.numpy(), depth, order, random.view(np.uint64), out)
        return torch.from_numpy(out)
    assert isinstance(game, Spiel)
    return torch.tensor([_spiel_best(game.state(n), depth, random.view(np.uint64)) for n in position.tolist()])


def _spiel_best(state: State, depth: int, random: Stream) -> int:
    best, choice, ties = -math.inf, -1, 0
    for action in state.legal_actions():
        value = _spiel_value(state.child(action), depth - 1, best - 1e-6, math.inf, state.current_player())
        if value > best + 1e-7:
            best, ties = value, 0
        if value >= best - 1e-7:
            ties += 1
            if boards.draw(random, ties) == 0:
                choice = action
    return choice


def _spiel_value(state: State, depth: int, alpha: float, beta: float, player: int) -> float:
    """The value of `state` for `player`, who may not be the player to move."""
    if state.is_terminal():
        return float(state.returns()[player]) * (1 + depth)  # earlier wins are better
    if depth == 0:
        return 0.0
    ours = state.current_player() == player
    best = -math.inf if ours else math.inf
    for action in state.legal_actions():
        value = _spiel_value(state.child(action), depth - 1, alpha, beta, player)
        if ours:
            best, alpha = max(best, value), max(alpha, value)
        else:
            best, beta = min(best, value), min(beta, value)
        if alpha >= beta:
            break
    return best
