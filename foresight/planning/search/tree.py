"""`Tree`: a batch of search trees as flat arrays, so that one network call serves all of them.

Each row of the batch is a separate tree with root node 0. The data of an edge (reward and discount of the action) is
stored with its child node, so only child indices and priors need an array per action. Simulation n writes node n in
every row; if it ends in an existing node (terminal, or at the depth limit), node n of that row stays unused.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from foresight.data import trajectory
from foresight.data.trajectory import tree_map
from foresight.errors import UserError
from foresight.planning.search import memory

NONE = -1  # no node
ILLEGAL = -1e30  # logits below this are of illegal actions (-inf, or the lowest value of a float dtype)


@dataclasses.dataclass
class Tree:
    """Trees of B rows with room for N nodes of A actions each.

    - `children` `[B, N, A]` int32: the child of each action, -1 if untried;
    - `logits`, `prior` `[B, N, A]` float32: of the policy; -inf and 0 for illegal actions;
    - `parent`, `action` `[B, N]` int32: the node and action that led here; -1 at the root and for unused nodes;
    - `visits` `[B, N]` int32: simulations that passed through or ended here, including the node's own evaluation; 0 for
      unused nodes;
    - `value` `[B, N]` float32: the mean value of these simulations, for the player to move at the node;
    - `raw` `[B, N]` float32: the model's own value of the node;
    - `reward`, `discount` `[B, N]` float32: of the action that led here. Discount 0: the node is terminal;
    - `bounds` `[B, 2]` float32: the lowest and the highest action value in the row's search;
    - `state`: the model's states, `[N, B, ...]` (a tensor, or dicts of tensors): node first, so that a simulation
      writes contiguous memory;
    - `size`: nodes in use.
    """

    children: Tensor
    logits: Tensor
    prior: Tensor
    parent: Tensor
    action: Tensor
    visits: Tensor
    value: Tensor
    raw: Tensor
    reward: Tensor
    discount: Tensor
    bounds: Tensor
    state: trajectory.Tree
    size: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(B, N, A)`."""
        return self.children.shape[0], self.children.shape[1], self.children.shape[2]

    def child_visits(self, node: int | Tensor = 0) -> Tensor:
        """Visits of the children of `node` (one for all rows, or int64 `[B]`), `[B, A]` int64."""
        return self._of_children(self.visits, node, 0).long()

    def child_values(self, node: int | Tensor = 0) -> Tensor:
        """Action values at `node`: reward + discount · value of the child, 0 if untried. `[B, A]` float32."""
        return self._of_children(self.reward + self.discount * self.value, node, 0.0)

    def _of_children(self, x: Tensor, node: int | Tensor, missing: float) -> Tensor:
        children = self.children[torch.arange(len(self.children), device=x.device), node].long()
        found = x.gather(1, children.clamp(min=0))
        return found.masked_fill(children < 0, missing)


