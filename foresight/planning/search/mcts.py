"""Monte Carlo tree search over a batch of positions, with one call of the model per simulation for all of them.

The search knows neither rules nor networks: a `Model` does. True rules, MuZero's latent dynamics and a wrapper that
samples actions are all the same to it. Two players need no branch: a model whose mover changes says so with a
discount of -1 (its values are seen by the player to move, its rewards by the player who moved), and a game that
ends with a discount of 0. What stands below such a node never counts, so the search stops there.

    result = search(model, obs, simulations=50, rule=PUCT())
    result.action, result.weights, result.value, result.tree
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.trajectory import tree_map
from foresight.errors import NotFinite, UserError
from foresight.planning.search import selection
from foresight.planning.search.selection import PUCT, UCT, Gumbel, Node
from foresight.planning.search.tree import NONE, Tree, _write, plant, priors

BACKENDS = ("auto", "compiled", "tensor")


class Model(Protocol):
    """What can be searched. B positions at once; a state is a tensor `[B, ...]` or a dict of such.

    Logits `[B, A]` are -inf (or the lowest number of their type) where an action is illegal, at every node.
    """

    def root(self, obs: Any) -> tuple[Tensor, Tensor, Any]:
        """`(logits [B, A], value [B], state)` of the positions to search from."""

    def step(self, state: Any, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, Tensor]:
        """`(state, reward [B], discount [B], logits [B, A], value [B])` after the actions int64 `[B]`.

        `reward` is seen by the player who acted, `value` by the player to move after it; `discount` is 0 where the
        game ended, -1 (or -gamma) where the mover changed, 1 (or gamma) otherwise. A row whose search ended in a
        terminal node asks again for the step that led there; its answer is not used.
        """


class SearchResult(NamedTuple):
    """What a search found.

    - `action` int64 `[B]`: what to play;
    - `weights` `[B, A]` float32: the policy target (PUCT, UCT: shares of the visits; Gumbel: π'); sums to 1;
    - `value` `[B]` float32: the root's mean value, the value target, seen by the player to move;
    - `tree`: all of it.
    """

    action: Tensor
    weights: Tensor
    value: Tensor
    tree: Tree

    @property
    def visits(self) -> Tensor:
        """How often each action was tried at the root, int64 `[B, A]`."""
        return self.tree.child_visits()


@dataclasses.dataclass(frozen=True)
class Dirichlet:
    """Noise for the root's prior; see `select.dirichlet`."""

    alpha: float = 0.3
    fraction: float = 0.25


@torch.no_grad()
def search(
    model: Model,
    obs: Any,
    simulations: int,
    rule: PUCT | UCT | Gumbel = PUCT(),  # noqa: B008 (frozen)
    *,
    noise: Dirichlet | None = None,
    temperature: float = 0.0,
    legal: Tensor | None = None,
    generator: torch.Generator | None = None,
    max_depth: int | None = None,
    reuse: Tree | None = None,
    backend: str = "auto",
) -> SearchResult:
    """Search from the positions `obs` (whatever `model.root` takes) with `simulations` calls of `model.step`.

    - `noise`: Dirichlet noise on the root's prior (self-play with PUCT); Gumbel has its own;
    - `temperature`: play in proportion to visits^(1/temperature); 0 plays the most visited action (the first among
      equals). Gumbel always plays its best considered action;
    - `legal` bool `[B, A]`: legal actions at the root, beside those that the model's logits rule out;
    - `generator`: for noise, ties (which it breaks at random: without it the first action wins) and the action;
    - `max_depth`: edges from the root that a simulation may go down;
    - `reuse`: what `advance` kept of the last search; its counts stay, so `simulations` come on top of them;
    - `backend`: "compiled" (numba, CPU), "tensor" (any device), or "auto": by where the model's logits are. Equal
      generators give equal trees.

    Without simulations it is the raw policy: weights are the prior, value is the model's.
    Raises UserError for a position without a legal action, a number from the model that is not finite (with the
    position), fewer than 0 simulations or more than memory holds, an unknown backend, and Gumbel on a reused tree.
    """
    if isinstance(simulations, bool) or not isinstance(simulations, int):
        raise UserError(f"The number of simulations must be a whole number, not {simulations!r}.")
    if simulations < 0:
        raise UserError(f"The number of simulations must be 0 (the raw policy) or more, not {simulations}.")
    if max_depth is not None and max_depth < 1:
        raise UserError(f"max_depth must be at least 1 edge, or None for no limit, not {max_depth}.")
    if backend not in BACKENDS:
        raise errors.unknown("search backend", backend, BACKENDS)
    if reuse is not None and isinstance(rule, Gumbel):
        raise UserError(
            "Gumbel plans its visits from the first to the last: it cannot go on in a reused tree. Use PUCT."
        )
    logits, value, state = model.root(obs)
    if (row := _bad_row(logits, value)) is not None:
        raise _not_finite(model, state, row, "")
    logits, _ = priors(logits)
    if legal is not None:
        logits = logits.masked_fill(~legal.to(logits.device), -torch.inf)
    if (stuck := (logits == -torch.inf).all(-1)).any():
        row = int(stuck.nonzero()[0])
        raise UserError(f"Row {row} has no legal action: the game is over there. Begin a new one before searching.")
    if noise is not None:
        logits = selection.dirichlet(logits, noise.alpha, noise.fraction, generator)
    tree = plant(logits, value, state, simulations, reuse)
    tie, gumbel = torch.zeros_like(logits), torch.zeros_like(logits)
    if isinstance(rule, Gumbel):
        if rule.scale and generator is not None:
            gumbel = rule.scale * selection.gumbel_noise(logits, generator)
    elif generator is not None:
        tie = selection.tie_noise(logits, generator)

    compiled = logits.device.type == "cpu" if backend == "auto" else backend == "compiled"
    run = _compiled if compiled else _tensors
    run(tree, model, simulations, rule, tie, gumbel, simulations + tree.size if max_depth is None else max_depth)
    tree.size += simulations
    return _result(tree, rule, gumbel, temperature, generator)


def _result(
    tree: Tree, rule: PUCT | UCT | Gumbel, gumbel: Tensor, temperature: float, generator: torch.Generator | None
) -> SearchResult:
    node = view(tree, torch.zeros(tree.shape[0], dtype=torch.int64, device=tree.children.device))
    count, value = node.visits.sum(-1, keepdim=True), tree.value[:, 0].clone()
    if isinstance(rule, Gumbel):
        weights = torch.softmax(selection.improved_logits(node, rule), -1) if count.any() else node.prior
        score = selection.halving_score(node, gumbel.double(), node.visits.amax(-1), rule)
        action = score.masked_fill(~node.legal, -torch.inf).argmax(-1)
        return SearchResult(action, weights.float(), value, tree)
    weights = torch.where(count > 0, node.visits / count.clamp(min=1), node.prior)
    if temperature == 0:
        action = weights.masked_fill(~node.legal, -1.0).argmax(-1)
    else:
        sharp = torch.softmax(weights.clamp(min=selection.TINY).log() / temperature, -1) * node.legal
        home = generator.device if generator is not None else sharp.device
        action = torch.multinomial(sharp.to(home), 1, generator=generator).squeeze(-1).to(sharp.device)
    return SearchResult(action, weights.float(), value, tree)


def view(tree: Tree, node: Tensor) -> Node:
    """What rules see of the nodes int64 `[B]`."""
    batch = torch.arange(len(node), device=node.device)
    children = tree.children[batch, node].long()
    there = children >= 0
    index = children.clamp(min=0)

    def of(x: Tensor) -> Tensor:
        return x.gather(1, index).double().masked_fill(~there, 0.0)

    logits = tree.logits[batch, node].double()
    return Node(
        logits=logits,
        prior=tree.prior[batch, node].double(),
        q=of(tree.reward) + of(tree.discount) * of(tree.value),
        visits=of(tree.visits),
        legal=logits != -torch.inf,
        value=tree.value[batch, node].double(),
        raw=tree.raw[batch, node].double(),
        total=tree.visits[batch, node].double(),
        low=tree.bounds[:, 0].double(),
        high=tree.bounds[:, 1].double(),
    )


# --- the two backends


def _compiled(
    tree: Tree, model: Model, simulations: int, rule: PUCT | UCT | Gumbel, tie: Tensor, gumbel: Tensor, depth: int
) -> None:
    """The tree in numba; the model's tensors are read where they are."""
    from foresight.planning.search import kernels

    rows, _, actions = tree.shape
    kind, numbers = rule.code()
    table, considered = _halving(tree, rule, simulations)
    arrays = tuple(getattr(tree, name).numpy() for name in _ARRAYS)
    node, action, leaf, index = (torch.empty(rows, dtype=torch.int64) for _ in range(4))
    ends = (node.numpy(), action.numpy(), leaf.numpy())
    scratch = np.empty((2, actions))
    begun = tree.visits[:, 0].numpy().copy()
    down = (
        kind, numbers, tie.numpy(), gumbel.numpy(), table.numpy(), considered.numpy(), begun, depth, *arrays, *ends,
        index.numpy(), scratch,
    )  # fmt: skip
    memory = tree_map(_flat, tree.state)
    plain = type(memory) is Tensor
    for slot in range(tree.size, tree.size + simulations):
        kernels.descend(*down)
        before = memory.index_select(0, index) if plain else trees.pick(memory, index)
        found, reward, discount, logits, value = model.step(before, action)
        _write(tree.state, found, slot)
        bad = kernels.expand(slot, *ends, _plain(reward), _plain(discount), _plain(logits), _plain(value), *arrays)
        if bad >= 0:
            raise _not_finite(model, _roots(tree), bad, _path(tree, bad, int(node[bad]), int(action[bad])))


def _tensors(
    tree: Tree, model: Model, simulations: int, rule: PUCT | UCT | Gumbel, tie: Tensor, gumbel: Tensor, depth: int
) -> None:
    """The same tree as tensors that never leave the device: the definition, which the kernels are held to."""
    rows = tree.shape[0]
    device = tree.children.device
    batch = torch.arange(rows, device=device)
    table, considered = (x.to(device) for x in _halving(tree, rule, simulations))
    begun = tree.visits[:, 0].clone()
    for slot in range(tree.size, tree.size + simulations):
        # Down: all rows together, those that have arrived stand still.
        node = torch.zeros(rows, dtype=torch.int64, device=device)
        last, action = node.clone(), torch.full_like(node, NONE)
        leaf, walking = torch.full_like(node, NONE), torch.ones(rows, dtype=torch.bool, device=device)
        level = 0
        while level < depth:
            seen = view(tree, node)
            if isinstance(rule, Gumbel) and level == 0:
                wanted = table[considered, (tree.visits[:, 0] - begun).long()].double()
                score = selection.halving_score(seen, gumbel.double(), wanted, rule)
            else:
                score = rule.score(seen) + tie.double()
            score = score.masked_fill(~seen.legal, -torch.inf)
            choice, stuck = score.argmax(-1), ~seen.legal.any(-1)
            level += 1
            child = tree.children[batch, node, choice].long()
            ended = (child < 0) | (tree.discount[batch, child.clamp(min=0)] == 0) | (level >= depth)
            last = torch.where(walking, torch.where(stuck, tree.parent[batch, node].long(), node), last)
            action = torch.where(walking, torch.where(stuck, tree.action[batch, node].long(), choice), action)
            leaf = torch.where(walking, torch.where(stuck, node, child), leaf)
            walking = walking & ~(ended | stuck)
            node = torch.where(walking, child, node)
            if not walking.any():
                break

        index = last.clamp(min=0) * rows + batch
        before = trees.pick(tree_map(_flat, tree.state), index)
        state, reward, discount, logits, value = model.step(before, action.clamp(min=0))
        if (bad := _bad_row(logits, value, reward, discount)) is not None:
            raise _not_finite(model, _roots(tree), bad, _path(tree, bad, int(last[bad]), int(action[bad])))
        _write(tree.state, state, slot)
        new = leaf < 0
        tree.children[batch[new], last[new], action[new]] = slot
        tree.parent[:, slot] = torch.where(new, last, NONE).int()
        tree.action[:, slot] = torch.where(new, action, NONE).int()
        tree.logits[:, slot], tree.prior[:, slot] = priors(logits)
        for name, x in (("reward", reward), ("discount", discount), ("value", value), ("raw", value)):
            getattr(tree, name)[:, slot] = torch.where(new, x.float(), 0.0)

        # Up: again all rows together, until the last one has reached its root.
        node = torch.where(new, slot, leaf)
        tree.visits[batch, node] += 1
        found = tree.raw[batch, node].double()
        while True:
            parent = tree.parent[batch, node].long()
            climbing = (parent >= 0).nonzero().squeeze(-1)
            if not len(climbing):
                break
            here, above = node[climbing], parent[climbing]
            r, g = tree.reward[climbing, here].double(), tree.discount[climbing, here].double()
            edge = (r + g * tree.value[climbing, here].double()).float()
            tree.bounds[climbing, 0] = torch.minimum(tree.bounds[climbing, 0], edge)
            tree.bounds[climbing, 1] = torch.maximum(tree.bounds[climbing, 1], edge)
            found[climbing] = r + g * found[climbing]
            count = tree.visits[climbing, above].double()
            mean = (tree.value[climbing, above].double() * count + found[climbing]) / (count + 1)
            tree.value[climbing, above] = mean.float()
            tree.visits[climbing, above] += 1
            node[climbing] = above


_ARRAYS = (
    "children", "logits", "prior", "parent", "action", "visits", "value", "raw", "reward", "discount", "bounds",
)  # fmt: skip


def _halving(tree: Tree, rule: PUCT | UCT | Gumbel, simulations: int) -> tuple[Tensor, Tensor]:
    """`(table, considered)`: the plan of visits for every number of considered actions, and that number `[B]`."""
    if not isinstance(rule, Gumbel):
        return torch.zeros(1, 1, dtype=torch.int64), torch.zeros(tree.shape[0], dtype=torch.int64)
    considered = (tree.logits[:, 0] != -torch.inf).sum(-1).clamp(max=rule.considered)
    most = int(considered.max())
    wanted = set(considered.tolist())  # rows of the table that nobody asks for stay empty
    table = torch.zeros(most + 1, max(simulations, 1), dtype=torch.int64)
    for m in wanted:
        table[m] = torch.tensor(selection.considered_visits(m, table.shape[1]))
    return table, considered


def _flat(x: Tensor) -> Tensor:
    """`[N, B, ...]` as `[N * B, ...]`, the same memory."""
    return x.flatten(0, 1)


def _plain(x: Tensor) -> Any:
    return (x if x.dtype == torch.float32 else x.float()).numpy()


def _bad_row(logits: Tensor, *numbers: Tensor) -> int | None:
    """The first row with a number that is not finite (logits may be -inf), if there is one."""
    bad = (logits.isnan() | (logits == torch.inf)).any(-1)
    for x in numbers:
        bad = bad | ~x.isfinite()
    return int(bad.nonzero()[0]) if bad.any() else None


def _roots(tree: Tree) -> Any:
    """The states that the search began from."""
    return tree_map(lambda x: x[0], tree.state)


def _not_finite(model: Model, roots: Any, row: int, path: str) -> UserError:
    where = f" after the actions {path}" if path else ""
    picture = getattr(model, "picture", None)  # a model that knows what a position looks like may say so
    shown = f" Row {row} is this position:\n{picture(roots, row)}" if picture else ""
    return NotFinite(
        f"The model gave a number that is not finite for row {row}{where}. The search stops, so that nothing is "
        f"learned from it.{shown}"
    )


def _path(tree: Tree, row: int, node: int, action: int) -> str:
    """The actions from the root to here."""
    steps = [str(action)]
    while node > 0:
        steps.insert(0, str(int(tree.action[row, node])))
        node = int(tree.parent[row, node])
    return "-".join(steps)
