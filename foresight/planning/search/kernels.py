"""The compiled search: the same as `mcts._tensors`, row by row. The readable math is in `selection`.

`_descend` is compiled once for each rule, with the rule's function that selects an action:

    @njit(cache=True, nogil=True, error_model="numpy", inline="always")
    def _select_mine(parameters, trees, b, node):  # the rule: an action at `node` of tree b, or -1 if none is legal
        ...

    @njit(cache=True, nogil=True, error_model="numpy")
    def mine(*arguments):                          # the descent with this rule
        return _descend(_select_mine, arguments)

It is inlined into each of them, because numba cannot cache a function that takes another one as an argument: it
identifies a function by its address, which differs between processes.

Rows are independent, so the functions that end with `_threads` divide them among threads; `divided` looks them up.

Values are stored as float32 and computed as float64 in both, so that both choose the same actions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from foresight.ops.fused.latent import LOCK, share_threads

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

EPSILON = 1e-8  # selection.EPSILON
TINY = 1.1754943508222875e-38  # selection.TINY
ILLEGAL = -1e30  # tree.ILLEGAL
LOWEST, ZERO, LOSS, PARENT, REDUCED = range(5)  # selection.FIRST_PLAY
SIBLINGS, TREE, UNCHANGED = range(3)  # selection.NORMALIZE


class Trees(NamedTuple):
    """The trees of the batch, B rows of N nodes and A actions (see `tree.Tree`), and other inputs of a rule."""

    children: Ints  # [B, N, A]
    logits: Floats
    prior: Floats
    visits: Ints  # [B, N]
    value: Floats
    raw: Floats
    reward: Floats
    discount: Floats
    bounds: Floats  # [B, 2]
    noise: Floats  # [B, A], see `selection.Rule.noise`
    schedule: Longs  # [B, S], see `selection.Rule.schedule`; S = 0 without one
    begun: Ints  # [B], visits of the root before this search
    q: Doubles  # [A], scratch: action values at the node
    n: Doubles  # [A], scratch: visits of the actions


class Stats(NamedTuple):
    """Statistics of the tried actions of a node."""

    visits: float  # their sum
    most: float  # the largest number of visits
    low: float  # the lowest of their values and the node's own
    high: float  # the highest of these
    mass: float  # the sum of their priors, each at least TINY
    weighted: float  # Σ prior · value, with the same priors
    prior: float  # the sum of their priors, unclamped


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _stats(trees: Trees, b: int, node: int) -> Stats:
    """Write values and visits of the actions of `node` to `trees.q` and `trees.n` (0 if untried); return `Stats`."""
    count, most, mass, weighted, tried = 0.0, 0.0, 0.0, 0.0, 0.0
    low: float = np.float64(trees.value[b, node])
    high: float = low
    for a in range(trees.children.shape[2]):
        child = trees.children[b, node, a]
        if child >= 0:
            after = np.float64(trees.discount[b, child]) * np.float64(trees.value[b, child])
            qa, na = np.float64(trees.reward[b, child]) + after, np.float64(trees.visits[b, child])
            trees.q[a], trees.n[a] = qa, na
            count += na
            most = max(most, na)
            low, high = min(low, qa), max(high, qa)
            p: float = np.float64(trees.prior[b, node, a])
            tried += p
            p = max(p, TINY)
            mass += p
            weighted += p * qa
        else:
            trees.q[a], trees.n[a] = 0.0, 0.0
    return Stats(count, most, low, high, mass, weighted, tried)


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _range(how: int, low: float, high: float, lowest: float, highest: float) -> tuple[float, float]:
    """Offset and scale for the normalization `how`: `low`, `high` of the node, `lowest`, `highest` of the tree."""
    if how == SIBLINGS:
        return low, max(high - low, EPSILON)
    if how == TREE and highest > lowest:
        return np.float64(lowest), np.float64(highest) - np.float64(lowest)
    return 0.0, 1.0


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _first_play(how: int, reduction: float, own: float, low: float, tried: float) -> float:
    if how == LOWEST:
        return low
    if how == ZERO:
        return 0.0
    if how == LOSS:
        return -1.0
    if how == PARENT:
        return own
    return own - reduction * math.sqrt(tried)


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _select_puct(parameters: Doubles, trees: Trees, b: int, node: int) -> int:
    """The action with the highest `selection.PUCT.score`; at a chance node, the outcome to try next."""
    c_init, c_base, reduction = parameters[0], parameters[1], parameters[4]
    normalize, first_play, chances = int(parameters[2]), int(parameters[3]), int(parameters[5])
    actions = trees.children.shape[2]
    own, total = np.float64(trees.value[b, node]), np.float64(trees.visits[b, node])
    stats = _stats(trees, b, node)
    best: float = -math.inf
    choice = -1
    chance = False
    for a in range(actions - chances, actions):
        chance |= trees.logits[b, node, a] != -math.inf
    if chance:
        for a in range(actions):
            score = np.float64(trees.prior[b, node, a]) / (1 + trees.n[a]) + np.float64(trees.noise[b, a])
            if trees.logits[b, node, a] != -math.inf and score > best:
                best, choice = score, a
        return choice
    base, spread = _range(normalize, stats.low, stats.high, trees.bounds[b, 0], trees.bounds[b, 1])
    missing = (_first_play(first_play, reduction, own, stats.low, stats.prior) - base) / spread
    bonus = math.sqrt(total) * (c_init + math.log1p((total + 1) / c_base))
    for a in range(actions):
        if trees.logits[b, node, a] == -math.inf:
            continue
        known = (trees.q[a] - base) / spread if trees.n[a] > 0 else missing
        score = known + bonus * np.float64(trees.prior[b, node, a]) / (1 + trees.n[a]) + np.float64(trees.noise[b, a])
        if score > best:
            best, choice = score, a
    return choice


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _select_uct(parameters: Doubles, trees: Trees, b: int, node: int) -> int:
    """The action with the highest `selection.UCT.score`."""
    c, normalize = parameters[0], int(parameters[1])
    stats = _stats(trees, b, node)
    base, spread = _range(normalize, stats.low, stats.high, trees.bounds[b, 0], trees.bounds[b, 1])
    bonus = math.log(np.float64(trees.visits[b, node]))
    best: float = -math.inf
    choice = -1
    for a in range(trees.children.shape[2]):
        if trees.logits[b, node, a] == -math.inf:
            continue
        if trees.n[a] > 0:
            score = (trees.q[a] - base) / spread + c * math.sqrt(bonus / trees.n[a])
        else:
            score = 1e6 + np.float64(trees.prior[b, node, a])
        score += np.float64(trees.noise[b, a])
        if score > best:
            best, choice = score, a
    return choice


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _select_gumbel(parameters: Doubles, trees: Trees, b: int, node: int) -> int:
    """The action with the highest `selection.halving_score` at the root, and `selection.Gumbel.score` below it."""
    value_scale, max_visit_init, normalize = parameters[0], parameters[1], int(parameters[2])
    actions, q, n = trees.children.shape[2], trees.q, trees.n
    stats = _stats(trees, b, node)
    mixed = np.float64(trees.raw[b, node]) + stats.visits * (stats.weighted / stats.mass if stats.mass > 0 else 0.0)
    mixed = mixed / (1 + stats.visits)
    low: float = math.inf
    high: float = -math.inf
    top: float = -math.inf
    for a in range(actions):
        if n[a] == 0:
            q[a] = mixed
        low, high = min(low, q[a]), max(high, q[a])
        top = max(top, np.float64(trees.logits[b, node, a]))
    base, spread = _range(normalize, low, high, trees.bounds[b, 0], trees.bounds[b, 1])
    scale = (max_visit_init + stats.most) * value_scale
    for a in range(actions):
        q[a] = (q[a] - base) / spread * scale
    best: float = -math.inf
    choice = -1
    if node == 0:
        planned = trees.schedule[b, trees.visits[b, 0] - trees.begun[b]]
        for a in range(actions):
            if trees.prior[b, node, a] == 0 and trees.logits[b, node, a] == -math.inf:
                continue
            if n[a] == planned:
                score = max(np.float64(trees.noise[b, a]) + (np.float64(trees.logits[b, node, a]) - top) + q[a], -1e9)
                if score > best:
                    best, choice = score, a
        return choice
    top = -math.inf
    for a in range(actions):
        q[a] += np.float64(trees.logits[b, node, a])
        top = max(top, q[a])
    if top == -math.inf:
        return -1
    mass = 0.0
    for a in range(actions):
        q[a] = math.exp(q[a] - top)
        mass += q[a]
    for a in range(actions):
        if trees.logits[b, node, a] == -math.inf:
            continue
        score = q[a] / mass - n[a] / (1 + stats.visits)
        if score > best:
            best, choice = score, a
    return choice


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _descend(select: Callable[[Doubles, Trees, int, int], int], arguments: tuple[Any, ...]) -> None:
    """Descend in the trees `first` to `stop` to the node and the action to expand, and the child: -1 if it is new.

    They are written to `node_out`, `action_out` and `leaf_out`, and the index of the node's state in the flat memory
    `[N * B]` to `index_out`.
    """
    (
        first, stop, scratch, parameters, noise, schedule, begun, depth, children, logits, prior, parent, action,
        visits, value, raw, reward, discount, bounds, node_out, action_out, leaf_out, index_out,
    ) = arguments  # fmt: skip
    trees = Trees(
        children, logits, prior, visits, value, raw, reward, discount, bounds, noise, schedule, begun, scratch[0],
        scratch[1],
    )  # fmt: skip
    for b in range(first, stop):
        node, level = 0, 0
        while True:
            a = select(parameters, trees, b, node)
            if a < 0:  # no legal action: the node itself is the leaf
                node_out[b], action_out[b], leaf_out[b] = max(parent[b, node], 0), max(action[b, node], 0), node
                break
            level += 1
            child = children[b, node, a]
            if child < 0 or discount[b, child] == 0 or level >= depth:
                node_out[b], action_out[b], leaf_out[b] = node, a, child
                break
            node = child
        index_out[b] = node_out[b] * children.shape[0] + b


@njit(cache=True, nogil=True, error_model="numpy")
def puct(*arguments: Any) -> None:
    """`_descend` with `selection.PUCT`."""
    _descend(_select_puct, arguments)


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def puct_threads(threads: int, rows: int, scratch: Doubles, *arguments: Any) -> None:
    """`puct` of all rows in `threads` parts; `scratch` `[threads, 2, A]`."""
    for i in prange(threads):
        puct(i * rows // threads, (i + 1) * rows // threads, scratch[i], *arguments)


@njit(cache=True, nogil=True, error_model="numpy")
def uct(*arguments: Any) -> None:
    """`_descend` with `selection.UCT`."""
    _descend(_select_uct, arguments)


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def uct_threads(threads: int, rows: int, scratch: Doubles, *arguments: Any) -> None:
    """`uct` of all rows in `threads` parts; `scratch` `[threads, 2, A]`."""
    for i in prange(threads):
        uct(i * rows // threads, (i + 1) * rows // threads, scratch[i], *arguments)


@njit(cache=True, nogil=True, error_model="numpy")
def gumbel(*arguments: Any) -> None:
    """`_descend` with `selection.Gumbel`."""
    _descend(_select_gumbel, arguments)


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def gumbel_threads(threads: int, rows: int, scratch: Doubles, *arguments: Any) -> None:
    """`gumbel` of all rows in `threads` parts; `scratch` `[threads, 2, A]`."""
    for i in prange(threads):
        gumbel(i * rows // threads, (i + 1) * rows // threads, scratch[i], *arguments)


@njit(cache=True, nogil=True, error_model="numpy")
def expand(
    first: int, stop: int, slot: int, node_in: Longs, action_in: Longs, leaf_in: Longs, reward_in: Floats,
    discount_in: Floats, logits_in: Floats, value_in: Floats, children: Ints, logits: Floats, prior: Floats,
    parent: Ints, action: Ints, visits: Ints, value: Floats, raw: Floats, reward: Floats, discount: Floats,
    bounds: Floats,
) -> int:  # fmt: skip
    """Write the new nodes of the rows `first` to `stop`, then back up in each.

    Returns the first row with a value that is not finite, or -1.
    """
    actions = children.shape[2]
    for b in range(first, stop):
        leaf = leaf_in[b]
        if leaf < 0:
            leaf = slot
            v = np.float64(value_in[b])
            r, g = np.float64(reward_in[b]), np.float64(discount_in[b])
            if not (math.isfinite(v) and math.isfinite(r) and math.isfinite(g)):
                return b
            children[b, node_in[b], action_in[b]] = leaf
            parent[b, leaf], action[b, leaf] = node_in[b], action_in[b]
            reward[b, leaf], discount[b, leaf] = reward_in[b], discount_in[b]
            value[b, leaf] = raw[b, leaf] = value_in[b]
            visits[b, leaf] = 0
            top = -math.inf
            for a in range(actions):
                x = np.float64(logits_in[b, a])
                if x != x or x == math.inf:
                    return b
                top = max(top, x)
            mass = 0.0
            for a in range(actions):
                x = np.float64(logits_in[b, a])
                if x > ILLEGAL:
                    mass += math.exp(x - top)
            for a in range(actions):
                x = np.float64(logits_in[b, a])
                if x > ILLEGAL:
                    logits[b, leaf, a], prior[b, leaf, a] = x, math.exp(x - top) / mass
                else:
                    logits[b, leaf, a], prior[b, leaf, a] = -math.inf, 0.0
        visits[b, leaf] += 1
        found, node = np.float64(raw[b, leaf]), leaf
        low, high = bounds[b, 0], bounds[b, 1]
        while parent[b, node] >= 0:
            r, g = np.float64(reward[b, node]), np.float64(discount[b, node])
            edge = r + g * np.float64(value[b, node])
            low, high = min(low, edge), max(high, edge)
            found = r + g * found
            node = parent[b, node]
            count = np.float64(visits[b, node])
            value[b, node] = (np.float64(value[b, node]) * count + found) / (count + 1)
            visits[b, node] += 1
        bounds[b, 0], bounds[b, 1] = low, high
    return -1


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def expand_threads(threads: int, rows: int, *arguments: Any) -> int:
    """`expand` of all rows in `threads` parts."""
    bad = np.empty(threads, np.int64)
    for i in prange(threads):
        bad[i] = expand(i * rows // threads, (i + 1) * rows // threads, *arguments)
    for i in range(threads):
        if bad[i] >= 0:
            return int(bad[i])
    return -1


_THREADS: dict[Any, Callable[..., None]] = {puct: puct_threads, uct: uct_threads, gumbel: gumbel_threads}


def divided(
    descend: Callable[..., None], threads: int, rows: int, actions: int
) -> tuple[Callable[..., None], Callable[..., int]]:
    """`descend` and `expand` of all `rows`, in `threads` threads if there is such a version of `descend`."""
    parts = min(threads, rows, numba.config.NUMBA_NUM_THREADS) if descend in _THREADS else 1
    scratch = np.empty((parts, 2, actions))
    if parts <= 1:
        return functools.partial(descend, 0, rows, scratch[0]), functools.partial(expand, 0, rows)

    def alone(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with LOCK:
                share_threads(parts)
                return function(parts, rows, *first, *arguments)

        return run

    return alone(_THREADS[descend], scratch), alone(expand_threads)
