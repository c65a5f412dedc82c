"""Beam search on a tree whose best leaf is known by enumeration, and is missed by a narrow beam."""

from __future__ import annotations

import itertools

import pytest
import torch

from foresight.planning.search import beam
from tests.sabotage import change, sabotaged_by

DEPTH, BRANCHES = 3, 2
VALUES = torch.tensor([[3.0, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 9]])  # of the leaves of two trees


def _best(width: int) -> list[list[int]]:
    """Every candidate's continuations are 0 and 1 in turn; the score of a partial path is that of its best leaf.

    Rows are (tree, then the path so far, -1 where it is open).
    """

    def score(row):
        tree, *path = row.tolist()
        leaves = [leaf for leaf in itertools.product((0, 1), repeat=DEPTH)
                  if all(a in (-1, b) for a, b in zip(path, leaf, strict=True))]  # fmt: skip
        return max(float(VALUES[tree, 4 * a + 2 * b + c]) for a, b, c in leaves)

    def propose(rows, t):
        rows = rows.clone()
        rows[:, 1 + t] = torch.arange(len(rows)) % BRANCHES
        return rows, torch.tensor([score(row) for row in rows])

    root = torch.tensor([[0, -1, -1, -1], [1, -1, -1, -1]])
    found = beam.search(root, 2, propose, lambda rows: rows, lambda rows, index: rows[index], width, BRANCHES, DEPTH)
    return found.tolist()


@sabotaged_by("foresight.planning.search.beam.search", change("depth", lambda d: d - 1))
@sabotaged_by("foresight.planning.search.beam.search", change("propose", lambda f: lambda *x: (f(*x)[0], -f(*x)[1])))
@sabotaged_by("foresight.planning.search.beam.search", change("branches", lambda _: 1))
@pytest.mark.parametrize("width", [1, 4])
def test_the_best_leaf_of_every_tree_is_found(width: int) -> None:
    assert _best(width) == [[0, 1, 0, 1], [1, 1, 1, 1]]


def test_without_branches_the_best_of_the_rollouts_is_taken() -> None:
    """Three rollouts of each root, never compared before their end."""
    noise = torch.tensor([[5.0, 0, 1, 9, 9, 0], [0, 1, 5, 0, 0, 7]])
    root = torch.zeros(2, 1)
    rows = torch.arange(6.0)[:, None]
    kept = []
    found = beam.search(
        root, 2, lambda x, t: (rows if t == 0 else x, noise[t]), lambda x: kept.append(x) or x,
        lambda x, index: x[index], 3, 1, 2,
    )  # fmt: skip
    assert sorted(kept[0].flatten().tolist()) == [0, 1, 2, 3, 4, 5]  # all remain
    assert len(found) == 2 and found[0, 0] in (0, 1, 2) and found[1, 0] in (3, 4, 5)
