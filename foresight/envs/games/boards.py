"""The rules of tic-tac-toe, Connect Four, Hex and Go as compiled loops over integer arrays.

A position is one row of int32: the cells, row by row from the edge that OpenSpiel counts from (0 empty, 1 the first
player's, 2 the second's), then the five fields named below, and for Go the hashes of all positions so far. So a batch
of positions is one array `[B, W]`, which a search tree stores and gathers like any other tensor, and playouts,
alpha-beta and self-play run on it without leaving compiled code.

All games share these functions: `kind` is the game, `height`, `width` and `line` (stones in a row that win) its size.
`tests/envs/games/test_native.py` holds them equal to OpenSpiel's on random games.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

LINE, DROP, HEX, GO = 0, 1, 2, 3  # kinds: stones in a row; the same with gravity; connection; territory
TURN, RESULT, MOVES, KO, PASSES = 0, 1, 2, 3, 4  # fields after the cells; TURN is 0 or 1
EXTRA = 5
PLAYING, FIRST, SECOND, DRAW = 0, 1, 2, 3  # of RESULT
OFF = -1  # no such point
Ints = NDArray[np.int32]
Stream = NDArray[np.uint64]  # of random numbers, `[1]`: see `draw`


def width_of(kind: int, height: int, width: int) -> int:
    """The length of a row: cells, fields, and for Go two halves of a hash for every position."""
    return height * width + EXTRA + (2 * (2 * height * width + 1) if kind == GO else 0)


def actions_of(kind: int, height: int, width: int) -> int:
    """Columns with gravity, cells without; Go has a pass after them."""
    return width if kind == DROP else height * width + (kind == GO)


@njit(cache=True, nogil=True)
def draw(random: Stream, count: int) -> int:
    """A number below `count`. `random` is uint64 `[1]`, not 0: xorshift64* of Vigna 2016 (arXiv:1402.6246)."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    high = (x * np.uint64(2685821657736338717)) >> np.uint64(33)
    return np.int64(high) % np.int64(count)  # type: ignore[return-value]  # (uint64 and int64 would make a float)


@njit(cache=True, nogil=True)
def playable(kind: int, height: int, width: int, row: Ints, action: int) -> bool:
    """Whether `action` is legal in a game that is not over."""
    n = height * width
    if row[n + RESULT] != PLAYING or action < 0:
        return False
    if kind == DROP:
        return action < width and row[(height - 1) * width + action] == 0
    if kind == GO:
        return action == n or (action < n and _go_legal(height, width, row, action))
    return action < n and row[action] == 0


@njit(cache=True, nogil=True)
def play(kind: int, height: int, width: int, line: int, komi: float, row: Ints, action: int) -> float:
    """Change `row` by a legal action; returns the reward of the player who took it (1, 0 or, in Go, -1)."""
    n = height * width
    turn = row[n + TURN]
    stone = turn + 1
    if kind == GO:
        return _go_play(height, width, komi, row, action)
    cell = action
    if kind == DROP:
        while row[cell] != 0:
            cell += width
    row[cell] = stone
    row[n + TURN] = 1 - turn
    row[n + MOVES] += 1
    won = _connects(height, width, row, cell) if kind == HEX else _in_a_row(height, width, line, row, cell)
    if won:
        row[n + RESULT] = FIRST + turn
        return 1.0
    if row[n + MOVES] == n:
        row[n + RESULT] = DRAW
    return 0.0


@njit(cache=True, nogil=True)
def _in_a_row(height: int, width: int, line: int, row: Ints, cell: int) -> bool:
    stone, r, c = row[cell], cell // width, cell % width
    for direction in range(4):
        dr = 0 if direction == 0 else 1
        dc = 1 if direction < 2 else (0 if direction == 2 else -1)
        count = 1
        for sign in (1, -1):
            y, x = r + sign * dr, c + sign * dc
            while 0 <= y < height and 0 <= x < width and row[y * width + x] == stone:
                count += 1
                y += sign * dr
                x += sign * dc
        if count >= line:
            return True
    return False


@njit(cache=True, nogil=True)
def _walk(points: int, cell: int) -> tuple[NDArray[np.uint8], Ints]:
    """The start of a flood fill over a chain: which points were visited, and a stack that holds `cell`."""
    seen, stack = np.zeros(points, np.uint8), np.empty(points, np.int32)
    stack[0], seen[cell] = cell, 1
    return seen, stack


