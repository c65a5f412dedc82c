"""Messages are joined leaf by leaf, whatever they are made of."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from foresight.data import trees
from tests.sabotage import sabotaged_by


@dataclasses.dataclass(frozen=True)
class Letter:
    text: torch.Tensor
    parts: dict[str, Any]
    missing: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


def _letter(start: float) -> Letter:
    row = torch.full((2, 3), start)
    return Letter(row, {"pair": Pair(row + 1, [row + 2]), "tuple": (row + 3,)})


@sabotaged_by("foresight.data.trees.merge", lambda f: lambda function, values: f(function, values[::-1]))
def test_join_stacks_every_leaf_along_the_first_dim() -> None:
    joined = trees.join([_letter(0.0), _letter(10.0)])
    assert joined.text[:, 0].tolist() == [0, 0, 10, 10]
    assert joined.parts["pair"].left[:, 1].tolist() == [1, 1, 11, 11]
    assert joined.parts["pair"].right[0][:, 2].tolist() == [2, 2, 12, 12]
    assert joined.parts["tuple"][0].shape == (4, 3)
    assert joined.missing is None


def test_one_message_is_not_copied() -> None:
    letter = _letter(0.0)
    assert trees.join([letter]) is letter


def test_one_tree_is_stacked_without_a_copy_unless_autograd_would_refuse_it() -> None:
    one = {"x": torch.arange(6.0).view(2, 3)}
    stacked = trees.stack([one])["x"]
    assert stacked.shape == (2, 1, 3) and stacked.data_ptr() == one["x"].data_ptr()
    with torch.inference_mode():
        made = torch.ones(2, 3)
    weight = torch.ones(3, requires_grad=True)
    (trees.stack([made], 0) * weight).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0, 2.0]
