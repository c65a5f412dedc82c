"""Trees of tensors (a tensor, or a dict of trees): what an observation may be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresight.data.trajectory import Tree, tree_map


def stack(trees: Sequence[Tree], dim: int = 1) -> Tree:
    """Trees of equal form as one, with a new dim: T rows `[B, ...]` become `[B, T, ...]`."""
    if isinstance(trees[0], dict):
        return {key: stack([tree[key] for tree in trees], dim) for key in trees[0]}
    return torch.stack(list(trees), dim)


def concat(trees: Sequence[Tree]) -> Tree:
    """Trees of equal form, one after the other along the first dim."""
    if isinstance(trees[0], dict):
        return {key: concat([tree[key] for tree in trees]) for key in trees[0]}
    return torch.cat(list(trees))


def to(tree: Tree, device: str | torch.device) -> Tree:
    """The tree on `device`; the same object if it is there already."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    return tree_map(lambda x: x.to(device), tree)


def pick(tree: Tree, rows: torch.Tensor) -> Tree:
    """The rows of the first dim that `rows` (int64) names."""
    return tree_map(lambda x: x[rows], tree)