@njit(cache=True, nogil=True)
def _connects(height: int, width: int, row: Ints, cell: int) -> bool:
    """Whether the chain of `cell` joins the first player's edges (first and last row), or the second's (columns)."""
    stone = row[cell]
    seen, stack = _walk(height * width, cell)
    size = 1
    low, high = False, False
    while size > 0:
        size -= 1
        at = stack[size]
        r, c = at // width, at % width
        place, last = (r, height - 1) if stone == 1 else (c, width - 1)
        low |= place == 0
        high |= place == last
        if low and high:
            return True
        for k in range(6):
            dr = (-1, -1, 0, 0, 1, 1)[k]
            dc = (0, 1, -1, 1, -1, 0)[k]
            y, x = r + dr, c + dc
            if 0 <= y < height and 0 <= x < width:
                to = y * width + x
                if row[to] == stone and seen[to] == 0:
                    seen[to] = 1
                    stack[size] = to
                    size += 1
    return False


@njit(cache=True, nogil=True)
def neighbor(height: int, width: int, cell: int, k: int) -> int:
    """The k-th of the four points beside `cell`, or OFF."""
    r, c = cell // width, cell % width
    if k == 0:
        return cell - width if r > 0 else OFF
    if k == 1:
        return cell + width if r < height - 1 else OFF
    if k == 2:
        return cell - 1 if c > 0 else OFF
    return cell + 1 if c < width - 1 else OFF


@njit(cache=True, nogil=True)
def _free(height: int, width: int, row: Ints, cell: int, besides: int) -> bool:
    """Whether the chain of `cell` has a liberty other than the point `besides`."""
    stone = row[cell]
    seen, stack = _walk(height * width, cell)
    size = 1
    while size > 0:
        size -= 1
        at = stack[size]
        for k in range(4):
            to = neighbor(height, width, at, k)
            if to == OFF or seen[to]:
                continue
            if row[to] == 0 and to != besides:
                return True
            if row[to] == stone:
                seen[to] = 1
                stack[size] = to
                size += 1
    return False


@njit(cache=True, nogil=True)
def _go_legal(height: int, width: int, row: Ints, cell: int) -> bool:
    """No occupied point, no immediate retaking of a ko, no suicide (as OpenSpiel's Go)."""
    n = height * width
    if row[cell] != 0 or row[n + KO] == cell + 1:
        return False
    stone = row[n + TURN] + 1
    for k in range(4):
        to = neighbor(height, width, cell, k)
        if to == OFF:
            continue
        if row[to] == 0:
            return True
        if (row[to] == stone) == _free(height, width, row, to, cell):
            return True  # joins a chain that lives, or takes one that does not
    return False


@njit(cache=True, nogil=True)
def _mix(x: np.uint64) -> np.uint64:
    """splitmix64: the hash of a stone on a point."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _remove(height: int, width: int, row: Ints, cell: int) -> int:
    """Take the chain of `cell` off the board; returns how many stones it had."""
    stone = row[cell]
    stack = np.empty(height * width, np.int32)
    stack[0], size, count = cell, 1, 0
    row[cell] = 0
    while size > 0:
        size -= 1
        at = stack[size]
        count += 1
        for k in range(4):
            to = neighbor(height, width, at, k)
            if to != OFF and row[to] == stone:
                row[to] = 0
                stack[size] = to
                size += 1
    return count


@njit(cache=True, nogil=True)
def _go_play(height: int, width: int, komi: float, row: Ints, action: int) -> float:
    n = height * width
    turn = row[n + TURN]
    stone, other = turn + 1, 2 - turn
    over = False
    row[n + KO] = 0
    if action == n:
        row[n + PASSES] += 1
        over = row[n + PASSES] == 2
    else:
        row[n + PASSES] = 0
        eye = True  # all around are the other's stones
        for k in range(4):
            to = neighbor(height, width, action, k)
            if to != OFF and row[to] != other:
                eye = False
        row[action] = stone
        taken, last = 0, OFF
        for k in range(4):
            to = neighbor(height, width, action, k)
            if to != OFF and row[to] == other and not _free(height, width, row, to, OFF):
                taken += _remove(height, width, row, to)
                last = to
        if eye and taken == 1:
            row[n + KO] = last + 1
    row[n + TURN] = 1 - turn
    row[n + MOVES] += 1
    moves = row[n + MOVES]
    repeated = _remember(n, row) and action != n
    if not (over or repeated or moves >= 2 * n):
        return 0.0
    score = 0.0 if repeated else area(height, width, row) - komi
    if score == 0.0:
        row[n + RESULT] = DRAW
        return 0.0
    row[n + RESULT] = FIRST if score > 0 else SECOND
    return 1.0 if (score > 0) == (turn == 0) else -1.0


@njit(cache=True, nogil=True)
def _remember(n: int, row: Ints) -> bool:
    """Append the position's hash to the earlier ones; returns whether it was among them."""
    key = np.uint64(0)
    for cell in range(n):
        if row[cell] != 0:
            key ^= _mix(np.uint64(2 * cell + row[cell]))
    low = np.int32(np.int64(key & np.uint64(0x7FFFFFFF)))
    high = np.int32(np.int64((key >> np.uint64(32)) & np.uint64(0x7FFFFFFF)))
    start, moves = n + EXTRA, row[n + MOVES]
    found = low == 0 and high == 0  # the empty board is the position before the first move
    for i in range(moves - 1):
        found |= row[start + 2 * i] == low and row[start + 2 * i + 1] == high
    row[start + 2 * (moves - 1)] = low
    row[start + 2 * (moves - 1) + 1] = high
    return found


