"""Bins: 256 edges make 255 bins, and tokens and centers are inverse."""

from __future__ import annotations

import torch

from foresight.ops import transforms
from tests.sabotage import sabotaged_by

LOW, HIGH = torch.tensor([-1.0, 0.1]), torch.tensor([1.0, 7.3])


@sabotaged_by("foresight.ops.transforms.from_bins", lambda f: lambda t, *rest: f(t - 0.5, *rest))
@sabotaged_by("foresight.ops.transforms.to_bins", lambda f: lambda x, low, high, edges: f(x, low, high, edges + 1))
def test_tokens_and_centers_are_inverse() -> None:
    tokens = torch.arange(255)[:, None].expand(-1, 2)
    centers = transforms.from_bins(tokens, LOW, HIGH, 256)
    assert torch.equal(transforms.to_bins(centers, LOW, HIGH, 256), tokens)
    x = LOW + (HIGH - LOW) * torch.rand(1_000, 2, generator=torch.Generator().manual_seed(0))
    error = (transforms.from_bins(transforms.to_bins(x, LOW, HIGH, 256), LOW, HIGH, 256) - x).abs()
    assert (error <= (HIGH - LOW) / 255 / 2 + 1e-5).all()  # at most half a bin


@sabotaged_by("foresight.ops.transforms.to_bins", lambda f: lambda x, low, high, edges: f(x, low, high + 1, edges))
def test_numbers_outside_are_in_the_outer_bins() -> None:
    assert transforms.to_bins(torch.tensor([-9.0, -1.0, 1.0, 9.0]), -1.0, 1.0, 256).tolist() == [0, 0, 254, 254]
    far = torch.tensor([1e18, 1e30, torch.inf, -1e30, -torch.inf])
    assert transforms.to_bins(far, -1.0, 1.0, 256).tolist() == [254] * 3 + [0] * 2
