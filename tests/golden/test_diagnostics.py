"""Explained variance that a person can check by hand."""

from __future__ import annotations

import torch

from foresight.ops import diagnostics
from tests.sabotage import flip_sign, sabotaged_by, swap


@sabotaged_by("foresight.ops.diagnostics.explained_variance", flip_sign, swap("value", "target"))
def test_explained_variance() -> None:
    target = torch.tensor([[1.0, 2.0, 3.0]])
    assert diagnostics.explained_variance(target + 5, target) == 1  # a constant error is not variance
    assert diagnostics.explained_variance(torch.full_like(target, 9), target) == 0
    assert diagnostics.explained_variance(-target, target) == -3
    assert diagnostics.explained_variance(0.5 * target, target) == 0.75
    assert not diagnostics.explained_variance(target, torch.ones(1, 3)).isfinite()
