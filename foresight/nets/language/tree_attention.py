"""Attention over a token tree: each level attends to itself causally and to the levels above, shared by its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foresight.errors import UserError
from foresight.nets.language.cache import DecodeStep, RowMap
from foresight.nets.language.tokentree import TokenTree

FEW = 16  # queries of one row and head, as in decoding: with fewer, keys are not transposed for the product
ATTENTION = "foresight_tree"  # the name of `tree_attention` in transformers


def register() -> None:
    """Make the attention known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, tree_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)  # the tree is the mask


def tree_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, T, D]
    key: Tensor,  # [B, KV, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one level over itself (causally) and over all levels above it; `[B, T, H, D]`.

    `tree` is a `TokenTree`, or a view of the cache (`Prefill`, `DecodeStep`, `Extension`). Raises UserError for
    attention sinks and soft caps, which would change the result.
    """
    from foresight.nets.language import fused_attention  # late: numba is slow to import

    check_plain(kwargs)
    rows, heads, width, size = query.shape
    kv_heads = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    if isinstance(tree, TokenTree):
        return tree.attend(query, key, value, scale), None
    layer: Any = module.layer_idx
    above, own = tree.levels, tree.update(layer, key, value)
    if isinstance(tree, DecodeStep) and fused_attention.able(query, tree, layer):
        found = fused_attention.attend(query[:, :, 0] * scale, tree, layer)
        return found.to(query.dtype)[:, None], None
    query = (query * scale).reshape(rows, kv_heads, heads // kv_heads * width, size)
    scores = [_scores(query, level.keys[layer], level.blocked, level.row_map) for level in above]
    mine = _scores(query, own[0], tree.blocked)
    if width > 1:
        future = torch.ones(width, width, dtype=torch.bool, device=query.device).triu(1)
        mine = mine.view(rows, kv_heads, -1, width, width).masked_fill(future, -torch.inf).view_as(mine)
    weights = torch.cat([*scores, mine], -1).softmax(-1)
    parts = weights.split([s.shape[-1] for s in scores] + [mine.shape[-1]], -1)
    mixed = parts[-1] @ own[1]
    for part, level in zip(parts[:-1], above, strict=True):
        mixed = mixed + _mix(part, level.values[layer], level.row_map)
    return mixed.view(rows, heads, width, -1).transpose(1, 2), None


def check_plain(options: Mapping[str, Any]) -> None:
    """Raise UserError for sinks and a soft cap among the options of an attention: they would change the result."""
    for name, what in (("s_aux", "sinks"), ("softcap", "a soft cap")):
        if options.get(name) is not None:
            raise UserError(f"This model's attention has {what}, which is not supported: choose one without {what}.")


def _scores(query: Tensor, keys: Tensor, blocked: Tensor | None, row_map: RowMap | None = None) -> Tensor:
    """Scores `[B, KV, R, t]` of queries `[B, KV, R, D]` against the keys `[b, KV, t, D]` of their parent rows."""
    grouped = _grouped(query, keys.shape[0], row_map)
    if grouped.shape[2] < FEW:  # the product with transposed keys would take twice as long
        scores = (keys @ grouped.transpose(-1, -2)).transpose(-1, -2)
    else:
        scores = grouped @ keys.transpose(-1, -2)
    if blocked is not None:
        scores.masked_fill_(blocked[:, None, None, :], -torch.inf)
    return _ungrouped(scores, query.shape[2], row_map)


def _mix(weights: Tensor, values: Tensor, row_map: RowMap | None = None) -> Tensor:
    """The weighted values `[B, KV, R, D]` of weights `[B, KV, R, t]` over values `[b, KV, t, D]`."""
    return _ungrouped(_grouped(weights, values.shape[0], row_map) @ values, weights.shape[2], row_map)


def _grouped(rows: Tensor, parents: int, row_map: RowMap | None) -> Tensor:
    """`[B, KV, R, x]` as `[b, KV, F·R, x]`: all children of a parent in one product with its keys or values."""
    count, heads, width, size = rows.shape
    grouped = rows.view(parents, count // parents, heads, width, size) if row_map is None else rows[row_map.children]
    return grouped.transpose(1, 2).reshape(parents, heads, -1, size)


def _ungrouped(grouped: Tensor, width: int, row_map: RowMap | None) -> Tensor:
    """The inverse of `_grouped`."""
    parents, heads, _, size = grouped.shape
    rows = grouped.view(parents, heads, -1, width, size).transpose(1, 2).reshape(-1, heads, width, size)
    return rows if row_map is None else rows[row_map.index]
