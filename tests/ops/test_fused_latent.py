"""The compiled loops of world models: each equals the operations that it stands in for, its gradients too."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from foresight.nets import outputs
from foresight.nets.outputs import OneHots, TwoHot
from foresight.ops import transforms
from foresight.ops.fused import latent as fused_latent
from tests.sabotage import change, sabotaged_by


def _near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@sabotaged_by("foresight.ops.fused.latent.norm_silu", change("eps", lambda x: 100 * x))
def test_norm_and_silu() -> None:
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(3, 5, 33, generator=generator) * torch.tensor([0.01, 1.0, 30.0]).view(3, 1, 1)
    u.requires_grad_()
    gain = torch.rand(33, generator=generator, requires_grad=True)
    above = torch.randn(3, 5, 33, generator=generator)
    found = fused_latent.norm_silu(u, gain, 1e-4)
    expected = functional.silu(torch.rms_norm(u, (33,), gain, 1e-4))
    _near(found, expected)
    for a, b in zip(*(torch.autograd.grad(x, (u, gain), above) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("classes", [3, 16])
@sabotaged_by("foresight.ops.fused.latent.one_hots", change("uniform", lambda x: 0.5 * x))
def test_one_hots(classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, draws = 5 * torch.randn(40, 4 * classes, generator=generator), torch.rand(40, 4, generator=generator)
    dist = OneHots.mixed(logits.unflatten(-1, (4, classes)), 0.1)
    for given in (draws, None, torch.ones(40, 4)):  # a draw of 1 cannot be: the last class takes what rounding leaves
        found = torch.full_like(logits, 7.0)
        probs = fused_latent.one_hots(logits, given, 4, 0.1, found)
        _near(probs, dist.logps.exp())
        assert torch.equal(found, dist.straight_through(given)) and torch.equal(found.sum(-1), torch.full((40,), 4.0))


def test_samples_have_their_probabilities() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.0, 0.0])
    with torch.no_grad():
        found = outputs.one_hots(logits.expand(20_000, -1), 2, 0.01, torch.Generator().manual_seed(0))
    expected = OneHots.mixed(logits.view(2, 3), 0.01).mean()
    torch.testing.assert_close(found.mean(0), expected, atol=0.015, rtol=0)


@sabotaged_by("foresight.ops.fused.latent.two_hot_loss", change("weight", lambda w: 1 - w))
def test_two_hots() -> None:
    generator = torch.Generator().manual_seed(0)
    bins = transforms.symexp_bins(31, 4.0)
    wide = (3 * torch.randn(6, 7, 32, generator=generator)).requires_grad_()  # the last logit is no bin's
    logits = wide[..., :31]
    target, other = (20 * torch.randn(6, 7, generator=generator) for _ in range(2))
    hats = [np.stack([np.interp(x, bins, row) for row in np.eye(31)], -1) for x in (target, other)]
    code = torch.from_numpy(hats[0] + hats[1]).float()
    expected = -(code * logits.log_softmax(-1)).sum(-1)
    found = TwoHot(wide, bins).loss(target, other)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(x.square().sum(), wide)[0] for x in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(TwoHot(wide, bins).mean(), logits.softmax(-1) @ bins, rtol=1e-5, atol=1e-4)
        assert not TwoHot(torch.zeros(3, 255), transforms.symexp_bins()).mean().any()  # exactly 0


def test_what_is_not_finite_is_not_hidden() -> None:
    bad = torch.zeros(2, 255)
    bad[0, 3] = torch.nan
    bins = transforms.symexp_bins()
    found = TwoHot(bad, bins)
    assert found.mean().isnan().tolist() == found.loss(torch.zeros(2)).isnan().tolist() == [True, False]
    assert fused_latent.norm_silu(bad, torch.ones(255), 1e-4).isnan().any(-1).tolist() == [True, False]


STARTED = """
import torch
torch.set_num_threads(1)
from foresight.ops.fused import latent as fused_latent
fused_latent.start_threads()
print(torch.get_num_threads(), fused_latent.share_threads(2))
"""


def test_torch_keeps_its_count_when_the_threads_start() -> None:
    """Otherwise torch has two threads where one was asked for, as numba sets the count of OpenMP."""
    env = {**os.environ, "NUMBA_NUM_THREADS": "2"}
    found = subprocess.run([sys.executable, "-c", STARTED], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "2"]
