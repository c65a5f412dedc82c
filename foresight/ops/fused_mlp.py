"""The passes of an MLP, forward and backward, differentiated by hand: the twin of `nets.stacked_mlp.plain`.

On a CPU a layer of 64x64 takes less time than its call, so a pass of a small MLP is one compiled loop: products by
BLAS, in one thread, and between them biases and activations, which vectorize. Large layers run on oneDNN, through the
operator of torch's compiled graphs: on some processors it takes half the time of `torch.mm`. They can compute in
bfloat16, with sums in float32, as under autocast: hidden outputs and their gradients are then kept in it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg.cython_blas  # noqa: F401  # loads the library of `one_thread`
import torch
from numba import njit
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import Tensor

from foresight.ops.fused_latent import FAST, fast_exp

FEW_COLUMNS = 8  # for products with at most so many columns numpy is several times faster than torch
LARGE = 2**15  # for layers with at least so many weights oneDNN is faster, despite 10 µs more per call
BLOCK = 128  # rows that are computed together, so that a row's bits do not depend on the others, and stay in the cache
LARGE_GRADIENT = 2**23  # the same for the product that computes a weight gradient, in multiplications
ONEDNN = torch.backends.mkldnn.is_available()
Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
NOTHING, NO_ROWS = np.empty(0, np.float32), torch.empty(0, 0)


class Layer(NamedTuple):
    """One layer as views of the flat parameter; `weight_t` is transposed, `[in, out]`."""

    weight: Tensor
    weight_t: Tensor
    bias: Tensor


class Place(NamedTuple):
    """Where the gradient of one MLP goes: its part of a flat tensor, and views of that as `(weight, bias)`."""

    flat: Floats
    layers: Sequence[tuple[Tensor, Tensor]]


class Member(NamedTuple):
    """One MLP: its layers, and its part of the flat parameter with the widths of inputs, hidden layers and outputs."""

    layers: Sequence[Layer]
    flat: Floats
    sizes: NDArray[np.int64]
    large: bool  # has a large layer

    @classmethod
    def of(cls, place: Place, sizes: Sequence[int]) -> Member:
        """The MLP whose weights are at `place`."""
        layers = [Layer(weight, weight.t(), bias) for weight, bias in place.layers]
        return cls(layers, place.flat, np.array(sizes), any(_large(layer.weight) for layer in layers))


@functools.cache
def one_thread() -> None:
    """Have scipy's BLAS, which compiled loops call, use one thread: in small products a second one only waits."""
    for library in ThreadpoolController().lib_controllers:
        if "scipy.libs" in library.filepath:
            library.set_num_threads(1)


def outputs(x: Tensor, mlp: Member, activation: str) -> Tensor:
    """The outputs `[N, outputs]` of few rows `[N, inputs]`."""
    return _compiled(x, mlp, activation, x.shape[0])[1]


def forward(x: Tensor, mlp: Member, activation: str, kind: torch.dtype = torch.float32) -> list[Tensor]:
    """What `backward` needs of a pass over rows `[N, inputs]`, and last its outputs `[N, outputs]`, float32.

    `kind`: the dtype of products with large layers, float32 or bfloat16. In float32 a row's bits do not depend on the
    other rows.
    """
    if mlp.large:
        return _forward_large(x, mlp.layers, activation, kind)
    return _compiled(x, mlp, activation, BLOCK)


def backward(
    grad: Tensor,
    x: Tensor,
    activations: Sequence[Tensor],
    mlp: Member,
    place: Place | None,
    activation: str,
    inputs: bool,
) -> Tensor:
    """Write the gradient of one MLP's weights to `place`, if given; return that of its inputs if `inputs`.

    Products have the dtype that they had in `forward`.
    """
    if mlp.large:
        return _backward_large(grad, x, activations, mlp.layers, place and place.layers, activation, inputs)
    one_thread()
    into = torch.empty_like(x, memory_format=torch.contiguous_format) if inputs else NO_ROWS
    backward_rows(
        grad.contiguous().numpy(), x.detach().contiguous().numpy(), activations[0].numpy(), mlp.flat, mlp.sizes,
        activation == "relu", NOTHING if place is None else place.flat, into.numpy(), passing(mlp),
    )  # fmt: skip
    return into


