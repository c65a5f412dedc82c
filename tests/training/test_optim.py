"""`descend` against the four calls that it replaces."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from foresight.errors import NotFinite
from foresight.training import optim
from tests.sabotage import change, sabotaged_by


@sabotaged_by("foresight.training.optim.clip_norm_", change("max_norm", lambda x: 2 * x))
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("options", [{"fused": True}, {"fused": True, "weight_decay": 0.1}, {"amsgrad": True}])
def test_steps_are_torchs(layers, options):
    options = {"lr": 0.1, "eps": 1.0, **options}  # a large eps: else Adam hides the length of the gradient
    ours = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(layers)])
    theirs, x = copy.deepcopy(ours), torch.randn(8, 3)
    a, b = torch.optim.Adam(ours.parameters(), **options), torch.optim.Adam(theirs.parameters(), **options)
    for scale in (1e-3, 1.0, 100.0, 1.0):
        optim.descend(a, (scale * ours(x).square().sum()).backward, max_norm=0.5)
        b.zero_grad()
        (scale * theirs(x).square().sum()).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        b.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_loss_is_the_weighted_sum_of_its_terms_and_names_those_that_are_not_finite() -> None:
    terms = {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor(5.0)}
    assert optim.total(terms, {"b": 0.5}).item() == 2 + 0.5 * 5
    with pytest.raises(NotFinite, match="The loss terms b, c became NaN or infinite"):
        optim.total({**terms, "b": torch.tensor(torch.inf), "c": torch.tensor([0.0, torch.nan])}, {})