@njit(cache=True, nogil=True)
def area(height: int, width: int, row: Ints) -> float:
    """Tromp-Taylor: stones and the empty regions that only one color touches, first player's minus second's."""
    n = height * width
    seen = np.zeros(n, np.uint8)
    stack = np.empty(n, np.int32)
    score = 0.0
    for cell in range(n):
        if row[cell] != 0:
            score += 1.0 if row[cell] == 1 else -1.0
        elif seen[cell] == 0:
            stack[0], size, seen[cell] = cell, 1, 1
            count, touched = 0, 0
            while size > 0:
                size -= 1
                at = stack[size]
                count += 1
                for k in range(4):
                    to = neighbor(height, width, at, k)
                    if to == OFF:
                        continue
                    if row[to] != 0:
                        touched |= row[to]
                    elif seen[to] == 0:
                        seen[to] = 1
                        stack[size] = to
                        size += 1
            if touched == 1:
                score += count
            elif touched == 2:
                score -= count
    return score


@njit(cache=True, nogil=True)
def own_eye(height: int, width: int, row: Ints, cell: int, stone: int) -> bool:
    """Whether all four points beside an empty one are `stone`'s: rollouts of Go do not fill it."""
    for k in range(4):
        to = neighbor(height, width, cell, k)
        if to != OFF and row[to] != stone:
            return False
    return True


@njit(cache=True, nogil=True)
def step_all(
    kind: int, height: int, width: int, line: int, komi: float, rows: Ints, actions: NDArray[np.int64],
    out: Ints, rewards: NDArray[np.float32], over: NDArray[np.bool_],
) -> None:  # fmt: skip
    """`play` in every row of `rows` `[B, W]` into `out`. A game that is over, or an illegal action, changes nothing."""
    n = height * width
    for b in range(len(rows)):
        for i in range(rows.shape[1]):  # (a slice would take longer to compile than everything else)
            out[b, i] = rows[b, i]
        rewards[b] = 0.0
        if playable(kind, height, width, out[b], actions[b]):
            rewards[b] = play(kind, height, width, line, komi, out[b], actions[b])
        over[b] = out[b, n + RESULT] != PLAYING


@njit(cache=True, nogil=True)
def legal_all(kind: int, height: int, width: int, rows: Ints, out: NDArray[np.bool_]) -> None:
    """Which actions are legal: bool `[B, A]`; none where the game is over."""
    for b in range(len(rows)):
        for action in range(out.shape[1]):
            out[b, action] = playable(kind, height, width, rows[b], action)


@njit(cache=True, nogil=True)
def planes_all(height: int, width: int, rows: Ints, out: NDArray[np.uint8]) -> None:
    """The planes for the player to move, `[B, 3, H, W]`: own stones, the opponent's, and ones for the first player."""
    n = height * width
    for b in range(len(rows)):
        turn = rows[b, n + TURN]
        for cell in range(n):
            stone = rows[b, cell]
            r, c = cell // width, cell % width
            out[b, 0, r, c] = 1 if stone == turn + 1 else 0
            out[b, 1, r, c] = 1 if stone == 2 - turn else 0
            out[b, 2, r, c] = 1 - turn
