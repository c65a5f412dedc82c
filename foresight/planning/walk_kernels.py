"""The hot loops of learning on a table world, compiled by numba. Their readable twins are in `walks.py`.

They draw from the numpy generator that they are given, in the same order as the readable form, so that both walk the
same way. `tests/planning/test_walks.py` holds them to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

# What stands for the value of the successor: `ops.targets` has the functions of these names.
SARSA, EXPECTED_SARSA, Q_LEARNING, DOUBLE_Q_LEARNING = range(4)


@njit(cache=True, nogil=True, error_model="numpy")
def _draw(cumulative: Any, uniform: float) -> int:
    """The index at which the running sum passes `uniform` of the total."""
    last = len(cumulative) - 1
    level = uniform * cumulative[last]
    i = 0
    while i < last and cumulative[i] <= level:
        i += 1
    return i


@njit(cache=True, nogil=True, error_model="numpy")
def _best(q: Any, s: int) -> tuple[float, int, int]:
    """(highest value, how many actions have it, how many exist) of the sum over the tables q `[N, S, A]`."""
    best, ties, exist = -np.inf, 0, 0
    for a in range(q.shape[2]):
        value = q[0, s, a]
        for i in range(1, q.shape[0]):
            value += q[i, s, a]
        if value > best:
            best, ties = value, 1
        elif value == best:
            ties += 1
        if value > -np.inf:
            exist += 1
    return best, ties, exist


@njit(cache=True, nogil=True, error_model="numpy")
def _probability(q: Any, s: int, a: int, best: float, ties: int, exist: int, epsilon: float) -> float:
    """π(a|s) of the ε-greedy policy."""
    value = q[0, s, a]
    for i in range(1, q.shape[0]):
        value += q[i, s, a]
    p = 0.0
    if value > -np.inf:
        p += epsilon / exist
    if value == best:
        p += (1.0 - epsilon) / ties
    return p


@njit(cache=True, nogil=True, error_model="numpy")
def _choose(q: Any, s: int, epsilon: float, rng: Any) -> int:
    """An action of the ε-greedy policy, by one uniform number."""
    best, ties, exist = _best(q, s)
    level = rng.random()
    total, chosen = 0.0, 0
    for a in range(q.shape[2]):
        p = _probability(q, s, a, best, ties, exist, epsilon)
        if p > 0:
            chosen = a
            total += p
            if total > level:
                break
    return chosen


@njit(cache=True, nogil=True, error_model="numpy")
def _successor_value(rule: int, q: Any, i: int, s: int, a: int, epsilon: float) -> float:
    """What stands for the value of state s in the target of table i; `a` is the next action where it is known."""
    if rule == SARSA:
        return q[i, s, a]
    if rule == DOUBLE_Q_LEARNING:
        best, ties, _ = _best(q[i : i + 1], s)
        total = 0.0
        for b in range(q.shape[2]):
            if q[i, s, b] == best:
                total += q[1 - i, s, b]
        return total / ties
    best, ties, exist = _best(q, s)
    if rule == Q_LEARNING:
        return best
    total = 0.0
    for b in range(q.shape[2]):
        p = _probability(q, s, b, best, ties, exist, epsilon)
        if p > 0:
            total += p * q[0, s, b]
    return total


@njit(cache=True, nogil=True, error_model="numpy")
def _move(value: Any, visits: Any, target: float, alpha: float, power: float) -> float:
    """The update rule in place, in an array of one value and one count of visits; returns the error."""
    error = target - value[0]
    step_size = alpha
    visits[0] += 1
    if power > 0:
        step_size = alpha / visits[0] ** power
    value[0] += step_size * error
    return error


@njit(cache=True, nogil=True, error_model="numpy")
def _target(rewards: Any, first: int, pending: int, value: float) -> float:
    """The n-step return of pending row `first`: the rewards from there on, then `value` unless the episode ended."""
    target, weight = 0.0, 1.0
    for j in range(first, pending):
        target += weight * rewards[j, 0]
        weight *= rewards[j, 1]
    return target + weight * value if weight != 0 else target


@njit(cache=True, nogil=True, error_model="numpy")
def control(
    rule: int, n: int, steps: int, most: int, q: Any, visits: Any, next_state: Any, cumulative: Any,
    reward: Any, discount: Any, start: Any, limit: int, gamma: float, alpha: float, power: float, epsilon: float,
    rng: Any, pairs: Any, rewards: Any, s: int, a: int, length: int, earned: float, pending: int,
) -> tuple[int, int, int, int, float, int, int, float, int, float]:  # fmt: skip
    """Walk and learn action values q `[N, S, A]`: the loop of `walks.control`, where everything is explained."""
    taken, ended, returned, lengths, errors = 0, 0, 0.0, 0, 0.0
    by_outcome, ends = reward.shape[2] > 1, discount.shape[0] > 0
    while taken < steps:
        if s < 0:
            s, a, length, earned, pending = _draw(start, rng.random()), -1, 0, 0.0, 0
        if a < 0:
            a = _choose(q, s, epsilon, rng)
        k = _draw(cumulative[s, a], rng.random())
        after, r = next_state[s, a, k], reward[s, a, k if by_outcome else 0]
        goes_on = discount[s, a, k] if ends else 1.0
        taken += 1
        length += 1
        earned += r
        cut = goes_on == 0 or (limit > 0 and length >= limit)
        chosen = _choose(q, after, epsilon, rng) if rule == SARSA and goes_on != 0 else -1
        table = 0
        if rule == DOUBLE_Q_LEARNING and rng.random() >= 0.5:
            table = 1
        value = _successor_value(rule, q, table, after, chosen, epsilon) if goes_on != 0 else 0.0
        pairs[pending, 0], pairs[pending, 1] = s, a
        rewards[pending, 0], rewards[pending, 1] = r, gamma * goes_on
        pending += 1
        ready = pending if cut else int(pending == n)
        for i in range(ready):
            target = _target(rewards, i, pending, value)
            b, c = pairs[i, 0], pairs[i, 1]
            errors += abs(_move(q[table, b, c : c + 1], visits[table, b, c : c + 1], target, alpha, power))
        if cut:
            returned += earned
            lengths += length
            ended += 1
            s, a, pending = -1, -1, 0
            if ended == most:
                break
        else:
            if ready:
                for i in range(1, pending):
                    pairs[i - 1, 0], pairs[i - 1, 1] = pairs[i, 0], pairs[i, 1]
                    rewards[i - 1, 0], rewards[i - 1, 1] = rewards[i, 0], rewards[i, 1]
                pending -= 1
            s, a = after, chosen
    return taken, s, a, length, earned, pending, ended, returned, lengths, errors


@njit(cache=True, nogil=True, error_model="numpy")
def predict(
    n: int, lam: float, replacing: bool, steps: int, most: int, v: Any, visits: Any, trace: Any, policy: Any,
    next_state: Any, cumulative: Any, reward: Any, discount: Any, start: Any, limit: int, gamma: float, alpha: float,
    power: float, rng: Any, pairs: Any, rewards: Any, s: int, length: int, earned: float, pending: int,
) -> tuple[int, int, int, float, int, int, float, int, float]:  # fmt: skip
    """Walk as `policy` (running sums `[S, A]`) says and learn v `[S]`: the loop of `walks.predict`.

    With a `trace` `[S]` by traces of decay λ; with an empty one by n-step targets.
    """
    taken, ended, returned, lengths, errors = 0, 0, 0.0, 0, 0.0
    by_outcome, ends = reward.shape[2] > 1, discount.shape[0] > 0
    while taken < steps:
        if s < 0:
            s, length, earned, pending = _draw(start, rng.random()), 0, 0.0, 0
            trace[:] = 0.0
        a = _draw(policy[s], rng.random())
        k = _draw(cumulative[s, a], rng.random())
        after, r = next_state[s, a, k], reward[s, a, k if by_outcome else 0]
        goes_on = discount[s, a, k] if ends else 1.0
        taken += 1
        length += 1
        earned += r
        cut = goes_on == 0 or (limit > 0 and length >= limit)
        value = v[after] if goes_on != 0 else 0.0
        if len(trace) > 0:
            error = r + gamma * goes_on * value - v[s]
            visits[s] += 1
            trace[s] = 1.0 if replacing else trace[s] + 1.0
            step_size = alpha / visits[s] ** power if power > 0 else alpha
            for x in range(len(v)):
                v[x] += step_size * error * trace[x]
                trace[x] *= gamma * goes_on * lam
            errors += abs(error)
        else:
            pairs[pending, 0] = s
            rewards[pending, 0], rewards[pending, 1] = r, gamma * goes_on
            pending += 1
            ready = pending if cut else int(pending == n)
            for i in range(ready):
                target = _target(rewards, i, pending, value)
                b = pairs[i, 0]
                errors += abs(_move(v[b : b + 1], visits[b : b + 1], target, alpha, power))
            if ready and not cut:
                for i in range(1, pending):
                    pairs[i - 1, 0] = pairs[i, 0]
                    rewards[i - 1, 0], rewards[i - 1, 1] = rewards[i, 0], rewards[i, 1]
                pending -= 1
        s = after
        if cut:
            returned += earned
            lengths += length
            ended += 1
            s, pending = -1, 0
            if ended == most:
                break
    return taken, s, length, earned, pending, ended, returned, lengths, errors


@njit(cache=True, nogil=True, error_model="numpy")
def episodes(
    count: int, horizon: int, first: Any, policy: Any, next_state: Any, cumulative: Any, reward: Any, discount: Any,
    start: Any, rng: Any,
) -> tuple[Any, Any, Any, Any, Any]:  # fmt: skip
    """`count` whole episodes of `policy` (running sums `[S, A]`), one after the other; see `walks.episodes`.

    Row i of `first` `[count, 2]` is the state and action that episode i begins with, -1 where they are to be drawn.
    """
    size, rows = 1024, 0
    pairs, values, cut = np.empty((size, 2), np.int64), np.empty((size, 2)), np.empty(size, np.bool_)
    by_outcome, ends = reward.shape[2] > 1, discount.shape[0] > 0
    for i in range(count):
        s, a = first[i, 0], first[i, 1]
        if s < 0:
            s = _draw(start, rng.random())
        for t in range(horizon):
            if t > 0 or a < 0:
                a = _draw(policy[s], rng.random())
            k = _draw(cumulative[s, a], rng.random())
            goes_on = discount[s, a, k] if ends else 1.0
            if rows == size:
                size *= 2
                longer_pairs, longer_values = np.empty((size, 2), np.int64), np.empty((size, 2))
                longer_cut = np.empty(size, np.bool_)
                longer_pairs[:rows], longer_values[:rows], longer_cut[:rows] = pairs, values, cut
                pairs, values, cut = longer_pairs, longer_values, longer_cut
            pairs[rows, 0], pairs[rows, 1] = s, a
            values[rows, 0], values[rows, 1] = reward[s, a, k if by_outcome else 0], goes_on
            cut[rows] = goes_on == 0 or t == horizon - 1
            rows += 1
            s = next_state[s, a, k]
            if goes_on == 0:
                break
    return pairs[:rows, 0].copy(), pairs[:rows, 1].copy(), values[:rows, 0].copy(), values[:rows, 1].copy(), cut[:rows]


@njit(cache=True, nogil=True, error_model="numpy")
def move_all(values: Any, visits: Any, index: Any, targets: Any, alpha: float, power: float) -> float:
    """The update rule for entry `index[i]` towards `targets[i]`, one i after the other; the sum of |errors|."""
    errors = 0.0
    for i in range(len(index)):
        x = index[i]
        errors += abs(_move(values[x : x + 1], visits[x : x + 1], targets[i], alpha, power))
    return errors
