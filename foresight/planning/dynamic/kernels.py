"""The hot loops of exact sweeps over an MDP's tables, compiled by numba. The readable versions are in `bellman.py`.

The arithmetic is plain IEEE (no fastmath) in a fixed order, and the statistics (min, max, count) do not depend on the
order. So the results are equal bit for bit for any number of threads, with and without action elimination.

`unroll` is a tuple with one zero for each outcome of an action, or empty. Its length is part of its type, so the
compiler knows it and unrolls the inner loop, which saves a quarter of the time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64] | NDArray[np.uint32]

SMALL = 20_000  # with fewer outcomes in total, starting threads takes longer than the sweep
PARTS = 4  # parts per thread, taken from a queue: other threads take the parts of a delayed one
UNROLLED = 8  # up to so many outcomes per action, a version with an unrolled loop is compiled for their number


@njit(cache=True, nogil=True, error_model="numpy")
def _improve(
    first: int, stop: int, next_state: Ints, weight: Floats, reward: Floats, gamma: float, values: Floats, out: Floats,
    policy: Ints, row_next: Ints, row_weight: Floats, row_reward: Floats, deadline: Floats, clock: float, margin: float,
    unroll: tuple[int, ...], stats: Floats,
) -> None:  # fmt: skip
    """States `first` to `stop` of an optimality sweep; see `bellman.Sweeps` for the meaning of clock and deadline."""
    actions = next_state.shape[1]
    outcomes = len(unroll) if len(unroll) > 0 else next_state.shape[2]
    low, high, switched = np.inf, -np.inf, 0.0
    for s in range(first, stop):
        if clock < deadline[s]:  # the best action cannot have changed
            total = 0.0
            for k in range(outcomes):
                total += row_weight[s, k] * values[row_next[s, k]]
            best = row_reward[s] + gamma * total
        else:
            best, second, choice = -np.inf, -np.inf, 0
            for a in range(actions):
                total = 0.0
                for k in range(outcomes):
                    total += weight[s, a, k] * values[next_state[s, a, k]]
                q = reward[s, a] + gamma * total
                if q > best:
                    best, second, choice = q, best, a
                elif q > second:
                    second = q
            known = deadline[s] > -np.inf
            deadline[s] = max(clock + (best - second) - margin, clock)
            if choice != policy[s] or not known:
                switched += choice != policy[s]
                policy[s] = choice
                for k in range(outcomes):
                    row_next[s, k] = next_state[s, choice, k]
                    row_weight[s, k] = weight[s, choice, k]
                row_reward[s] = reward[s, choice]
        out[s] = best
        change = best - values[s]
        if change < low:
            low = change
        if change > high:
            high = change
    stats[0], stats[1], stats[2] = low, high, switched


@njit(cache=True, nogil=True, error_model="numpy")
def _evaluate(
    first: int, stop: int, row_next: Ints, row_weight: Floats, row_reward: Floats, gamma: float, values: Floats,
    out: Floats, unroll: tuple[int, ...], stats: Floats,
) -> None:  # fmt: skip
    """States `first` to `stop` of an evaluation sweep over the table rows of the chosen actions."""
    outcomes = len(unroll) if len(unroll) > 0 else row_next.shape[1]
    low, high = np.inf, -np.inf
    for s in range(first, stop):
        total = 0.0
        for k in range(outcomes):
            total += row_weight[s, k] * values[row_next[s, k]]
        new = row_reward[s] + gamma * total
        out[s] = new
        change = new - values[s]
        if change < low:
            low = change
        if change > high:
            high = change
    stats[0], stats[1], stats[2] = low, high, 0.0


def improve(threads: int, next_state: Ints, *rest: Any) -> tuple[float, float, int]:
    """One optimality sweep on up to `threads` threads; returns (lowest change, highest change, actions switched)."""
    return _launch(threads, _improve, (next_state, *rest))


def evaluate(threads: int, row_next: Ints, *rest: Any) -> tuple[float, float, int]:
    """One evaluation sweep on up to `threads` threads; returns (lowest change, highest change, 0)."""
    return _launch(threads, _evaluate, (row_next, *rest))


def _launch(threads: int, kernel: Callable[..., None], arguments: tuple[Any, ...]) -> tuple[float, float, int]:
    index = arguments[0]
    states, outcomes = index.shape[0], index.shape[-1]
    small = index.size < SMALL
    unroll = () if small or outcomes > UNROLLED else (0,) * outcomes
    parts = 1 if small or threads == 1 else PARTS * threads
    stats = np.empty((parts, 8))  # one cache line per part, to avoid false sharing
    ticket = itertools.count()

    def work() -> None:
        while (part := next(ticket)) < parts:
            kernel(states * part // parts, states * (part + 1) // parts, *arguments, unroll, stats[part])

    if parts == 1:
        work()
    else:
        # Helper threads that have not started when the work is done are canceled, so on a busy machine the sweep does
        # not wait for them. (A parallel loop of OpenMP waits for each of them, for 4 ms a time slice.)
        helpers = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
        work()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
    return float(stats[:, 0].min()), float(stats[:, 1].max()), int(stats[:, 2].sum())


@functools.cache
def _pool(helpers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(helpers, thread_name_prefix="sweep")
