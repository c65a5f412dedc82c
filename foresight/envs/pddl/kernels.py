"""Compiled successor generation on bits: one bit per atom in rows of uint64.

A state looks only at the actions that one of its true atoms watches (`ground.Arrays.watch`), as in the successor
generators of Fast Downward (Helmert 2006), with one level instead of a tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foresight.envs.pddl.ground import Arrays

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Words = NDArray[np.uint64]
EMPTY = -1


@njit(cache=True, nogil=True)
def has(state: Words, atom: int) -> bool:
    """Whether the bit of `atom` is set in `state` `[W]`."""
    return (state[atom >> 6] >> np.uint64(atom & 63)) & np.uint64(1) != np.uint64(0)


@njit(cache=True, nogil=True)
def put(state: Words, out: Words) -> None:
    """Copy a state (a loop: numba compiles slices slowly)."""
    for w in range(len(state)):
        out[w] = state[w]


@njit(cache=True, nogil=True)
def can(state: Words, action: int, task: Arrays) -> bool:
    """Whether all preconditions of `action` hold in `state`."""
    for k in range(task.positive_start[action], task.positive_start[action + 1]):
        if not has(state, task.positive[k]):
            return False
    for k in range(task.negative_start[action], task.negative_start[action + 1]):
        if has(state, task.negative[k]):
            return False
    return True


@njit(cache=True, nogil=True)
def applicable(state: Words, task: Arrays, out: Ints) -> int:
    """Write the applicable actions to `out` `[A]`, ascending within each watching atom; returns their number."""
    count = 0
    for k in range(len(task.always)):
        if can(state, task.always[k], task):
            out[count] = task.always[k]
            count += 1
    for w in range(len(state)):
        word = state[w]
        atom = w << 6
        while word != np.uint64(0):
            if word & np.uint64(1):
                for k in range(task.watch_start[atom], task.watch_start[atom + 1]):
                    if can(state, task.watch[k], task):
                        out[count] = task.watch[k]
                        count += 1
            word >>= np.uint64(1)
            atom += 1
    return count


@njit(cache=True, nogil=True)
def apply(state: Words, action: int, task: Arrays, out: Words) -> None:
    """Write the state after `action` to `out` `[W]`."""
    put(state, out)
    for k in range(task.delete_start[action], task.delete_start[action + 1]):
        atom = task.delete[k]
        out[atom >> 6] &= ~(np.uint64(1) << np.uint64(atom & 63))
    for k in range(task.add_start[action], task.add_start[action + 1]):
        atom = task.add[k]
        out[atom >> 6] |= np.uint64(1) << np.uint64(atom & 63)


@njit(cache=True, nogil=True)
def reached(state: Words, task: Arrays) -> bool:
    """Whether the goal holds."""
    for k in range(len(task.goal)):
        if not has(state, task.goal[k]):
            return False
    for k in range(len(task.goal_negative)):  # noqa: SIM110
        if has(state, task.goal_negative[k]):
            return False
    return True


@njit(cache=True, nogil=True)
def slot_of(state: Words, states: Words, table: Ints) -> int:
    """The slot in the hash `table` (a power of two) of `state`: the one that holds its row, or an empty one."""
    h = np.uint64(1469598103934665603)
    for w in range(len(state)):
        h = (h ^ state[w]) * np.uint64(0x9E3779B97F4A7C15)
        h ^= h >> np.uint64(29)
    mask = len(table) - 1
    slot: Any = np.int64(h & np.uint64(mask))
    while table[slot] != EMPTY:
        row = table[slot]
        same = True
        for w in range(len(state)):
            if states[row, w] != state[w]:
                same = False
                break
        if same:
            return slot
        slot = (slot + 1) & mask
    return slot


@njit(cache=True, nogil=True)
def wider(rows: NDArray[Any], count: int) -> NDArray[Any]:
    """Room for twice as many rows."""
    more = np.zeros((2 * rows.shape[0], rows.shape[1]), rows.dtype)
    for i in range(count):
        for j in range(rows.shape[1]):
            more[i, j] = rows[i, j]
    return more


@njit(cache=True, nogil=True)
def rehashed(states: Words, count: int, size: int) -> Ints:
    """A hash table of this size for the first rows of `states`."""
    table = np.full(size, EMPTY, np.int32)
    for row in range(count):
        table[slot_of(states[row], states, table)] = row
    return table


@njit(cache=True, nogil=True)
def enumerate_states(init: Words, task: Arrays, actions: int, most: int) -> tuple[int, Words, Ints]:
    """All states reachable from `init` in breadth-first order, at most `most`.

    Returns their number (more than `most` if there are more), the states `[n, W]`, and the transitions `[m, 3]`: state,
    action, next state. States where the goal holds are not left.
    """
    states = np.zeros((1024, len(init)), np.uint64)
    put(init, states[0])
    table = rehashed(states, 1, 4096)
    count, done, written = 1, 0, 0
    moves = np.zeros((4096, 3), np.int32)
    out = np.zeros(max(1, actions), np.int32)
    after = np.zeros(len(init), np.uint64)
    while done < count and count <= most:
        here = states[done]
        number = 0 if reached(here, task) else applicable(here, task, out)
        for k in range(number):
            apply(here, out[k], task, after)
            slot = slot_of(after, states, table)
            row = table[slot]
            if row == EMPTY:
                if count == states.shape[0]:
                    states = wider(states, count)
                    table = rehashed(states, count, 2 * len(table))
                    slot = slot_of(after, states, table)
                row = count
                put(after, states[row])
                table[slot] = row
                count += 1
            if written == moves.shape[0]:
                moves = wider(moves, written)
            moves[written, 0], moves[written, 1], moves[written, 2] = done, out[k], row
            written += 1
        done += 1
    return count, states[:count], moves[:written]


@njit(cache=True, nogil=True)
def walk(init: Words, task: Arrays, actions: int, steps: int, seed: int) -> Words:
    """The states `[steps + 1, W]` of a random walk from `init`; it stays where nothing is applicable."""
    np.random.seed(seed)
    states = np.zeros((steps + 1, len(init)), np.uint64)
    put(init, states[0])
    out = np.zeros(max(1, actions), np.int32)
    for t in range(steps):
        count = applicable(states[t], task, out)
        if count:
            apply(states[t], out[np.random.randint(count)], task, states[t + 1])
        else:
            put(states[t], states[t + 1])
    return states
