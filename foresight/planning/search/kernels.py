"""The compiled search: the same as `mcts._tensors`, row by row. The readable math is in `selection`.

`_walk` is compiled once for each rule, around the function that selects an action:

    @njit(**FLAGS, inline="always")
    def _select_mine(parameters, row, node):       # the rule: an action at `node` of one tree, or -1 if none is legal
        ...

    @njit(**FLAGS)
    def mine(*where):                              # the way down around it
        return _walk(_select_mine, where)

It is inlined into each, because numba cannot cache a function that takes another one as an argument: it knows a
function by its address, which is another one in each process.

Values are stored as float32 and computed as float64 in both, so that both choose the same actions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

EPSILON = 1e-8  # selection.EPSILON
TINY = 1.1754943508222875e-38  # selection.TINY
ILLEGAL = -1e30  # tree.ILLEGAL
LOWEST, ZERO, LOSS, PARENT, REDUCED = range(5)  # selection.FIRST_PLAY
SIBLINGS, TREE, UNCHANGED = range(3)  # selection.NORMALIZE
FLAGS = {"cache": True, "nogil": True, "error_model": "numpy"}


class Row(NamedTuple):
    """One tree of the batch, of N nodes and A actions; see `tree.Tree`."""

    children: Any  # [N, A]
    logits: Any
    prior: Any
    visits: Any  # [N]
    value: Any
    raw: Any
    reward: Any
    discount: Any
    bounds: Any  # [2]
    tie: Any  # [A], noise that breaks ties
    gumbel: Any  # [A], noise at the root
    schedule: Any  # visits that each simulation wants of the root's action (Sequential Halving)
    simulation: int  # how many there were in this search
    q: Any  # [A], scratch: action values at the node
    n: Any  # [A], scratch: visits of the actions


class Seen(NamedTuple):
    """What the tried actions of a node sum up to."""

    count: float  # their visits
    most: float  # the most visits of one
    low: float  # the lowest of their values and the node's own
    high: float
    mass: float  # their prior, each at least TINY
    weighted: float  # Σ prior · value, with the same priors
    prior: float  # their prior as it is


@njit(**FLAGS, inline="always")
def _look(row: Any, node: int) -> Any:
    """Values and visits of the actions of `node`, into `row.q` and `row.n` (0 where untried), and their `Seen`."""
    count, most, mass, weighted, tried = 0.0, 0.0, 0.0, 0.0, 0.0
    low: Any = np.float64(row.value[node])
    high: Any = low
    for a in range(row.children.shape[1]):
        child = row.children[node, a]
        if child >= 0:
            qa = np.float64(row.reward[child]) + np.float64(row.discount[child]) * np.float64(row.value[child])
            na = np.float64(row.visits[child])
            row.q[a], row.n[a] = qa, na
            count += na
            most = max(most, na)
            low, high = min(low, qa), max(high, qa)
            p: Any = np.float64(row.prior[node, a])
            tried += p
            p = max(p, TINY)
            mass += p
            weighted += p * qa
        else:
            row.q[a], row.n[a] = 0.0, 0.0
    return Seen(count, most, low, high, mass, weighted, tried)


@njit(**FLAGS, inline="always")
def _range(how: int, low: float, high: float, bounds: Any) -> tuple[float, float]:
    """What is subtracted from a value, and what it is divided by."""
    if how == SIBLINGS:
        return low, max(high - low, EPSILON)
    if how == TREE and bounds[1] > bounds[0]:
        return np.float64(bounds[0]), np.float64(bounds[1]) - np.float64(bounds[0])
    return 0.0, 1.0


@njit(**FLAGS, inline="always")
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


@njit(**FLAGS, inline="always")
def _select_puct(parameters: Any, row: Any, node: int) -> int:
    """`selection.PUCT.score`, and the outcome that is due at a chance node."""
    c_init, c_base, reduction = parameters[0], parameters[1], parameters[4]
    normalize, first_play, chances = int(parameters[2]), int(parameters[3]), int(parameters[5])
    actions = row.children.shape[1]
    own, total = np.float64(row.value[node]), np.float64(row.visits[node])
    seen = _look(row, node)
    best: Any = -math.inf
    choice = -1
    chance = False
    for a in range(actions - chances, actions):
        chance |= row.logits[node, a] != -math.inf
    if chance:
        for a in range(actions):
            score = np.float64(row.prior[node, a]) / (1 + row.n[a]) + np.float64(row.tie[a])
            if row.logits[node, a] != -math.inf and score > best:
                best, choice = score, a
        return choice
    base, spread = _range(normalize, seen.low, seen.high, row.bounds)
    missing = (_first_play(first_play, reduction, own, seen.low, seen.prior) - base) / spread
    bonus = math.sqrt(total) * (c_init + math.log1p((total + 1) / c_base))
    for a in range(actions):
        if row.logits[node, a] == -math.inf:
            continue
        known = (row.q[a] - base) / spread if row.n[a] > 0 else missing
        score = known + bonus * np.float64(row.prior[node, a]) / (1 + row.n[a]) + np.float64(row.tie[a])
        if score > best:
            best, choice = score, a
    return choice


@njit(**FLAGS, inline="always")
def _select_uct(parameters: Any, row: Any, node: int) -> int:
    """`selection.UCT.score`."""
    c, normalize = parameters[0], int(parameters[1])
    seen = _look(row, node)
    base, spread = _range(normalize, seen.low, seen.high, row.bounds)
    bonus = math.log(np.float64(row.visits[node]))
    best: Any = -math.inf
    choice = -1
    for a in range(row.children.shape[1]):
        if row.logits[node, a] == -math.inf:
            continue
        if row.n[a] > 0:
            score = (row.q[a] - base) / spread + c * math.sqrt(bonus / row.n[a])
        else:
            score = 1e9 + np.float64(row.prior[node, a])
        score += np.float64(row.tie[a])
        if score > best:
            best, choice = score, a
    return choice


@njit(**FLAGS, inline="always")
def _select_gumbel(parameters: Any, row: Any, node: int) -> int:
    """`selection.halving_score` at the root, `selection.Gumbel.score` below it."""
    value_scale, max_visit_init, normalize = parameters[0], parameters[1], int(parameters[2])
    actions, q, n = row.children.shape[1], row.q, row.n
    seen = _look(row, node)
    mixed = np.float64(row.raw[node]) + seen.count * (seen.weighted / seen.mass if seen.mass > 0 else 0.0)
    mixed = mixed / (1 + seen.count)
    low: Any = math.inf
    high: Any = -math.inf
    top: Any = -math.inf
    for a in range(actions):
        if n[a] == 0:
            q[a] = mixed
        low, high = min(low, q[a]), max(high, q[a])
        top = max(top, np.float64(row.logits[node, a]))
    base, spread = _range(normalize, low, high, row.bounds)
    scale = (max_visit_init + seen.most) * value_scale
    for a in range(actions):
        q[a] = (q[a] - base) / spread * scale
    best: Any = -math.inf
    choice = -1
    if node == 0:
        wanted = row.schedule[row.simulation]
        for a in range(actions):
            if row.prior[node, a] == 0 and row.logits[node, a] == -math.inf:
                continue
            if n[a] == wanted:
                score = max(np.float64(row.gumbel[a]) + (np.float64(row.logits[node, a]) - top) + q[a], -1e9)
                if score > best:
                    best, choice = score, a
        return choice
    top = -math.inf
    for a in range(actions):
        q[a] += np.float64(row.logits[node, a])
        top = max(top, q[a])
    if top == -math.inf:
        return -1
    mass = 0.0
    for a in range(actions):
        q[a] = math.exp(q[a] - top)
        mass += q[a]
    for a in range(actions):
        if row.logits[node, a] == -math.inf:
            continue
        score = q[a] / mass - n[a] / (1 + seen.count)
        if score > best:
            best, choice = score, a
    return choice


@njit(**FLAGS, inline="always")
def _walk(select: Any, where: tuple[Any, ...]) -> None:
    """For each tree of the batch the node and the action to expand, and the child: -1 if it is new.

    `index_out` is the index of the node's state in the flat memory `[N * B]`.
    """
    (
        parameters, tie, gumbel, table, considered, begun, depth, children, logits, prior, parent, action, visits,
        value, raw, reward, discount, bounds, node_out, action_out, leaf_out, index_out, scratch,
    ) = where  # fmt: skip
    for b in range(children.shape[0]):
        below, ends = children[b], discount[b]
        row = Row(
            below, logits[b], prior[b], visits[b], value[b], raw[b], reward[b], ends, bounds[b], tie[b], gumbel[b],
            table[considered[b]], visits[b, 0] - begun[b], scratch[0], scratch[1],
        )  # fmt: skip
        node, level = 0, 0
        while True:
            a = select(parameters, row, node)
            if a < 0:  # no legal action: the node itself is the leaf
                node_out[b], action_out[b], leaf_out[b] = max(parent[b, node], 0), max(action[b, node], 0), node
                break
            level += 1
            child = below[node, a]
            if child < 0 or ends[child] == 0 or level >= depth:
                node_out[b], action_out[b], leaf_out[b] = node, a, child
                break
            node = child
        index_out[b] = node_out[b] * children.shape[0] + b


@njit(**FLAGS)
def puct(*where: Any) -> None:
    """`_walk` with `selection.PUCT`."""
    _walk(_select_puct, where)


@njit(**FLAGS)
def uct(*where: Any) -> None:
    """`_walk` with `selection.UCT`."""
    _walk(_select_uct, where)


@njit(**FLAGS)
def gumbel(*where: Any) -> None:
    """`_walk` with `selection.Gumbel`."""
    _walk(_select_gumbel, where)


@njit(**FLAGS)
def expand(
    slot: int, node_in: Any, action_in: Any, leaf_in: Any, reward_in: Any, discount_in: Any, logits_in: Any,
    value_in: Any, children: Any, logits: Any, prior: Any, parent: Any, action: Any, visits: Any, value: Any, raw: Any,
    reward: Any, discount: Any, bounds: Any,
) -> int:  # fmt: skip
    """Write the new nodes, then back up in each row. Returns the first row with a value that is not finite, or -1."""
    actions = children.shape[2]
    for b in range(children.shape[0]):
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
