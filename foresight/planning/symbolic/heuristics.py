"""Estimates of the steps to the goal in the problem without deletes: h_max, h_add and h_FF, compiled.

    c(p) = 0 if p holds, else min over the actions a that add p of  1 + ⊕ c(q) over the preconditions q of a

with ⊕ = max for h_max (admissible) and ⊕ = Σ for h_add (Bonet & Geffner 2001). h_FF counts the actions of a relaxed
plan that the best supporters of h_add give (Hoffmann & Nebel 2001; Keyder & Geffner 2008). Negative preconditions and
goals are ignored. ∞ means that the goal cannot be reached.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foresight.envs.pddl.ground import Arrays
from foresight.envs.pddl.kernels import has

FAR = 1 << 28
INFINITE = 1e18
NAMES = ("blind", "hmax", "hadd", "hff")
BLIND, MAX, ADD, FF = range(len(NAMES))


class Scratch(NamedTuple):
    """Memory of the heuristics for P atoms and A actions."""

    cost: NDArray[np.int32]  # [P]
    old: NDArray[np.int32]  # [P], the cost with which an atom was last counted
    supporter: NDArray[np.int32]  # [P], the action that gives the cost; -1: it holds
    waiting: NDArray[np.int32]  # [A], preconditions that are not reached yet
    total: NDArray[np.int32]  # [A], sum (or maximum) of the preconditions' costs
    queue: NDArray[np.int32]  # [P + 1], a ring
    queued: NDArray[np.bool_]  # [P]
    marked: NDArray[np.bool_]  # [A], in the relaxed plan


def scratch(atoms: int, actions: int) -> Scratch:
    """New memory."""
    cost, old, supporter, queue = (np.zeros(n, np.int32) for n in (atoms, atoms, atoms, atoms + 1))
    waiting, total = np.zeros(actions, np.int32), np.zeros(actions, np.int32)
    return Scratch(cost, old, supporter, waiting, total, queue, np.zeros(atoms, np.bool_), np.zeros(actions, np.bool_))


@njit(cache=True, nogil=True)
def _relax(state: NDArray[np.uint64], task: Arrays, s: Scratch, additive: bool) -> None:
    """Fill `s.cost` and `s.supporter`: costs are lowered until nothing changes (a queue of changed atoms)."""
    atoms, actions = len(s.cost), len(s.waiting)
    for p in range(atoms):
        s.cost[p], s.old[p], s.supporter[p], s.queued[p] = FAR, FAR, -1, False
    head, count, room = 0, 0, atoms + 1
    for a in range(actions):
        s.waiting[a] = task.positive_start[a + 1] - task.positive_start[a]
        s.total[a] = 0
    for p in range(atoms):
        if has(state, p):
            s.cost[p] = 0
            s.queue[count] = p
            s.queued[p] = True
            count += 1
    for k in range(len(task.always)):
        a = task.always[k]
        for j in range(task.add_start[a], task.add_start[a + 1]):
            q = task.add[j]
            if s.cost[q] > 1:
                s.cost[q], s.supporter[q] = 1, a
                s.queue[(head + count) % room] = q
                s.queued[q] = True
                count += 1
    while count > 0:
        p = s.queue[head]
        head = (head + 1) % room
        count -= 1
        s.queued[p] = False
        new = s.cost[p]
        first = s.old[p] == FAR
        for k in range(task.need_start[p], task.need_start[p + 1]):
            a = task.need[k]
            if first:
                s.waiting[a] -= 1
            if additive:
                s.total[a] += new if first else new - s.old[p]
            elif s.waiting[a] == 0:
                most = 0
                for j in range(task.positive_start[a], task.positive_start[a + 1]):
                    q = task.positive[j]
                    if s.cost[q] > most:
                        most = s.cost[q]
                s.total[a] = most
            if s.waiting[a] == 0:
                reached = min(1 + s.total[a], FAR - 1)
                for j in range(task.add_start[a], task.add_start[a + 1]):
                    q = task.add[j]
                    if reached < s.cost[q]:
                        s.cost[q], s.supporter[q] = reached, a
                        if not s.queued[q]:
                            s.queue[(head + count) % room] = q
                            s.queued[q] = True
                            count += 1
        s.old[p] = new


@njit(cache=True, nogil=True)
def h_max(state: NDArray[np.uint64], task: Arrays, s: Scratch) -> float:
    """The largest cost of a goal atom; never more than the length of a shortest plan."""
    _relax(state, task, s, False)
    most = 0
    for k in range(len(task.goal)):
        most = max(most, s.cost[task.goal[k]])
    return INFINITE if most >= FAR else float(most)


@njit(cache=True, nogil=True)
def h_add(state: NDArray[np.uint64], task: Arrays, s: Scratch) -> float:
    """The sum of the costs of the goal's atoms."""
    _relax(state, task, s, True)
    total = 0.0
    for k in range(len(task.goal)):
        if s.cost[task.goal[k]] >= FAR:
            return INFINITE
        total += s.cost[task.goal[k]]
    return total


@njit(cache=True, nogil=True)
def h_ff(state: NDArray[np.uint64], task: Arrays, s: Scratch) -> float:
    """The number of actions of a relaxed plan."""
    _relax(state, task, s, True)
    for a in range(len(s.marked)):
        s.marked[a] = False
    for p in range(len(s.queued)):
        s.queued[p] = False
    count, total = 0, 0
    for k in range(len(task.goal)):
        p = task.goal[k]
        if s.cost[p] >= FAR:
            return INFINITE
        if not s.queued[p]:
            s.queued[p] = True
            s.queue[count] = p
            count += 1
    while count > 0:
        count -= 1
        a = s.supporter[s.queue[count]]
        if a < 0 or s.marked[a]:
            continue
        s.marked[a] = True
        total += 1
        for j in range(task.positive_start[a], task.positive_start[a + 1]):
            q = task.positive[j]
            if not s.queued[q]:
                s.queued[q] = True
                s.queue[count] = q
                count += 1
    return float(total)


@njit(cache=True, nogil=True)
def estimate(heuristic: int, state: NDArray[np.uint64], task: Arrays, s: Scratch) -> float:
    """The heuristic `NAMES[heuristic]`, chosen here so that a search is compiled once; `blind` is 0 everywhere."""
    if heuristic == MAX:
        return h_max(state, task, s)
    if heuristic == ADD:
        return h_add(state, task, s)
    return h_ff(state, task, s) if heuristic == FF else 0.0
