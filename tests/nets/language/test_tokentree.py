"""Attention over a token tree is that of each row alone, in blocks of queries or with all keys."""

from __future__ import annotations

import math

import pytest
import torch

from foresight.nets.language.tokentree import BLOCK, TokenTree
from tests.sabotage import change, sabotaged_by

SHARED = [7, 8, 9]
GROUPS = [[*SHARED, p, 5, *(10 + (p * g + i) % 7 for i in range(12 + g))] for p in range(9) for g in range(3)]


def _each(rows: list[list[int]], tree: TokenTree, *qkv: torch.Tensor) -> torch.Tensor:
    """Causal attention of each row, `[N, H, D]`: a node has the same result in all of its rows."""
    query, key, value = qkv
    found = torch.zeros(len(tree), *query.shape[1::2], dtype=query.dtype)
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    for path in tree.paths:
        scores = query[0][:, path] @ key[0][:, path].transpose(-1, -2) / math.sqrt(query.shape[-1])
        hidden = torch.ones(len(path), len(path), dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[0][:, path]
        found = found.index_copy(0, torch.tensor(path), mixed.transpose(0, 1))
    return found


@pytest.mark.parametrize(("rows", "blocks"), [(GROUPS, True), (GROUPS[::-2], True), (GROUPS[:2], False)])
@sabotaged_by("foresight.nets.language.tokentree.TokenTree.attend", change("scale", lambda s: 0.5 * s))
def test_attention_and_its_gradient_are_those_of_each_row(rows, blocks):
    tree = TokenTree(rows)
    assert (tree._blocks is not None) == blocks and len(tree) % BLOCK
    torch.manual_seed(0)
    qkv = [torch.randn(1, heads, len(tree), 8, requires_grad=True) for heads in (4, 2, 2)]
    found, plain = tree.attend(*qkv, 8**-0.5)[0], _each(rows, tree, *(x.double() for x in qkv))
    torch.testing.assert_close(found, plain.float(), atol=1e-5, rtol=1e-5)
    weights = torch.randn(found.shape)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), qkv) for x in (found, plain))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@sabotaged_by("foresight.nets.language.tokentree.TokenTree._attend_in_blocks", change("bias", torch.zeros_like))
def test_in_mixed_precision_blocks_are_exact_but_for_the_rounding_of_the_result():
    tree = TokenTree(GROUPS)
    torch.manual_seed(0)
    exact = [torch.randn(1, heads, len(tree), 8).bfloat16() for heads in (4, 2, 2)]
    plain = _each(GROUPS, tree, *(x.double() for x in exact))
    with torch.autocast("cpu", torch.bfloat16):
        found = tree.attend(*exact, 8**-0.5)[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), plain, atol=1e-2, rtol=1e-2)
