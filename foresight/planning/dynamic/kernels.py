"""The hot loops of exact sweeps over an MDP's tables, compiled by numba. The readable versions are in `bellman.py`.

The arithmetic is plain IEEE (no fastmath) in a fixed order, and the statistics (min, max, count) do not depend on the
order. So the results are equal bit for bit for any number of threads, with and without action elimination.

`unroll` is a tuple with one zero for each outcome of an action, or empty. Its length is part of its type, so the
compiler knows it and unrolls the inner loop, which saves a quarter of the time.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foresight.planning.dynamic import atomic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64] | NDArray[np.uint32]

SMALL = 20_000  # with fewer outcomes in total, starting threads takes longer than the sweep
PARTS = 8  # parts per thread, taken from a queue: other threads take the parts of a delayed one
UNROLLED = 8  # up to so many outcomes per action, a version with an unrolled loop is compiled for their number
OUTCOMES = 200_000_000  # of sweeps in one call, which cannot be interrupted
PATIENCE = 10_000  # looks at `words` before a waiting thread sleeps
MARGIN = 1e-10  # of a gap, relative to the values: far above their rounding error (1e-16), far below any useful gap

SWEEP, TAKEN, DONE, OVER = 0, 8, 16, 24  # in `words`: the sweep under way, parts taken and done in all, whether to end
CLOCK, SCALE, LOW, HIGH, SWITCHED = range(5)  # in `totals`: of `bellman.Sweeps`, and of the last sweep


@njit(cache=True, nogil=True, error_model="numpy")
def _improve(
    first: int, stop: int, next_state: Ints, weight: Floats, reward: Floats, gamma: float, values: Floats, out: Floats,
    policy: Ints, row_next: Ints, row_weight: Floats, row_reward: Floats, deadline: Floats, clock: float, margin: float,
    unroll: tuple[int, ...], stats: Floats,
) -> None:  # fmt: skip
    """States `first` to `stop` of an optimality sweep; see `bellman.Sweeps` for the meaning of clock and deadline.

    Without a `policy`, of an evaluation sweep: over the rows alone.
    """
    actions = next_state.shape[1]
    outcomes = len(unroll) if len(unroll) > 0 else next_state.shape[2]
    low, high, switched = np.inf, -np.inf, 0.0
    for s in range(first, stop):
        if len(policy) == 0 or clock < deadline[s]:  # there is one action, or the best cannot have changed
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
def _repeat(
    words: Ints, parts: int, sweeps: int, tolerance: float, ends: bool, next_state: Ints, weight: Floats,
    reward: Floats, gamma: float, values: Floats, buffers: Floats, policy: Ints, row_next: Ints, row_weight: Floats,
    row_reward: Floats, deadline: Floats, totals: Floats, unroll: tuple[int, ...], stats: Floats,
) -> None:  # fmt: skip
    """What each thread does of up to `sweeps` sweeps: take a part of the sweep that is under way, until all are done.

    Threads meet nowhere but in `words`: a part that no thread has taken holds up no one. The thread that ends the last
    part of a sweep adds up its changes, and begins the next.
    """
    states, waited = len(values), 0
    while True:
        sweep = atomic.load(words, SWEEP)
        if atomic.load(words, OVER) == 1:
            return
        taken = atomic.load(words, TAKEN)
        if taken // parts != sweep or not atomic.replaced(words, TAKEN, taken, taken + 1):
            waited += 1
            if waited > PATIENCE:
                atomic.sleep(20)
            continue
        waited = 0
        part = taken % parts
        old = values if sweep == 0 else buffers[(sweep - 1) % 2]
        _improve(
            states * part // parts, states * (part + 1) // parts, next_state, weight, reward, gamma, old,
            buffers[sweep % 2], policy, row_next, row_weight, row_reward, deadline, totals[CLOCK],
            MARGIN * totals[SCALE], unroll, stats[part],
        )  # fmt: skip
        if atomic.increased(words, DONE) < parts * (sweep + 1):
            continue
        low, high, switched = (0.0, 0.0, 0.0) if ends else (np.inf, -np.inf, 0.0)
        for one in range(parts):
            low, high = min(low, stats[one, 0]), max(high, stats[one, 1])
            switched += stats[one, 2]
        norm = max(abs(low), abs(high))
        totals[CLOCK] += gamma * (high - low)
        totals[SCALE] += norm
        totals[LOW], totals[HIGH], totals[SWITCHED] = low, high, switched
        if sweep + 1 == sweeps or norm < tolerance:
            atomic.store(words, OVER, 1)
        atomic.store(words, SWEEP, sweep + 1)


def improve(
    threads: int, sweeps: int, tolerance: float, ends: bool, next_state: Ints, weight: Floats, reward: Floats,
    gamma: float, values: Floats, policy: Ints, row_next: Ints, row_weight: Floats, row_reward: Floats,
    deadline: Floats, totals: Floats,
) -> tuple[Floats, int]:  # fmt: skip
    """Optimality sweeps on up to `threads` threads: (the values after them, their number). `totals` tells the change.

    They end after `sweeps`, after one that changes no value by `tolerance` or more, or after about `OUTCOMES` outcomes.
    With `ends`, the bounds of the change include 0.
    """
    states, outcomes = next_state.shape[0], next_state.shape[-1]
    small = next_state.size < SMALL
    unroll = () if small or outcomes > UNROLLED else (0,) * outcomes
    parts = 1 if small or threads == 1 else PARTS * threads
    sweeps = max(1, min(sweeps, OUTCOMES // next_state.size))
    stats = np.empty((parts, 8))  # one cache line per part, to avoid false sharing; so in `words`
    words = np.zeros(4 * 8, np.int64)
    # numpy requests huge pages, which make random reads faster
    buffers = np.empty((min(sweeps, 2), states))
    arguments = (
        words, parts, sweeps, tolerance, ends, next_state, weight, reward, gamma, values, buffers, policy, row_next,
        row_weight, row_reward, deadline, totals, unroll, stats,
    )  # fmt: skip
    # Helper threads that have not started when the work is done are canceled, so on a busy machine the sweeps do not
    # wait for them. (A parallel loop of OpenMP waits for each of them, for 4 ms a time slice.)
    helpers = [_pool(threads - 1).submit(_repeat, *arguments) for _ in range(threads - 1)] if parts > 1 else []
    _repeat(*arguments)
    for helper in helpers:
        if not helper.cancel():
            helper.result()
    done = int(words[SWEEP])
    return buffers[(done - 1) % 2], done


def evaluate(
    threads: int, sweeps: int, tolerance: float, ends: bool, row_next: Ints, row_weight: Floats, row_reward: Floats,
    gamma: float, values: Floats, totals: Floats,
) -> tuple[Floats, int]:  # fmt: skip
    """Evaluation sweeps over the table rows of the chosen actions, as `improve`."""
    rows = row_next, row_weight, row_reward
    tables = row_next[:, None], row_weight[:, None], row_reward[:, None]
    none, gaps = np.empty(0, np.int64), np.empty(0)
    return improve(threads, sweeps, tolerance, ends, *tables, gamma, values, none, *rows, gaps, totals)


@functools.cache
def _pool(helpers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(helpers, thread_name_prefix="sweep")