def _compiled(x: Tensor, mlp: Member, activation: str, block: int) -> list[Tensor]:
    one_thread()
    rows, sizes = -(-x.shape[0] // block) * block, mlp.sizes
    hidden, found = torch.empty(rows * int(sizes[1:-1].sum())), torch.empty(rows, int(sizes[-1]))
    given = x.detach().contiguous().numpy()
    forward_rows(given, mlp.flat, sizes, activation == "relu", block, hidden.numpy(), found.numpy())
    return [hidden, found[: x.shape[0]]]


@njit(cache=True, fastmath=FAST, error_model="numpy")
def forward_rows(
    x: Floats, flat: Floats, sizes: Indices, relu: bool, block: int, hidden: Floats, found: Floats
) -> None:
    """The compiled loop of `forward`, in blocks of rows; the last block is padded to the length of `found`."""
    rows, padded, last = len(x), len(found), len(sizes) - 2
    rest = np.zeros((block if padded > rows else 0, x.shape[1]), np.float32)
    for begin in range(0, padded, block):
        end = begin + block
        below = x[begin:end]
        if end > rows:
            for i in range(rows - begin):
                for j in range(x.shape[1]):
                    rest[i, j] = below[i, j]
            below = rest
        at, to = 0, 0
        for layer in range(last + 1):
            a, b = sizes[layer], sizes[layer + 1]
            weight, bias = flat[at : at + a * b].reshape(b, a), flat[at + a * b : at + a * b + b]
            above = found if layer == last else hidden[to : to + padded * b].reshape(padded, b)
            above = above[begin:end]
            np.dot(below, weight.T, above)
            if layer == last:
                for i in range(block):
                    for j in range(b):
                        above[i, j] += bias[j]
            elif relu:
                for i in range(block):
                    for j in range(b):
                        above[i, j] = max(above[i, j] + bias[j], np.float32(0))
            else:
                for i in range(block):
                    for j in range(b):
                        above[i, j] = _tanh(above[i, j] + bias[j])
            below = above
            at += a * b + b
            to += padded * b


@njit(cache=True, fastmath=FAST, error_model="numpy")
def backward_rows(
    whole: Floats, x: Floats, hidden: Floats, flat: Floats, sizes: Indices, relu: bool, place: Floats, into: Floats,
    scratch: Floats,
) -> None:  # fmt: skip
    """The compiled loop of `backward`, in blocks of rows. `place` and `into` may be empty."""
    rows, last = len(x), len(sizes) - 2
    inside, half = 0, (len(scratch) - len(flat)) // 2
    for layer in range(1, last + 1):
        inside += sizes[layer]
    padded = len(hidden) // max(inside, 1)
    product = scratch[2 * half :]
    for i in range(len(place)):
        place[i] = np.float32(0)
    for begin in range(0, rows, BLOCK):
        end = min(begin + BLOCK, rows)
        grad, at, to = whole[begin:end], len(flat), len(hidden)
        for layer in range(last, -1, -1):
            a, b = sizes[layer], sizes[layer + 1]
            at -= a * b + b
            if layer < last:
                above = hidden[to : to + padded * b].reshape(padded, b)[begin:end]
                for i in range(len(grad)):
                    for j in range(b):
                        if relu:
                            grad[i, j] = grad[i, j] if above[i, j] > 0 else np.float32(0)
                        else:
                            grad[i, j] *= np.float32(1) - above[i, j] * above[i, j]
            if layer:
                to -= padded * a
            below = hidden[to : to + padded * a].reshape(padded, a)[begin:end] if layer else x[begin:end]
            if len(place):
                found = product[: a * b].reshape(b, a)
                np.dot(grad.T, below, found)
                weight, bias = place[at : at + a * b].reshape(b, a), place[at + a * b : at + a * b + b]
                for i in range(b):
                    for j in range(a):
                        weight[i, j] += found[i, j]
                for i in range(len(grad)):
                    for j in range(b):
                        bias[j] += grad[i, j]
            weight = flat[at : at + a * b].reshape(b, a)
            if layer:
                lower = scratch[layer % 2 * half :][: len(grad) * a].reshape(len(grad), a)
                np.dot(grad, weight, lower)
                grad = lower
            elif len(into):
                np.dot(grad, weight, into[begin:end])


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _tanh(x: np.float32) -> Any:
    return np.float32(1) - np.float32(2) / (fast_exp(np.float32(2) * x) + np.float32(1))


def _forward_large(x: Tensor, layers: Sequence[Layer], activation: str, kind: torch.dtype) -> list[Tensor]:
    """The output of every layer: of hidden ones in `kind`, of the last one in float32."""
    outputs, last = [], len(layers) - 1
    for i, layer in enumerate(layers):
        if large := _large(layer.weight):
            then = "relu" if i < last and activation == "relu" else "none"
            x = linear(x.to(kind), layer.weight.to(kind), layer.bias.to(kind), then)
        else:  # into given memory, so that autocast leaves it alone
            x = torch.addmm(layer.bias, x.float(), layer.weight_t, out=torch.empty(len(x), len(layer.bias)))
        if i < last:
            if activation == "tanh" and x.dtype == torch.float32:
                array = x.numpy()
                np.tanh(array, out=array)
            elif activation == "tanh":
                x.tanh_()
            elif not large:
                x.relu_()
        x = x.to(kind if i < last else torch.float32)
        outputs.append(x)
    return outputs


def _backward_large(
    grad: Tensor,
    x: Tensor,
    activations: Sequence[Tensor],
    layers: Sequence[Layer],
    places: Sequence[tuple[Tensor, Tensor]] | None,
    activation: str,
    inputs: bool,
) -> Tensor:
    kind = activations[0].dtype if len(layers) > 1 else torch.float32
    for i in reversed(range(len(layers))):
        if i < len(layers) - 1:  # in place: `grad` is the scratch memory of the layer above
            grad = grad.to(kind)
            if activation == "tanh":
                torch.ops.aten.tanh_backward.grad_input(grad, activations[i], grad_input=grad)
            else:
                torch.ops.aten.threshold_backward.grad_input(grad, activations[i], 0, grad_input=grad)
        below = activations[i - 1] if i else x
        if places is not None:
            weight, bias = places[i]
            torch.sum(grad, 0, dtype=torch.float32, out=bias)
            _product(grad.t(), below, weight, kind)
        if i or inputs:
            if _large(layers[i].weight):
                grad = linear(grad.to(kind), layers[i].weight_t.to(kind))
            else:
                into = _memory(i % 2, below.numel()).view(below.shape) if i else torch.empty(below.shape)
                grad = _product(grad, layers[i].weight, into)
    return grad.float()


def _product(a: Tensor, b: Tensor, out: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
    """`a @ b` into `out` float32; a large one in `kind`, a narrow and small one in numpy, which uses one thread."""
    if a.numel() * b.shape[1] >= LARGE_GRADIENT and ONEDNN:
        return out.copy_(linear(a.to(kind), b.to(kind).t()))
    a, b = a.float(), b.float()
    if min(out.shape) <= FEW_COLUMNS and a.numel() * b.shape[1] <= 2**18:
        np.dot(a.numpy(), b.numpy(), out=out.numpy())
        return out
    return torch.mm(a, b, out=out)


def _large(weight: Tensor) -> bool:
    return weight.numel() >= LARGE and ONEDNN


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none") -> Tensor:
    """A linear layer and an activation ("relu" or "none") by oneDNN, without autograd."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "")
    return result


_kept = threading.local()


def passing(mlp: Member) -> Floats:
    """The memory that `backward_rows` overwrites."""
    return _memory(2, 2 * BLOCK * int(mlp.sizes.max()) + mlp.flat.size).numpy()


def _memory(slot: int, count: int) -> Tensor:
    """Memory for `count` floats that the next call may overwrite: allocating costs more than the product."""
    held = getattr(_kept, f"slot{slot}", None)
    if held is None or held.numel() < count:
        held = torch.empty(count)
        setattr(_kept, f"slot{slot}", held)
    return held[:count]
