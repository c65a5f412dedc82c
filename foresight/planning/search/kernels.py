"""The compiled search: the same as `mcts._tensors`, row by row. The readable math is in `selection`.

Values are stored as float32 and computed as float64 in both, so that both choose the same actions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

EPSILON = 1e-8  # selection.EPSILON
TINY = 1.1754943508222875e-38  # selection.TINY
ILLEGAL = -1e30  # tree.ILLEGAL


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _first_play(how: int, reduction: float, own: float, low: float, mass: float) -> float:
    if how == 0:
        return low
    if how == 1:
        return 0.0
    if how == 2:
        return -1.0
    if how == 3:
        return own
    return own - reduction * math.sqrt(mass)


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _best(
    kind: int, rule: Any, children: Any, logits: Any, prior: Any, visits: Any, value: Any, raw: Any, reward: Any,
    discount: Any, bounds: Any, tie: Any, gumbel: Any, wanted: int, node: int, q: Any, n: Any,
) -> int:  # fmt: skip
    """The action that the rule selects at `node` of one row, or -1 if none is legal. `wanted` >= 0: Gumbel's root."""
    actions = children.shape[1]
    own, total = np.float64(value[node]), np.float64(visits[node])
    count, mass, weighted, tried_mass = 0.0, 0.0, 0.0, 0.0
    most: Any = 0.0
    low: Any = own
    high: Any = own
    top: Any = -math.inf
    for a in range(actions):
        child = children[node, a]
        if child >= 0:
            qa = np.float64(reward[child]) + np.float64(discount[child]) * np.float64(value[child])
            na = np.float64(visits[child])
            q[a], n[a] = qa, na
            count += na
            most = max(most, na)
            low, high = min(low, qa), max(high, qa)
            p: Any = np.float64(prior[node, a])
            tried_mass += p
            p = max(p, TINY)
            mass += p
            weighted += p * qa
        else:
            q[a], n[a] = 0.0, 0.0
    best: Any = -math.inf
    choice = -1
    if kind == 2:
        mixed = (np.float64(raw[node]) + count * (weighted / mass if mass > 0 else 0.0)) / (1 + count)
        low, high = math.inf, -math.inf
        for a in range(actions):
            if n[a] == 0:
                q[a] = mixed
            low, high = min(low, q[a]), max(high, q[a])
            top = max(top, np.float64(logits[node, a]))
        scale = (rule[1] + most) * rule[0]
        how = int(rule[2])
        if how == 0:
            base, spread = low, max(high - low, EPSILON)
        elif how == 1 and bounds[1] > bounds[0]:
            base, spread = np.float64(bounds[0]), np.float64(bounds[1]) - np.float64(bounds[0])
        else:
            base, spread = 0.0, 1.0
        for a in range(actions):
            q[a] = (q[a] - base) / spread * scale
        if wanted >= 0:
            for a in range(actions):
                if prior[node, a] == 0 and logits[node, a] == -math.inf:
                    continue
                if n[a] == wanted:
                    score = max(np.float64(gumbel[a]) + (np.float64(logits[node, a]) - top) + q[a], -1e9)
                    if score > best:
                        best, choice = score, a
            return choice
        top = -math.inf
        for a in range(actions):
            q[a] += np.float64(logits[node, a])
            top = max(top, q[a])
        if top == -math.inf:
            return -1
        mass = 0.0
        for a in range(actions):
            q[a] = math.exp(q[a] - top)
            mass += q[a]
        for a in range(actions):
            if logits[node, a] == -math.inf:
                continue
            score = q[a] / mass - n[a] / (1 + count)
            if score > best:
                best, choice = score, a
        return choice
    chance = False
    for a in range(actions - int(rule[5]), actions):
        chance |= logits[node, a] != -math.inf
    if chance:
        for a in range(actions):
            score = np.float64(prior[node, a]) / (1 + n[a]) + np.float64(tie[a])
            if logits[node, a] != -math.inf and score > best:
                best, choice = score, a
        return choice
    how = int(rule[2])
    if how == 0:
        base, spread = low, max(high - low, EPSILON)
    elif how == 1 and bounds[1] > bounds[0]:
        base, spread = np.float64(bounds[0]), np.float64(bounds[1]) - np.float64(bounds[0])
    else:
        base, spread = 0.0, 1.0
    if kind == 0:
        missing = (_first_play(int(rule[3]), rule[4], own, low, tried_mass) - base) / spread
        bonus = math.sqrt(total) * (rule[0] + math.log1p((total + 1) / rule[1]))
    else:
        missing, bonus = 0.0, math.log(total)
    for a in range(actions):
        if logits[node, a] == -math.inf:
            continue
        p = np.float64(prior[node, a])
        if kind == 0:
            known = (q[a] - base) / spread if n[a] > 0 else missing
            score = known + bonus * p / (1 + n[a])
        elif n[a] > 0:
            score = (q[a] - base) / spread + rule[0] * math.sqrt(bonus / n[a])
        else:
            score = 1e9 + p
        score += np.float64(tie[a])
        if score > best:
            best, choice = score, a
    return choice


@njit(cache=True, nogil=True, error_model="numpy")
def descend(
    kind: int, rule: Any, tie: Any, gumbel: Any, table: Any, considered: Any, begun: Any, depth: int,
    children: Any, logits: Any, prior: Any, parent: Any, action: Any, visits: Any, value: Any, raw: Any, reward: Any,
    discount: Any, bounds: Any, node_out: Any, action_out: Any, leaf_out: Any, index_out: Any, scratch: Any,
) -> None:  # fmt: skip
    """For each row the node and the action to expand, and the child: -1 if it is new.

    `index_out` is the index of the node's state in the flat memory `[N * B]`.
    """
    q, n = scratch[0], scratch[1]
    for b in range(children.shape[0]):
        below, row_logits, row_prior, row_visits = children[b], logits[b], prior[b], visits[b]
        row_value, row_raw, row_reward, row_discount = value[b], raw[b], reward[b], discount[b]
        row_bounds, row_tie, row_gumbel = bounds[b], tie[b], gumbel[b]
        node, level = 0, 0
        while True:
            wanted = -1
            if kind == 2 and node == 0:
                wanted = table[considered[b], row_visits[0] - begun[b]]
            a = _best(
                kind, rule, below, row_logits, row_prior, row_visits, row_value, row_raw, row_reward, row_discount,
                row_bounds, row_tie, row_gumbel, wanted, node, q, n,
            )  # fmt: skip
            if a < 0:  # no legal action: the node itself is the leaf
                node_out[b], action_out[b], leaf_out[b] = max(parent[b, node], 0), max(action[b, node], 0), node
                break
            level += 1
            child = below[node, a]
            if child < 0 or row_discount[child] == 0 or level >= depth:
                node_out[b], action_out[b], leaf_out[b] = node, a, child
                break
            node = child
        index_out[b] = node_out[b] * children.shape[0] + b


@njit(cache=True, nogil=True, error_model="numpy")
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
