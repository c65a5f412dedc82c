"""Monte Carlo tree search over a batch of positions, with one model call per simulation for all of them.

The search takes any `Model`: exact rules, MuZero's latent dynamics, or a wrapper that samples actions. Two-player games
need no branch: the model returns discount -1 when the player changes (values are for the player to move, rewards for
the player who moved) and discount 0 when the game ends. Such terminal nodes are never expanded.

    result = search(model, obs, simulations=50, rule=PUCT())
    result.action, result.weights, result.value, result.tree
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresight import errors
from foresight.data import trajectory, trees
from foresight.data.trajectory import tree_map
from foresight.errors import NotFinite, UserError
from foresight.planning.search import selection
from foresight.planning.search.selection import PUCT as PUCT
from foresight.planning.search.selection import UCT as UCT
from foresight.planning.search.selection import Gumbel as Gumbel
from foresight.planning.search.selection import Node, Rule
from foresight.planning.search.tree import NONE, Tree, _write, new_tree, priors

BACKENDS = ("auto", "compiled", "tensor")
Obs = TypeVar("Obs", contravariant=True)
State = TypeVar("State")


class Model(Protocol[Obs, State]):
    """A model to search in, for B positions at once. A state is a tensor `[B, ...]` or a dict of tensors.

    Logits `[B, A]` are -inf (or the lowest value of their dtype) for illegal actions, at every node.
    """

    def root(self, obs: Obs) -> tuple[Tensor, Tensor, State]:
        """`(logits [B, A], value [B], state)` of the root positions."""

    def step(self, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Tensor, Tensor]:
        """`(state, reward [B], discount [B], logits [B, A], value [B])` after the actions int64 `[B]`.

        `reward` is for the player who acted, `value` for the player to move next; `discount` is 0 where the game ended,
        -1 (or -gamma) where the player changed, 1 (or gamma) otherwise. A row that reached a terminal node repeats the
        step that led there; its result is not used.
        """


class SearchResult(NamedTuple):
    """The result of a search.

    - `action` int64 `[B]`: the action to play;
    - `weights` `[B, A]` float32: the policy target (PUCT, UCT: visit shares; Gumbel: π'); sums to 1;
    - `value` `[B]` float32: the root's mean value, the value target, for the player to move;
    - `tree`: the whole tree.
    """

    action: Tensor
    weights: Tensor
    value: Tensor
    tree: Tree

    @property
    def visits(self) -> Tensor:
        """Visits of the root actions, int64 `[B, A]`."""
        return self.tree.child_visits()


@dataclasses.dataclass(frozen=True)
class Dirichlet:
    """Noise on the root's prior; see `selection.dirichlet`."""

    alpha: float = 0.3
    fraction: float = 0.25


@torch.no_grad()
def search(
    model: Model[Obs, State],
    obs: Obs,
    simulations: int,
    rule: Rule = PUCT(),  # noqa: B008 (frozen)
    *,
    noise: Dirichlet | None = None,
    temperature: float = 0.0,
    legal: Tensor | None = None,
    generator: torch.Generator | None = None,
    max_depth: int | None = None,
    reuse: Tree | None = None,
    backend: str = "auto",
    threads: int = 1,
) -> SearchResult:
    """Search from the positions `obs` (whatever `model.root` takes) with `simulations` calls of `model.step`.

    - `noise`: Dirichlet noise on the root's prior (self-play with PUCT); Gumbel has its own;
    - `temperature`: sample in proportion to visits^(1/temperature); 0 plays the most visited action (ties: the first).
      Gumbel always plays its best considered action;
    - `legal` bool `[B, A]`: legal actions at the root, in addition to the mask in the model's logits;
    - `generator`: for noise, random tie-breaking (without it the first action wins) and the action;
    - `max_depth`: the most edges from the root that a simulation may follow;
    - `reuse`: the subtree that `advance` kept of the last search; `simulations` are added to its visits;
    - `backend`: "compiled" (numba, CPU), "tensor" (any device), or "auto": by the device of the model's logits. Equal
      generators give equal trees;
    - `threads`: of the compiled backend, which divide the rows; with hundreds of rows two are faster. Equal trees.

    With 0 simulations it is the raw policy: weights are the prior, value is the model's.
    Raises UserError for a position without a legal action, a model output that is not finite (with the position), fewer
    than 0 simulations or more than memory holds, a temperature below 0 or not finite, an unknown backend, and `reuse`
    with Gumbel or with a model whose `reuses` is False (sampled actions).
    """
    if isinstance(simulations, bool) or not isinstance(simulations, int):
        raise UserError(f"The number of simulations must be a whole number, not {simulations!r}.")
    if simulations < 0:
        raise UserError(f"The number of simulations must be 0 (the raw policy) or more, not {simulations}.")
    if max_depth is not None and max_depth < 1:
        raise UserError(f"max_depth must be at least 1 edge, or None for no limit, not {max_depth}.")
    if backend not in BACKENDS:
        raise errors.unknown("search backend", backend, BACKENDS)
    if threads < 1:
        raise UserError(f"threads must be at least 1, not {threads}.")
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature must be 0 (the most visited action) or more, and finite, not {temperature}.")
    if reuse is not None and not rule.reuses:
        raise UserError(
            f"{type(rule).__name__} plans all its visits in advance, so it cannot reuse a tree. Use PUCT or UCT, or "
            "leave out reuse."
        )
    if reuse is not None and not getattr(model, "reuses", True):
        raise UserError(
            f"{type(model).__name__} samples other actions at every root, so it cannot reuse a tree. Leave out reuse."
        )
    logits, value, state = model.root(obs)
    if (row := _bad_row(logits, value)) is not None:
        raise _not_finite(model, state, row, "")
    logits, _ = priors(logits)
    if legal is not None:
        logits = logits.masked_fill(~legal.to(logits.device), -torch.inf)
    if (stuck := (logits == -torch.inf).all(-1)).any():
        row = int(stuck.nonzero()[0])
        raise UserError(f"Row {row} has no legal action: its game is over. Start a new game before searching.")
    if noise is not None:
        logits = selection.dirichlet(logits, noise.alpha, noise.fraction, generator)
    tree = new_tree(logits, value, state, simulations, reuse)
    drawn = rule.noise(logits, generator)
    schedule = rule.schedule(logits, simulations)

    compiled = logits.device.type == "cpu" if backend == "auto" else backend == "compiled"
    run = functools.partial(_compiled, threads) if compiled else _tensors
    run(tree, model, simulations, rule, drawn, schedule, simulations + tree.size if max_depth is None else max_depth)
    tree.size += simulations
    root = view(tree, torch.zeros(tree.shape[0], dtype=torch.int64, device=logits.device))
    action, weights = rule.action_and_weights(root, drawn.double(), temperature, generator)
    return SearchResult(action, weights.float(), tree.value[:, 0].clone(), tree)


def view(tree: Tree, node: Tensor) -> Node:
    """The `Node` that rules score, for the nodes int64 `[B]`."""
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
    threads: int,
    tree: Tree,
    model: Model[Any, Any],
    simulations: int,
    rule: Rule,
    noise: Tensor,
    schedule: Tensor | None,
    depth: int,
) -> None:
    """The tree in numba; the model's tensors are read in place."""
    from foresight.planning.search import kernels

    rows, _, actions = tree.shape
    rule_descends, parameters = rule.compiled()
    descend, expand = kernels.divided(rule_descends, threads, rows, actions)
    planned = torch.zeros(rows, 0, dtype=torch.int64) if schedule is None else schedule
    arrays: tuple[Any, ...] = tuple(getattr(tree, name).numpy() for name in _ARRAYS)
    node, action, leaf, index = (torch.empty(rows, dtype=torch.int64) for _ in range(4))
    ends = (node.numpy(), action.numpy(), leaf.numpy())
    begun = tree.visits[:, 0].numpy().copy()
    down: tuple[Any, ...] = (
        parameters, noise.numpy(), planned.numpy(), begun, depth, *arrays, *ends, index.numpy(),
    )  # fmt: skip
    memory = tree_map(_flat, tree.state)
    plain = type(memory) is Tensor
    for slot in range(tree.size, tree.size + simulations):
        descend(*down)
        before = memory.index_select(0, index) if plain else trees.pick(memory, index)
        found, reward, discount, logits, value = model.step(before, action)
        _write(tree.state, found, slot)
        bad = expand(slot, *ends, _plain(reward), _plain(discount), _plain(logits), _plain(value), *arrays)
        if bad >= 0:
            raise _not_finite(model, _roots(tree), bad, _path(tree, bad, int(node[bad]), int(action[bad])))


