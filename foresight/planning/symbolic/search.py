"""Forward search in a grounded problem: breadth-first, A* (Hart, Nilsson & Raphael 1968) and greedy best-first.

One loop, `_expand`, expands the open state with the least  w_g · g + w_h · h, the oldest first among equals:

- breadth-first: w_g = 1, no heuristic;       - A*: w_g = w_h = 1; with h_max its plan is a shortest one;
- greedy best-first: w_g = 0, w_h = 1.

A state that is reached again by a shorter way is opened again.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numba import njit

from foresight.envs.pddl import kernels
from foresight.envs.pddl.ground import Grounded
from foresight.errors import UserError, unknown
from foresight.planning.symbolic import heuristics
from foresight.planning.symbolic.found import Found
from foresight.planning.symbolic.open_list import pop, push

BATCH = 2000  # expansions between looks at the clock
SOLVED, OPEN, EXHAUSTED, FULL = range(4)


@njit(cache=True, nogil=True)
def _expand(heuristic: int, weights: tuple[float, float], args: Any) -> Any:
    """Expand up to `batch` states; returns the status, the row of the goal, and the memory, which may have grown.

    `counts`: entries of the open list, states, entries ever, expanded and generated states.
    """
    (task, s, actions, batch, most, counts, states, table, nodes, h, keys, items) = args
    out = np.zeros(max(1, actions), np.int32)
    after = np.zeros(states.shape[1], np.uint64)
    status, goal, limit = OPEN, -1, counts[3] + batch
    while counts[3] < limit:
        if counts[0] == 0:
            status = EXHAUSTED
            break
        pop(keys, items, counts[0])
        counts[0] -= 1
        row = items[counts[0], 1]
        if items[counts[0], 2] != nodes[row, 0]:  # it was reached by a shorter way since
            continue
        here = states[row]
        if kernels.reached(here, task):
            status, goal = SOLVED, row
            break
        counts[3] += 1
        number = kernels.applicable(here, task, out)
        counts[4] += number
        for k in range(number):
            kernels.apply(here, out[k], task, after)
            slot = kernels.slot_of(after, states, table)
            new = table[slot]
            if new == kernels.EMPTY:
                new = counts[1]
                if new == states.shape[0]:
                    states, nodes, h = kernels.wider(states, new), kernels.wider(nodes, new), kernels.wider(h, new)
                    table = kernels.rehashed(states, new, 2 * len(table))
                    slot = kernels.slot_of(after, states, table)
                kernels.put(after, states[new])
                table[slot] = new
                # `blind` makes no call: to pass so many arrays takes time
                if heuristic != heuristics.BLIND:
                    h[new, 0] = heuristics.estimate(heuristic, after, task, s)
                counts[1] += 1
            elif nodes[new, 0] <= nodes[row, 0] + 1:
                continue
            nodes[new, 0], nodes[new, 1], nodes[new, 2] = nodes[row, 0] + 1, row, out[k]
            if h[new, 0] < heuristics.INFINITE:
                f = weights[0] * nodes[new, 0] + weights[1] * h[new, 0]
                keys, items = push(keys, items, counts[0], f, counts[2], new, nodes[new, 0])
                counts[0] += 1
                counts[2] += 1
        if counts[1] >= most:
            status = FULL
            break
    return status, goal, (counts, states, table, nodes, h, keys, items)


SEARCHES = {"bfs": (1.0, 0.0), "astar": (1.0, 1.0), "gbfs": (0.0, 1.0)}  # (w_g, w_h)


def search(
    task: Grounded, method: str = "gbfs", heuristic: str = "hff", seconds: float = 30.0, max_states: int = 5_000_000
) -> Found:
    """Search for a plan of at most `seconds` and `max_states`. Raises UserError for unknown names and bad limits."""
    if method not in SEARCHES:
        raise unknown("search", method, SEARCHES)
    if heuristic not in heuristics.NAMES:
        raise unknown("heuristic", heuristic, heuristics.NAMES)
    if not seconds > 0 or max_states < 1:
        raise UserError(f"A search needs seconds above 0 and max_states of at least 1, not {seconds} and {max_states}.")
    if not task.possible:
        return Found(None, "unsolvable", 0, 0, 0.0)
    kind = heuristics.NAMES.index("blind" if method == "bfs" else heuristic)
    memory: Any = _begin(task, kind)
    scratch = heuristics.scratch(len(task.atoms), len(task.actions))
    weights, fixed = SEARCHES[method], (task.arrays, scratch, len(task.actions))
    # Nothing is expanded here: the first call compiles, which is not a part of the search.
    status, goal, memory = _expand(kind, weights, (*fixed, 0, max_states, *memory))
    began = time.perf_counter()
    while status == OPEN:
        status, goal, memory = _expand(kind, weights, (*fixed, BATCH, max_states, *memory))
        if status == OPEN and time.perf_counter() - began > seconds:
            break
    (_, _, _, expanded, generated), nodes = memory[0], memory[3]
    steps: list[str] = []
    if status == SOLVED:
        while goal != 0:
            steps.append(task.actions[nodes[goal, 2]].name)
            goal = nodes[goal, 1]
    name = {SOLVED: "solved", OPEN: "time", EXHAUSTED: "unsolvable", FULL: "memory"}[status]
    plan = steps[::-1] if status == SOLVED else None
    return Found(plan, name, int(expanded), int(generated), time.perf_counter() - began)


def _begin(task: Grounded, heuristic: int) -> tuple[Any, ...]:
    """The memory of a search: the initial state is open, unless the goal is out of its reach."""
    room = 1024
    states = np.zeros((room, len(task.init)), np.uint64)
    kernels.put(task.init, states[0])
    table = kernels.rehashed(states, 1, 4 * room)
    nodes = np.zeros((room, 3), np.int32)  # steps from the start, the row before, the action
    h, keys, items = np.zeros((room, 1)), np.zeros((room, 1)), np.zeros((room, 3), np.int64)
    scratch = heuristics.scratch(len(task.atoms), len(task.actions))
    h[0, 0] = heuristics.estimate(heuristic, task.init, task.arrays, scratch)
    counts = np.array([h[0, 0] < heuristics.INFINITE, 1, 1, 0, 0], np.int64)
    return counts, states, table, nodes, h, keys, items
