"""Random playouts, and Monte Carlo tree search with them: UCT, Kocsis & Szepesvári 2006.

For games with native rules both are compiled, one position after the other, on a row of integers changed in place.
OpenSpiel's games use OpenSpiel's own search, in C++.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from foresight.envs.games import boards
from foresight.envs.games.boards import Ints, Stream
from foresight.envs.games.game import Game
from foresight.envs.games.native import Native
from foresight.envs.games.openspiel import Spiel
from foresight.errors import UserError
from foresight.planning.search import memory
from foresight.planning.search.tree import NONE, Tree, priors

UCT_C = 2.0  # OpenSpiel's choice in its examples, for values in [-1, 1]
UNTRIED, ILLEGAL = -1, -2
MOST = 2**31 - 1  # simulations, which OpenSpiel and the compiled loops count in 32 bits


@njit(cache=True, nogil=True)
def _finish(kind: int, height: int, width: int, line: int, komi: float, row: Ints, free: Ints, random: Stream) -> None:
    """Play `row` to its end with uniformly random moves. In Go no player fills an own eye, or passes while other
    moves remain.
    """
    n = height * width
    if kind == boards.DROP:
        while row[n + boards.RESULT] == boards.PLAYING:
            action = boards.draw(random, width)
            if row[n - width + action] == 0:
                boards.play(kind, height, width, line, komi, row, action)
        return
    count = 0
    for cell in range(n):
        if row[cell] == 0:
            free[count] = cell
            count += 1
    if kind == boards.GO:
        while row[n + boards.RESULT] == boards.PLAYING:
            # Captures free points, so the list of empty points is rebuilt every move.
            action, stone, left = n, row[n + boards.TURN] + 1, 0
            for cell in range(n):
                if row[cell] == 0:
                    free[left] = cell
                    left += 1
            while left > 0:
                at = boards.draw(random, left)
                # 64 bits, as elsewhere, or `boards.play` would be compiled once more.
                cell = np.int64(free[at])  # type: ignore[assignment]
                left -= 1
                free[at] = free[left]
                if not boards.own_eye(height, width, row, cell, stone) and boards.playable(
                    kind, height, width, row, cell
                ):
                    action = cell
                    break
            boards.play(kind, height, width, line, komi, row, action)
        return
    while row[n + boards.RESULT] == boards.PLAYING:
        at = boards.draw(random, count)
        cell = np.int64(free[at])  # type: ignore[assignment]
        count -= 1
        free[at] = free[count]
        boards.play(kind, height, width, line, komi, row, cell)


@njit(cache=True, nogil=True)
def _first(n: int, row: Ints) -> float:
    """The result for the first player."""
    result = row[n + boards.RESULT]
    return 1.0 if result == boards.FIRST else (-1.0 if result == boards.SECOND else 0.0)


@njit(cache=True, nogil=True)
def _playouts(
    kind: int, height: int, width: int, line: int, komi: float, rows: Ints, count: int, random: Stream,
    out: NDArray[np.float64],
) -> None:  # fmt: skip
    n = height * width
    work, free = np.empty(rows.shape[1], np.int32), np.empty(n, np.int32)
    for b in range(len(rows)):
        total = 0.0
        for _ in range(count):
            for i in range(len(work)):
                work[i] = rows[b, i]
            _finish(kind, height, width, line, komi, work, free, random)
            total += _first(n, work)
        out[b] = total / count * (1.0 if rows[b, n + boards.TURN] == 0 else -1.0)


@njit(cache=True, nogil=True)
def _grow(
    kind: int, height: int, width: int, line: int, komi: float, root: Ints, simulations: int, c: float, random: Stream,
    children: Ints, mover: Ints, visits: Ints, total: NDArray[np.float64], raw: NDArray[np.float64],
) -> int:  # fmt: skip
    """Search one position; returns the number of nodes, at most simulations + 1, for which the arrays have room.

    `children` `[N, A]`: the child of each action, or UNTRIED, or ILLEGAL; `mover`: who moved into the node; `visits`;
    `total`: results of the simulations through a node, for its mover; `raw`: of the playout that made it, for the
    first player.
    """
    n, actions = height * width, children.shape[1]
    path, work, free = np.empty(simulations + 2, np.int32), np.empty(len(root), np.int32), np.empty(n, np.int32)
    visits[0], total[0], mover[0], raw[0] = 0, 0.0, 0, 0.0
    for a in range(actions):
        children[0, a] = UNTRIED if boards.playable(kind, height, width, root, a) else ILLEGAL
    size = 1
    for _ in range(simulations):
        for i in range(len(work)):
            work[i] = root[i]
        node, depth, fresh = 0, 1, False
        path[0] = 0
        while work[n + boards.RESULT] == boards.PLAYING:
            best, untried = -math.inf, 0
            choice: Any = np.int64(ILLEGAL)
            log = math.log(max(visits[node], 1))
            for a in range(actions):
                child = children[node, a]
                if child == UNTRIED:
                    untried += 1
                    if boards.draw(random, untried) == 0:
                        choice = a
                elif child >= 0 and untried == 0:
                    score = total[child] / visits[child] + c * math.sqrt(log / visits[child])
                    if score > best:
                        best, choice = score, a
            turn = work[n + boards.TURN]
            boards.play(kind, height, width, line, komi, work, choice)
            fresh = untried > 0
            if fresh:
                children[node, choice] = size
                mover[size], visits[size], total[size] = turn, 0, 0.0
                for a in range(actions):
                    children[size, a] = UNTRIED if boards.playable(kind, height, width, work, a) else ILLEGAL
                size += 1
            node = children[node, choice]
            path[depth] = node
            depth += 1
            if fresh:
                break
        _finish(kind, height, width, line, komi, work, free, random)
        result = _first(n, work)
        if fresh:
            raw[node] = result
        for i in range(depth):
            node = path[i]
            visits[node] += 1
            total[node] += result if mover[node] == 0 else -result
    return size


@njit(cache=True, nogil=True)
def _uct(
    kind: int, height: int, width: int, line: int, komi: float, rows: Ints, simulations: int, c: float, random: Stream,
    counts: NDArray[np.int64], values: NDArray[np.float64],
) -> None:  # fmt: skip
    """Fill `counts` and `values` `[B, A]`: visits, and mean results for the player to move."""
    actions = counts.shape[1]
    children = np.empty((simulations + 1, actions), np.int32)
    mover, visits = np.empty(simulations + 1, np.int32), np.empty(simulations + 1, np.int32)
    total, raw = np.empty(simulations + 1), np.empty(simulations + 1)
    for b in range(len(rows)):
        _grow(
            kind, height, width, line, komi, rows[b], simulations, c, random, children, mover, visits, total, raw
        )  # fmt: skip
        for a in range(actions):
            child = children[0, a]
            counts[b, a] = visits[child] if child >= 0 else 0
            values[b, a] = total[child] / visits[child] if child >= 0 else 0.0


def stream(seed: int) -> NDArray[np.int64]:
    """The random state of the compiled loops: int64 `[1]`, never 0. Raises UserError for a seed below 0."""
    if seed < 0:
        raise UserError(f"seed must be at least 0, not {seed}.")
    return np.random.default_rng(seed).integers(1, 2**62, 1)


def playouts(game: Game, position: Tensor, count: int, random: NDArray[np.int64]) -> Tensor:
    """Mean result of `count` random games from every position, for the player to move: float32 `[B]` in [-1, 1].

    For a finished game it is the result. `random` is updated in place.
    """
    if isinstance(game, Native):
        out = np.empty(len(position))
        _playouts(*game.rules, position.numpy(), count, random.view(np.uint64), out)
        return torch.from_numpy(out).float()
    assert isinstance(game, Spiel)
    found = []
    for number in position.tolist():
        start = game.state(number)
        player, total = max(start.current_player(), 0), 0.0
        for _ in range(1 if start.is_terminal() else count):
            state = start.clone()
            while not state.is_terminal():
                legal = state.legal_actions()
                state.apply_action(legal[boards.draw(random.view(np.uint64), len(legal))])
            total += state.returns()[player]
        found.append(total / game.limit / (1 if start.is_terminal() else count))
    return torch.tensor(found, dtype=torch.float32)


def uct(
    game: Game, position: Tensor, simulations: int, random: NDArray[np.int64], c: float = UCT_C
) -> tuple[Tensor, Tensor]:
    """Search every position with random playouts: visits int64 `[B, A]` and mean values float32 `[B, A]`.

    Values are for the player to move, 0 for untried actions. `random` is updated in place. No game may be over.
    OpenSpiel's search also proves results: a proven loss counts as unvisited, and once the position itself is proven
    the best action gets all visits. Raises UserError for a tree that does not fit in memory.
    """
    require_room(game, simulations)
    counts = np.zeros((len(position), game.actions), np.int64)
    values = np.zeros((len(position), game.actions))
    if isinstance(game, Native):
        _uct(*game.rules, position.numpy(), simulations, c, random.view(np.uint64), counts, values)
    else:
        assert isinstance(game, Spiel)
        for b, number in enumerate(position.tolist()):
            _read(_openspiel(game, number, simulations, random, c), simulations, game.limit, counts[b], values[b])
    return torch.from_numpy(counts), torch.from_numpy(values).float()


def grow(
    game: Game, position: Tensor, simulations: int, random: NDArray[np.int64], c: float = UCT_C
) -> tuple[Tensor, Tensor, Tree]:
    """Search one position `[1, ...]` as `uct` does, and keep the tree: visits and values `[1, A]`, and the tree.

    Priors are uniform: UCT has none. `raw` is the result of the playout that made a node, 0 at the root, which has
    none (and in OpenSpiel's trees). With native rules node n is that of the n-th simulation that made one; OpenSpiel's
    are by depth, without those that were never visited. The tree's `state` is empty. Raises UserError as `uct` does.
    """
    require_room(game, simulations)
    if isinstance(game, Native):
        n = simulations + 1
        children, mover = np.empty((n, game.actions), np.int32), np.empty(n, np.int32)
        visits, total, raw = np.empty(n, np.int32), np.empty(n), np.empty(n)
        (row,), stream_ = position.numpy(), random.view(np.uint64)
        size = _grow(*game.rules, row, simulations, c, stream_, children, mover, visits, total, raw)
        children, mover, total, raw = children[:size], mover[:size], total[:size], raw[:size]
        visits = visits[:size]
        legal, over = children != ILLEGAL, (children == ILLEGAL).all(1)
        mover[0] = 1 - int(game.mover(position)[0])
        total[0] *= 1.0 if mover[0] == 0 else -1.0
        discount = np.where(over, 0.0, -1.0)  # the players take turns
        raw *= np.where(mover == 0, -1.0, 1.0)
        tree = _tree(children, legal, visits, total / np.maximum(visits, 1), discount, raw)
        return tree.child_visits(), tree.child_values(), tree
    assert isinstance(game, Spiel)
    number = int(position[0])
    root = _openspiel(game, number, simulations, random, c)
    counts, values = np.zeros((1, game.actions), np.int64), np.zeros((1, game.actions))
    _read(root, simulations, game.limit, counts[0], values[0])
    return torch.from_numpy(counts), torch.from_numpy(values).float(), _openspiel_tree(game, number, root)


def _tree(
    children: Ints, legal: NDArray[np.bool_], visits: Ints, q: NDArray[np.float64], discount: NDArray[np.float64],
    raw: NDArray[np.float64],
) -> Tree:  # fmt: skip
    """The tree of N nodes: `children`, `legal` `[N, A]`; `visits`, `q` (mean result for who moved there), `discount`
    (0: the game is over) and `raw` (for the player to move) `[N]`.
    """
    nodes = len(children)
    parent, action = np.full(nodes, NONE, np.int32), np.full(nodes, NONE, np.int32)
    above, taken = (children >= 0).nonzero()
    below = children[above, taken]
    parent[below], action[below] = above, taken
    over = discount == 0
    value = np.where(over, 0.0, q / np.where(over, 1.0, discount))
    bounds = [q[1:].min(initial=math.inf), q[1:].max(initial=-math.inf)]

    def floats(x: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(x).float().unsqueeze(0)

    logits, prior = priors(torch.from_numpy(np.where(legal, 0.0, -math.inf)).unsqueeze(0))
    return Tree(
        torch.from_numpy(np.maximum(children, NONE)).unsqueeze(0), logits, prior, torch.from_numpy(parent).unsqueeze(0),
        torch.from_numpy(action).unsqueeze(0), torch.from_numpy(visits).unsqueeze(0), floats(value), floats(raw),
        floats(np.where(over, q, 0.0)), floats(discount), torch.tensor([bounds]), None, nodes,
    )  # fmt: skip


def _openspiel(game: Spiel, number: int, simulations: int, random: NDArray[np.int64], c: float) -> Any:
    """The root of OpenSpiel's own search from a position."""
    import pyspiel

    evaluator = pyspiel.RandomRolloutEvaluator(1, seed_of(random))
    # OpenSpiel's first simulation ends at the root: one more, so that all try an action.
    bot = pyspiel.MCTSBot(game.spiel, evaluator, c, simulations + 1, 1000, True, seed_of(random), False)
    return bot.mcts_search(game.state(number))


def _result(node: Any, limit: float) -> float:
    """The mean result of a node for who moved there, or its proven one; in [-1, 1]."""
    total: float = node.outcome[node.player] if node.outcome else node.total_reward / max(node.explore_count, 1)
    return total / limit


def _read(
    root: Any, simulations: int, limit: float, counts: NDArray[np.int64], values: NDArray[np.float64]
) -> None:  # fmt: skip
    """Fill `counts` and `values` `[A]` of one position from OpenSpiel's tree."""
    lost = []
    for child in root.children:
        counts[child.action], values[child.action] = child.explore_count, _result(child, limit)
        lost += [child.action] if child.outcome and values[child.action] < 0 else []
    if root.outcome:  # solved: the search stopped early
        counts[:] = 0
        counts[root.best_child().action] = simulations
    elif counts.sum() > counts[lost].sum():
        counts[lost] = 0


def _openspiel_tree(game: Spiel, number: int, root: Any) -> Tree:
    """OpenSpiel's nodes that were visited, with the legal actions, mover and end of their states."""
    state = game.state(number)
    nodes, discount, at = [root], [-1.0], 0
    states, links, legal = [state], [], [state.legal_actions()]
    while at < len(nodes):
        for child in nodes[at].children:
            if child.explore_count:
                after = states[at].child(child.action)
                over = after.is_terminal()
                links.append((at, child.action, len(nodes)))
                nodes.append(child)
                states.append(after)
                legal.append([] if over else after.legal_actions())
                discount.append(0.0 if over else 1.0 if after.current_player() == child.player else -1.0)
        at += 1
    children = np.full((len(nodes), game.actions), NONE, np.int32)
    mask = np.zeros(children.shape, np.bool_)
    for above, action, below in links:
        children[above, action] = below
    for at, actions in enumerate(legal):
        mask[at, actions] = True
    q = np.array([_result(node, game.limit) for node in nodes])
    tried = sum(child.explore_count for child in root.children)
    q[0] = -sum(child.explore_count * _result(child, game.limit) for child in root.children) / max(tried, 1)
    visits = np.array([node.explore_count for node in nodes], np.int32)
    return _tree(children, mask, visits, q, np.array(discount), np.zeros(len(nodes)))


def require_room(game: Game, simulations: int, more: str = "") -> None:
    """Raise UserError if the tree of `uct` does not fit in memory or in 32 bits; `more` is added to the message."""
    if isinstance(simulations, bool) or not isinstance(simulations, int):
        raise UserError(f"The number of simulations must be a whole number, not {simulations!r}{more}.")
    if isinstance(game, Native):  # OpenSpiel's search has its own limit
        memory.require(1, simulations, game.actions // 3 + 1, more=more)  # the children only
    if simulations >= MOST:
        raise UserError(f"simulations is {simulations:,}{more}, but must be below {MOST:,}: use fewer.")


def seed_of(random: NDArray[np.int64]) -> int:
    """Draw a seed below 2³¹ from the stream."""
    return boards.draw(random.view(np.uint64), 2**31 - 1)
