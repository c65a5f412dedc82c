"""The loops of tabular TD and Monte Carlo, compiled by numba: what they draw, how they update values, what they return.

`control` and `predict` are compiled once for each algorithm, around the `target` in its file:

    @tabular_kernels.compiled
    def target(reward, discount, q, table, next_state, next_action, epsilon):      # what the paper defines
        return reward + discount * q[table, next_state].max()

    @tabular_kernels.compiled
    def act_and_update(*args):                                                     # the loop around it
        return tabular_kernels.control(target, tabular_kernels.UPDATE_FIRST, args)

`control` and `predict` are inlined into each `act_and_update`. Called with `target` as an argument instead, they could
not be cached: numba identifies a function by its address, which differs in each process. For the same reason `args`
stays one tuple: unpacked into arguments beside `target`, it would turn `target` into a pointer.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import njit
from numpy.typing import NDArray

# When the next action is chosen: before the update, which uses it, or after the update, from the updated values.
ACTION_FIRST, UPDATE_FIRST = True, False

Loop = TypeVar("Loop", bound=Callable[..., Any])
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Controlled = tuple[int, int, int, int, float, int, int, float, int, float]
Predicted = tuple[int, int, int, float, int, int, float, int, float]


def compiled(function: Loop) -> Loop:
    """Compile `function`, and cache the result next to its file until that file or this one changes.

    Source: https://numba.readthedocs.io/en/stable/user/jit.html#cache, which checks the function's own file only.
    """
    made = njit(cache=True, nogil=True, error_model="numpy")(function)
    if not numba.config.DISABLE_JIT:
        index = made._cache._cache_file  # type: ignore[attr-defined]  # numba's own
        index._source_stamp = (index._source_stamp, _source())
    return made


def _source() -> str:
    return hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()


@compiled
def draw(cumulative: Floats, uniform: float) -> int:
    """The index at which the cumulative sum exceeds the fraction `uniform` of the total."""
    last = len(cumulative) - 1
    level = uniform * cumulative[last]
    i = 0
    while i < last and cumulative[i] <= level:
        i += 1
    return i


@compiled
def best(q: Floats, s: int) -> tuple[float, int, int]:
    """(highest value, number of actions with it, number of allowed actions) of the sum of the tables q `[N, S, A]`."""
    highest, ties, exist = -np.inf, 0, 0
    for a in range(q.shape[2]):
        value = q[0, s, a]
        for i in range(1, q.shape[0]):
            value += q[i, s, a]
        if value > highest:
            highest, ties = value, 1
        elif value == highest:
            ties += 1
        if value > -np.inf:
            exist += 1
    return highest, ties, exist


@compiled
def probability(q: Floats, s: int, a: int, highest: float, ties: int, exist: int, epsilon: float) -> float:
    """π(a|s) of the ε-greedy policy, from what `best` returns for q and s."""
    value = q[0, s, a]
    for i in range(1, q.shape[0]):
        value += q[i, s, a]
    p = 0.0
    if value > -np.inf:
        p += epsilon / exist
    if value == highest:
        p += (1.0 - epsilon) / ties
    return p


@compiled
def choose(q: Floats, s: int, epsilon: float, rng: np.random.Generator) -> int:
    """An action of the ε-greedy policy, from one uniform random number."""
    highest, ties, exist = best(q, s)
    level = rng.random()
    total, chosen = 0.0, 0
    for a in range(q.shape[2]):
        p = probability(q, s, a, highest, ties, exist, epsilon)
        if p > 0:
            chosen = a
            total += p
            if total > level:
                break
    return chosen


@compiled
def expected(q: Floats, s: int, epsilon: float) -> float:
    """Σ_a π(a|s) q(s, a) of the ε-greedy policy, for one table `[1, S, A]`."""
    highest, ties, exist = best(q, s)
    total = 0.0
    for a in range(q.shape[2]):
        p = probability(q, s, a, highest, ties, exist, epsilon)
        if p > 0:
            total += p * q[0, s, a]
    return total


@compiled
def move(value: Floats, visits: Ints, target: float, alpha: float, power: float) -> float:
    """The update rule, in place, for an array of one value and one of its visit count; returns the error."""
    error = target - value[0]
    step_size = alpha
    visits[0] += 1
    if power > 0:
        step_size = alpha / visits[0] ** power
    value[0] += step_size * error
    return error


@compiled
def _rewards(rewards: Floats, first: int, pending: int) -> tuple[float, float]:
    """(r_1 + γ r_2 + ..., γⁿ) of the pending steps from `first` on; the second is 0 where the episode ended."""
    total, weight = 0.0, 1.0
    for j in range(first, pending):
        total += weight * rewards[j, 0]
        weight *= rewards[j, 1]
    return total, weight


@njit(inline="always")
def control(target: Callable[..., float], action_first: bool, args: tuple[Any, ...]) -> Controlled:
    """Act ε-greedily and move q(s, a) toward `target`, n steps late: S&B p. 147, which for n = 1 is p. 130 or 131.

    `q` and `visits` `[N, S, A]`: of N > 1 tables one is drawn uniformly to be updated, and their sum acts. `target` is
    called with Σ γ^k r and γⁿ of the n rewards, `q`, the table to update, the state and (with `action_first`) the
    action that follow, and ε. It is not called at the end of an episode, where the target is the rewards alone. `pairs`
    and `rewards` hold the `pending` steps that wait for their target; `tabular.ActorState` documents them and the
    other returned values.
    """
    (
        n, steps, most, q, visits, next_state, cumulative, reward, discount, start, limit, gamma, alpha, power,
        epsilon, rng, pairs, rewards, s, a, length, earned, pending,
    ) = args  # fmt: skip
    taken, ended, returned, lengths, errors = 0, 0, 0.0, 0, 0.0
    by_outcome, ends = reward.shape[2] > 1, discount.shape[0] > 0
    while taken < steps:
        if s < 0:
            s, a, length, earned, pending = draw(start, rng.random()), -1, 0, 0.0, 0
        if a < 0:
            a = choose(q, s, epsilon, rng)
        k = draw(cumulative[s, a], rng.random())
        after, r = next_state[s, a, k], reward[s, a, k if by_outcome else 0]
        continuation = discount[s, a, k] if ends else 1.0
        taken += 1
        length += 1
        earned += r
        cut = continuation == 0 or (limit > 0 and length >= limit)
        chosen = choose(q, after, epsilon, rng) if action_first and continuation != 0 else -1
        table = int(len(q) * rng.random()) if len(q) > 1 else 0
        pairs[pending, 0], pairs[pending, 1] = s, a
        rewards[pending, 0], rewards[pending, 1] = r, gamma * continuation
        pending += 1
        ready = pending if cut else int(pending == n)
        for i in range(ready):  # all targets before the first update; a later one does not read an earlier reward
            total, weight = _rewards(rewards, i, pending)
            rewards[i, 0] = target(total, weight, q, table, after, chosen, epsilon) if weight != 0 else total
        for i in range(ready):
            b, c = pairs[i, 0], pairs[i, 1]
            errors += abs(move(q[table, b, c : c + 1], visits[table, b, c : c + 1], rewards[i, 0], alpha, power))
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


@njit(inline="always")
def predict(target: Callable[..., float], args: tuple[Any, ...]) -> Predicted:
    """Follow `policy` (cumulative `[S, A]`) and move v(s) `[S]` toward `target`, n steps late: S&B p. 144.

    `target` is called with Σ γ^k r and γⁿ of the n rewards, `v` and the next state; the rest is as in `control`.
    """
    (
        n, steps, most, v, visits, policy, next_state, cumulative, reward, discount, start, limit, gamma, alpha, power,
        rng, pairs, rewards, s, length, earned, pending,
    ) = args  # fmt: skip
    taken, ended, returned, lengths, errors = 0, 0, 0.0, 0, 0.0
    by_outcome, ends = reward.shape[2] > 1, discount.shape[0] > 0
    while taken < steps:
        if s < 0:
            s, length, earned, pending = draw(start, rng.random()), 0, 0.0, 0
        a = draw(policy[s], rng.random())
        k = draw(cumulative[s, a], rng.random())
        after, r = next_state[s, a, k], reward[s, a, k if by_outcome else 0]
        continuation = discount[s, a, k] if ends else 1.0
        taken += 1
        length += 1
        earned += r
        cut = continuation == 0 or (limit > 0 and length >= limit)
        pairs[pending, 0] = s
        rewards[pending, 0], rewards[pending, 1] = r, gamma * continuation
        pending += 1
        ready = pending if cut else int(pending == n)
        for i in range(ready):
            total, weight = _rewards(rewards, i, pending)
            rewards[i, 0] = target(total, weight, v, after) if weight != 0 else total
        for i in range(ready):
            b = pairs[i, 0]
            errors += abs(move(v[b : b + 1], visits[b : b + 1], rewards[i, 0], alpha, power))
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


@compiled
def episodes(
    count: int, horizon: int, first: Ints, policy: Floats, next_state: Ints, cumulative: Floats, reward: Floats,
    discount: Floats, start: Floats, rng: np.random.Generator,
) -> tuple[Ints, Ints, Floats, Floats, NDArray[np.bool_]]:  # fmt: skip
    """`count` whole episodes of `policy` (cumulative `[S, A]`), concatenated; see `tabular.episodes`.

    Row i of `first` `[count, 2]` is the initial state and action of episode i, -1 where they are to be drawn.
    """
    size, n = 1024, 0
    pairs, values, cut = np.empty((size, 2), np.int64), np.empty((size, 2)), np.empty(size, np.bool_)
    by_outcome, ends = reward.shape[2] > 1, discount.shape[0] > 0
    for i in range(count):
        s, a = first[i, 0], first[i, 1]
        if s < 0:
            s = draw(start, rng.random())
        for t in range(horizon):
            if t > 0 or a < 0:
                a = draw(policy[s], rng.random())
            k = draw(cumulative[s, a], rng.random())
            continuation = discount[s, a, k] if ends else 1.0
            if n == size:
                size *= 2
                longer_pairs, longer_values = np.empty((size, 2), np.int64), np.empty((size, 2))
                longer_cut = np.empty(size, np.bool_)
                longer_pairs[:n], longer_values[:n], longer_cut[:n] = pairs, values, cut
                pairs, values, cut = longer_pairs, longer_values, longer_cut
            pairs[n, 0], pairs[n, 1] = s, a
            values[n, 0], values[n, 1] = reward[s, a, k if by_outcome else 0], continuation
            cut[n] = continuation == 0 or t == horizon - 1
            n += 1
            s = next_state[s, a, k]
            if continuation == 0:
                break
    return pairs[:n, 0].copy(), pairs[:n, 1].copy(), values[:n, 0].copy(), values[:n, 1].copy(), cut[:n]


@compiled
def move_all(values: Floats, visits: Ints, index: Ints, targets: Floats, alpha: float, power: float) -> float:
    """The update rule for entry `index[i]` toward `targets[i]`, in order of i; returns the sum of |errors|."""
    errors = 0.0
    for i in range(len(index)):
        x = index[i]
        errors += abs(move(values[x : x + 1], visits[x : x + 1], targets[i], alpha, power))
    return errors
