"""The passes of an MLP, forward and backward, differentiated by hand: the twin of `nets.stacked_mlp.plain`.

On a CPU a layer of 64x64 takes less time than its call. So these run in numpy where it is faster (tanh, and some
products with few rows or columns), and large layers on oneDNN, through the operator of torch's compiled graphs: on some
processors it takes half the time of `torch.mm`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FEW_COLUMNS = 8  # for products with at most so many columns numpy is several times faster than torch
LARGE = 2**15  # for layers with at least so many weights oneDNN is faster, despite 10 µs more per call
LARGE_GRADIENT = 2**23  # the same for the product that computes a weight gradient, in multiplications
ONEDNN = torch.backends.mkldnn.is_available()


class Layer(NamedTuple):
    """One layer as views of the flat parameter, for torch and for numpy; `_t` is transposed, `[in, out]`."""

    weight: Tensor
    weight_t: Tensor
    bias: Tensor
    array_t: np.ndarray
    offset: np.ndarray


def forward_numpy(x: np.ndarray, layers: Sequence[Layer], activation: str) -> np.ndarray:
    """One MLP over few rows, in numpy."""
    last = len(layers) - 1
    for i, layer in enumerate(layers):
        x = np.dot(x, layer.array_t)
        x += layer.offset
        if i < last:
            np.tanh(x, out=x) if activation == "tanh" else np.maximum(x, 0, out=x)
    return x


def forward(x: Tensor, layers: Sequence[Layer], activation: str) -> list[Tensor]:
    """The output of every layer of one MLP. A row's bits do not depend on the other rows."""
    outputs, last = [], len(layers) - 1
    for i, layer in enumerate(layers):
        if large := _large(layer.weight):
            x = linear(x, layer.weight, layer.bias, "relu" if i < last and activation == "relu" else "none")
        else:
            x = torch.addmm(layer.bias, x, layer.weight_t)
        if i < last:
            if activation == "tanh":
                array = x.numpy()
                np.tanh(array, out=array)
            elif not large:
                x.relu_()
        outputs.append(x)
    return outputs


def backward(
    grad: Tensor,
    x: Tensor,
    activations: Sequence[Tensor],
    layers: Sequence[Layer],
    places: Sequence[tuple[Tensor, Tensor]] | None,
    activation: str,
    inputs: bool,
) -> Tensor:
    """Write the gradient of one MLP's weights to `places`, if given; return that of its inputs if `inputs`."""
    for i in reversed(range(len(layers))):
        if i < len(layers) - 1:  # in place: `grad` is the scratch memory of the layer above
            if activation == "tanh":
                torch.ops.aten.tanh_backward.grad_input(grad, activations[i], grad_input=grad)
            else:
                torch.ops.aten.threshold_backward.grad_input(grad, activations[i], 0, grad_input=grad)
        below = activations[i - 1] if i else x
        if places is not None:
            weight, bias = places[i]
            torch.sum(grad, 0, out=bias)
            _product(grad.t(), below, weight)
        if i or inputs:
            if _large(layers[i].weight):
                grad = linear(grad, layers[i].weight_t)
            else:
                into = _scratch(i % 2, below) if i else torch.empty_like(below)
                grad = _product(grad, layers[i].weight, into)
    return grad


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """`a @ b`, in numpy if narrow and small (numpy then uses one thread)."""
    if min(out.shape) <= FEW_COLUMNS and a.numel() * b.shape[1] <= 2**18:
        np.dot(a.numpy(), b.numpy(), out=out.numpy())
        return out
    if a.numel() * b.shape[1] >= LARGE_GRADIENT and ONEDNN:
        return out.copy_(linear(a, b.t()))
    return torch.mm(a, b, out=out)


def _large(weight: Tensor) -> bool:
    return weight.numel() >= LARGE and ONEDNN


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none") -> Tensor:
    """A linear layer and an activation ("relu" or "none") by oneDNN, without autograd."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "")
    return result


_kept = threading.local()


def _scratch(slot: int, like: Tensor) -> Tensor:
    """Memory with the shape of `like` that the next call may overwrite: allocating costs more than the product."""
    held = getattr(_kept, f"slot{slot}", None)
    if held is None or held.numel() < like.numel():
        held = torch.empty(like.numel())
        setattr(_kept, f"slot{slot}", held)
    return held[: like.numel()].view(like.shape)
