"""A convolution after upsampling equals its plain form, borders and gradients included."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from foresight.nets.resample import UpsampledConv
from tests.sabotage import sabotaged_by


@sabotaged_by("foresight.nets.resample._taps", lambda f: lambda: f().flip(1))
def test_values_and_gradients_equal_the_plain_form() -> None:
    torch.manual_seed(0)
    layer = UpsampledConv(3, 5).double()
    assert layer.bias is not None
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64, requires_grad=True)
    larger = functional.interpolate(x, scale_factor=2.0, mode="nearest")
    expected = functional.conv2d(larger, layer.weight, layer.bias, padding=2)
    found, direction = layer(x), torch.randn_like(expected)
    torch.testing.assert_close(found, expected)
    wrt = [x, layer.weight, layer.bias]
    pairs = zip(torch.autograd.grad(found, wrt, direction), torch.autograd.grad(expected, wrt, direction), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other)


def test_its_weights_are_those_of_a_plain_convolution() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 5, 5, padding=2)
    torch.manual_seed(0)
    own = UpsampledConv(3, 5)
    assert set(own.state_dict()) == set(plain.state_dict())
    torch.testing.assert_close(own.weight, plain.weight, rtol=0, atol=0)