def priors(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`(logits, prior)` as a tree stores them: -inf and 0 for illegal actions. `[..., A]` float32.

    Without legal actions the prior is 0 everywhere, not NaN.
    """
    logits = logits.float()
    logits = logits.masked_fill(logits <= ILLEGAL, -torch.inf)
    return logits, torch.softmax(logits.double(), -1).nan_to_num(0.0).float()


def new_tree(
    logits: Tensor, value: Tensor, state: trajectory.Tree, simulations: int, reuse: Tree | None = None
) -> Tree:
    """A tree with only a root and room for `simulations` nodes; with `reuse`, also the nodes and visits of that tree.

    Shapes: logits `[B, A]`, value `[B]`, state with leading B. The root's prior, raw value and state are always the
    given ones, and its mean value where `reuse` is empty (visits 0). Subtrees of `reuse` below actions that are illegal
    now are dropped, but stay in the root's mean value. Raises UserError if the tree does not fit in memory.
    """
    rows, actions = logits.shape
    old = 1 if reuse is None else reuse.size
    nodes, device = old + simulations, logits.device

    sizes: list[int] = []

    def weigh(x: Tensor) -> Tensor:
        sizes.append(x[:1].nbytes)
        return x

    tree_map(weigh, state)
    memory.require(rows, nodes - 1, actions, sum(sizes), device)

    def filled(shape: tuple[int, ...], kind: torch.dtype, fill: float) -> Tensor:
        return torch.full(shape, fill, dtype=kind, device=device)

    tree = Tree(
        children=filled((rows, nodes, actions), torch.int32, NONE),
        logits=torch.empty((rows, nodes, actions), device=device),
        prior=torch.empty((rows, nodes, actions), device=device),
        parent=filled((rows, nodes), torch.int32, NONE),
        action=filled((rows, nodes), torch.int32, NONE),
        visits=filled((rows, nodes), torch.int32, 0),
        value=filled((rows, nodes), torch.float32, 0.0),
        raw=filled((rows, nodes), torch.float32, 0.0),
        reward=filled((rows, nodes), torch.float32, 0.0),
        discount=filled((rows, nodes), torch.float32, 0.0),
        bounds=torch.tensor([[torch.inf, -torch.inf]], device=device).repeat(rows, 1),
        state=tree_map(lambda x: torch.empty((nodes, *x.shape), dtype=x.dtype, device=x.device), state),
        size=old,
    )
    if reuse is not None:
        if reuse.shape[0] != rows or reuse.shape[2] != actions:
            raise UserError(
                f"reuse has {reuse.shape[0]} rows of {reuse.shape[2]} actions, but the position has {rows} rows of "
                f"{actions}. Start a new search without reuse."
            )
        for name in _NODES:
            getattr(tree, name)[:, :old] = getattr(reuse, name)[:, :old]
        tree.bounds.copy_(reuse.bounds)
        _copy(tree.state, reuse.state, old)
    fresh = tree.visits[:, 0] == 0
    tree.logits[:, 0], tree.prior[:, 0] = priors(logits)
    tree.children[:, 0].masked_fill_(logits == -torch.inf, NONE)  # tried before it was masked as illegal
    tree.raw[:, 0] = value
    tree.value[:, 0] = torch.where(fresh, value.float(), tree.value[:, 0])
    tree.visits[:, 0] += fresh.int()
    _write(tree.state, state)
    return tree


def advance(tree: Tree, action: Tensor, keep: Tensor | None = None) -> Tree:
    """The subtrees below the actions taken, for `search(..., reuse=...)`.

    Shapes: action int64 `[B]`; keep bool `[B]` or None: false where a new game started, so that nothing is kept. A row
    whose action was untried is empty too (its root has 0 visits). Nodes are renumbered without gaps, parents before
    children, up to the size of the largest subtree.
    """
    rows = tree.shape[0]
    used, device = tree.size, tree.children.device
    batch = torch.arange(rows, device=device)
    top = tree.children[batch, 0, action].long()
    if keep is not None:
        top = torch.where(keep, top, NONE)
    member = torch.zeros(rows, used, dtype=torch.bool, device=device)
    parent = tree.parent[:, :used].long()
    for node in range(1, used):  # parents come before their children
        under = member[batch, parent[:, node].clamp(min=0)] & (parent[:, node] >= 0)
        member[:, node] = (top == node) | under
    index = torch.where(member, member.long().cumsum(1) - 1, NONE)  # the new index of each old node
    size = max(int(member.sum(1).max()), 1)
    row, old = member.nonzero(as_tuple=True)
    new = index[row, old]

    small: dict[str, Tensor] = {}
    for name, missing in _NODES.items():
        whole = getattr(tree, name)
        part = torch.full((rows, size, *whole.shape[2:]), missing, dtype=whole.dtype, device=device)
        part[row, new] = whole[row, old]
        small[name] = part
    for name in ("children", "parent"):
        kept = small[name].long()
        moved = index.gather(1, kept.clamp(min=0).flatten(1)).view_as(kept)
        small[name] = torch.where(kept >= 0, moved, NONE).int()
    small["action"][:, 0] = NONE
    small["discount"][:, 0] = 0.0
    small["reward"][:, 0] = 0.0

    def states(x: Tensor) -> Tensor:
        part = torch.zeros((size, *x.shape[1:]), dtype=x.dtype, device=x.device)
        part[new, row] = x[old, row]
        return part

    bounds = torch.where((top >= 0).unsqueeze(1), tree.bounds, tree.bounds.new_tensor([torch.inf, -torch.inf]))
    return Tree(**small, bounds=bounds, state=tree_map(states, tree.state), size=size)


_NODES = {
    "children": NONE, "logits": 0.0, "prior": 0.0, "parent": NONE, "action": NONE, "visits": 0, "value": 0.0,
    "raw": 0.0, "reward": 0.0, "discount": 0.0,
}  # fmt: skip


def _copy(target: trajectory.Tree, source: trajectory.Tree, nodes: int) -> None:
    if isinstance(target, dict):
        for key in target:
            _copy(target[key], source[key], nodes)
    elif target is not None:
        target[:nodes] = source[:nodes]


def _write(target: trajectory.Tree, state: trajectory.Tree, node: int = 0) -> None:
    """Write `state` to node `node` of all rows."""
    if isinstance(target, dict):
        for key in target:
            _write(target[key], state[key], node)
    elif target is not None:
        target[node] = state
