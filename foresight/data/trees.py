"""Trees of tensors (a tensor, or a dict of trees), such as observations, and messages made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from foresight.data.trajectory import Same, Tree
from foresight.data.trajectory import tree_map as tree_map

Message = TypeVar("Message")
ACTION_MASK = "action_mask"  # the key of a dict observation with the mask of allowed actions


def stack(trees: Sequence[Tree], dim: int = 1) -> Tree:
    """Stack trees of equal structure along a new dim: T steps `[B, ...]` become `[B, T, ...]`. Of one tree: views."""
    if isinstance(trees[0], dict):
        return {key: stack([tree[key] for tree in trees], dim) for key in trees[0]}
    if len(trees) == 1 and not trees[0].is_inference():  # autograd refuses views of such a tensor
        return trees[0].unsqueeze(dim)
    return torch.stack(list(trees), dim)


def concat(trees: Sequence[Tree]) -> Tree:
    """Concatenate trees of equal structure along the first dim."""
    if trees[0] is None:
        return None
    if isinstance(trees[0], dict):
        return {key: concat([tree[key] for tree in trees]) for key in trees[0]}
    return torch.cat(list(trees))


def to(tree: Same, device: str | torch.device) -> Same:
    """The tree on `device`; the same object if it is there already."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device)  # type: ignore[return-value]  # a tensor as well
    return tree_map(lambda x: x.to(device), tree)


def pick(tree: Same, rows: torch.Tensor) -> Same:
    """The rows `rows` (int64) of the first dim."""
    return tree_map(lambda x: x[rows], tree)


def leaves(tree: Tree, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree called `name`, with their names: those of the dict `obs` are `obs.view`, `obs.speed`."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{name}.{key}")
    elif tree is not None:
        yield name, tree


def first(tree: Tree) -> torch.Tensor:
    """The first tensor of a tree: all of them have its rows and its device."""
    return next(x for _, x in leaves(tree, ""))


def reset_carry(carry: Same, cut: torch.Tensor) -> Same:
    """The carry with the rows set to zero where `cut` `[B]` is 1. None stays None."""
    over = cut > 0
    return tree_map(lambda x: x.masked_fill(over.to(x.device).view(-1, *[1] * (x.dim() - 1)), 0), carry)


def merge(function: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> Any:
    """Apply `function` to the corresponding leaves of `values`: nested dataclasses, dicts, tuples and lists.

    With one value it is a map over leaves. A leaf that is None in the first is None in the result.
    """
    first = values[0]
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: merge(function, [value[key] for value in values]) for key in first}
    if isinstance(first, list | tuple):
        parts = [merge(function, part) for part in zip(*values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        parts = [merge(function, [getattr(value, name) for value in values]) for name in names]
        return dataclasses.replace(first, **dict(zip(names, parts, strict=True)))
    return function(values)


def join(messages: Sequence[Message]) -> Message:
    """Concatenate messages of equal structure along the first dim; a single message is returned as is."""
    if len(messages) == 1:
        return messages[0]
    joined: Message = merge(lambda leaves: torch.cat(list(leaves)), messages)
    return joined
