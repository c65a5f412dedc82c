"""Packed weights: the same products for whoever samples, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foresight.nets.packed import ABLE, packed
from tests.sabotage import change, sabotaged_by

pytestmark = pytest.mark.skipif(not ABLE, reason="this processor has no packed products")


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 80), nn.ReLU(), nn.Linear(80, 32, bias=False))


@sabotaged_by("foresight.nets.packed._multiply", change("x", lambda x: 2 * x))
def test_products_are_those_of_autocast():
    layers, x = _layers(), torch.randn(5, 3, 48)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = layers(x)
        with packed(torch.bfloat16, 15, layers):
            found = layers(x)
    assert found.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), plain.float(), atol=0.02, rtol=0.02)


def test_a_gradient_flows_and_nothing_stays_behind():
    layers, x = _layers(), torch.randn(4, 48)
    with packed(torch.bfloat16, 4, layers), packed(torch.bfloat16, 4, layers):
        assert "forward" in vars(layers[0]) and "forward" in vars(layers[2])
        layers(x).sum().backward()
    assert layers[0].weight.grad is not None
    assert not any("forward" in vars(layer) for layer in layers)


def test_weights_that_changed_are_packed_anew():
    layers, x = _layers(), torch.randn(4, 48)
    with torch.no_grad():
        with packed(torch.bfloat16, 4, layers):
            before = layers(x)
        layers[2].weight.mul_(2.0)
        with packed(torch.bfloat16, 4, layers):
            after = layers(x)
    torch.testing.assert_close(after.float(), 2 * before.float(), atol=0.05, rtol=0.05)


def test_without_a_kind_nothing_is_packed():
    layers = _layers()
    with packed(None, 4, layers):
        assert not any("forward" in vars(layer) for layer in layers)