def _tensors(
    tree: Tree,
    model: Model[Any, Any],
    simulations: int,
    rule: Rule,
    noise: Tensor,
    schedule: Tensor | None,
    depth: int,
) -> None:
    """The same search in tensor operations on any device: the reference for the kernels."""
    rows = tree.shape[0]
    device = tree.children.device
    batch = torch.arange(rows, device=device)
    begun, noise = tree.visits[:, 0].clone(), noise.double()
    for slot in range(tree.size, tree.size + simulations):
        # Down: all rows together; rows that reached a leaf wait.
        node = torch.zeros(rows, dtype=torch.int64, device=device)
        last, action = node.clone(), torch.full_like(node, NONE)
        leaf, walking = torch.full_like(node, NONE), torch.ones(rows, dtype=torch.bool, device=device)
        level = 0
        while level < depth:
            seen = view(tree, node)
            planned = None
            if schedule is not None and level == 0:
                planned = schedule[batch, (tree.visits[:, 0] - begun).long()].double()
            score = rule.noisy_score(seen, noise, planned).masked_fill(~seen.legal, -torch.inf)
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

        # Up: all rows together, until the last one has reached its root.
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


def _flat(x: Tensor) -> Tensor:
    """`[N, B, ...]` as `[N * B, ...]`, the same memory."""
    return x.flatten(0, 1)


def _plain(x: Tensor) -> NDArray[np.float32]:
    return (x if x.dtype == torch.float32 else x.float()).numpy()


def _bad_row(logits: Tensor, *values: Tensor) -> int | None:
    """The first row with a value that is not finite (logits may be -inf), or None."""
    bad = (logits.isnan() | (logits == torch.inf)).any(-1)
    for x in values:
        bad = bad | ~x.isfinite()
    return int(bad.nonzero()[0]) if bad.any() else None


def _roots(tree: Tree) -> trajectory.Tree:
    """The root states."""
    return tree_map(lambda x: x[0], tree.state)


def _not_finite(model: Model[Obs, State], roots: State, row: int, path: str) -> UserError:
    where = f" after the actions {path}" if path else ""
    picture: Callable[[State, int], str] | None = getattr(model, "picture", None)  # optional: the position as text
    shown = f" Row {row} is this position:\n{picture(roots, row)}" if picture else ""
    return NotFinite(
        f"The model returned a value that is not finite for row {row}{where}. The search stops, so that nothing is "
        f"trained on it.{shown}"
    )


def _path(tree: Tree, row: int, node: int, action: int) -> str:
    """The actions from the root to here."""
    steps = [str(action)]
    while node > 0:
        steps.insert(0, str(int(tree.action[row, node])))
        node = int(tree.parent[row, node])
    return "-".join(steps)
