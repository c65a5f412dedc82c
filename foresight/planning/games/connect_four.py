"""An exact Connect Four solver: alpha-beta over bitboards with a transposition table.

A column has seven bits, six cells and an empty one above them, so that lines are found by shifts. `stones` has the
cells of the player to move, `mask` all occupied cells; mask + stones is unique for every position. The method is that
of Tromp (1995) and Pons ("Solving Connect 4"): only moves that do not lose immediately, moves with the most threats
first, and null-window searches. Values are signs: 1 won, 0 drawn, -1 lost for the player to move.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import int64, njit, uint8
from numpy.typing import NDArray
from torch import Tensor

from foresight.envs.games import boards
from foresight.envs.games.game import Game
from foresight.envs.games.native import Native
from foresight.errors import UserError

WIDTH, HEIGHT = 7, 6
COLUMN = (1 << HEIGHT) - 1
BOTTOM = sum(1 << (7 * c) for c in range(WIDTH))
BOARD = BOTTOM * COLUMN
TABLE = (1 << 22) + 15  # odd, so that keys spread over it
CENTER_FIRST = (3, 2, 4, 1, 5, 0, 6)
Longs = NDArray[np.int64]


@njit(int64(int64), cache=True, nogil=True)
def _count(x: int) -> int:
    """The number of bits set."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56) & 0xFF


@njit(int64(int64, int64), cache=True, nogil=True)
def _threats(stones: int, mask: int) -> int:
    """The empty cells, playable now or not, that would complete four of `stones` in a line."""
    found = (stones << 1) & (stones << 2) & (stones << 3)  # upwards
    for k in range(3):
        shift = (7, 6, 8)[k]  # sideways, and the two diagonals
        pair = (stones << shift) & (stones << (2 * shift))
        found |= pair & (stones << (3 * shift))
        found |= pair & (stones >> shift)
        pair = (stones >> shift) & (stones >> (2 * shift))
        found |= pair & (stones << shift)
        found |= pair & (stones >> (3 * shift))
    return found & (BOARD ^ mask)


@njit(int64(int64, int64, int64, int64, int64, int64[:], uint8[:], int64[:, :, :]), cache=True, nogil=True)
def _solve(
    stones: int, mask: int, moves: int, alpha: int, beta: int, keys: Longs, values: NDArray[np.uint8], order: Longs
) -> int:
    """Negamax over signs, for positions without an immediate win. `order` has space for the moves of every ply."""
    order[-1, 0, 0] += 1  # the number of positions searched
    playable = (mask + BOTTOM) & BOARD
    theirs = _threats(mask ^ stones, mask)
    forced = playable & theirs
    if forced:
        if forced & (forced - 1):
            return -1  # two threats to block
        playable = forced
    playable &= ~(theirs >> 1)  # not below a winning cell of the opponent
    if playable == 0:
        return -1
    if moves >= WIDTH * HEIGHT - 2:
        return 0
    key = mask + stones
    at = key % TABLE
    if keys[at] == key:
        upper, lower = int64(values[at] & 3) - 1, int64(values[at] >> 2) - 1
        alpha, beta = max(alpha, lower), min(beta, upper)
        if alpha >= beta:
            return lower if lower >= beta else upper
    else:
        upper, lower = 1, -1
    chosen, scores, count = order[moves, 0], order[moves, 1], 0
    for i in range(7):
        move = playable & (COLUMN << (7 * CENTER_FIRST[i]))
        if move:
            score = _count(_threats(stones | move, mask | move))
            place = count
            while place > 0 and scores[place - 1] < score:
                scores[place], chosen[place] = scores[place - 1], chosen[place - 1]
                place -= 1
            scores[place], chosen[place] = score, move
            count += 1
    best, floor = -1, alpha
    for i in range(count):
        move = chosen[i]
        value = -_solve(mask ^ stones, mask | move, moves + 1, -beta, -floor, keys, values, order)
        best = max(best, value)
        floor = max(floor, value)
        if floor >= beta:
            break
    if best > alpha:
        lower = max(lower, best)
    if best < beta:
        upper = min(upper, best)
    keys[at], values[at] = key, uint8((upper + 1) | ((lower + 1) << 2))  # two bits per bound
    return best


@njit(cache=True, nogil=True)
def _value(stones: int, mask: int, moves: int, keys: Longs, values: NDArray[np.uint8], order: Longs) -> int:
    """The sign of any unfinished position."""
    if _threats(stones, mask) & ((mask + BOTTOM) & BOARD):
        return 1
    if moves >= WIDTH * HEIGHT - 1:
        return 0
    return _solve(stones, mask, moves, -1, 1, keys, values, order)


@njit(cache=True, nogil=True)
def _moves(rows: boards.Ints, out: Longs, keys: Longs, values: NDArray[np.uint8], order: Longs) -> None:
    """The value of every move in every position (a row) for the player who makes it; -2 if illegal."""
    cells = WIDTH * HEIGHT
    for b in range(len(rows)):
        stones, mask = int64(0), int64(0)
        for cell in range(cells):
            if rows[b, cell] != 0:
                bit = int64(1) << (7 * (cell % WIDTH) + cell // WIDTH)
                mask |= bit
                if rows[b, cell] == rows[b, cells + boards.TURN] + 1:
                    stones |= bit
        moves = rows[b, cells + boards.MOVES]
        playable, wins = (mask + BOTTOM) & BOARD, _threats(stones, mask)
        for c in range(WIDTH):
            move = playable & (COLUMN << (7 * c))
            if move == 0 or rows[b, cells + boards.RESULT] != boards.PLAYING:
                out[b, c] = -2
            elif move & wins:
                out[b, c] = 1
            elif moves == cells - 1:
                out[b, c] = 0
            else:
                out[b, c] = -_value(mask ^ stones, mask | move, moves + 1, keys, values, order)


class Solver:
    """The solver and its transposition table (38 MB), kept between calls: the positions of a game share most work."""

    def __init__(self) -> None:
        self.keys, self.values = np.zeros(TABLE, np.int64), np.zeros(TABLE, np.uint8)
        self.order = np.zeros((WIDTH * HEIGHT + 1, 2, WIDTH), np.int64)

    def moves(self, position: Tensor) -> Tensor:
        """The sign of every move of every position `[B]`, int64 `[B, 7]`; -2 if illegal."""
        out = np.empty((len(position), WIDTH), np.int64)
        _moves(position.numpy(), out, self.keys, self.values, self.order)
        return torch.from_numpy(out)


def check(game: Game) -> None:
    """Raise UserError if `game` is not Connect Four with native rules."""
    if not isinstance(game, Native) or game.name != "connect_four":
        raise UserError(f"The solver plays only Connect Four, not {game.title}: use minimax:DEPTH or mcts:SIMULATIONS.")


_SHARED: list[Solver] = []


def solver() -> Solver:
    """The Solver of this process, created once."""
    if not _SHARED:
        _SHARED.append(Solver())
    return _SHARED[0]


def best(position: Tensor, random: NDArray[np.int64]) -> Tensor:
    """A move of the highest value for every position, int64 `[B]`, ties broken at random."""
    values, stream = solver().moves(position), random.view(np.uint64)
    rows = [(row == row.max()).nonzero().flatten().tolist() for row in values]
    return torch.tensor([row[boards.draw(stream, len(row))] for row in rows])


def mistakes(position: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each action is a mistake, bool `[B]`, and its loss of value: 1, or 2 (won to lost), int64 `[B]`."""
    values = solver().moves(position)
    lost = values.amax(-1) - values.gather(1, action.unsqueeze(1)).squeeze(1)
    return lost > 0, lost
