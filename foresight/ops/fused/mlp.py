"""The passes of an MLP, forward and backward, differentiated by hand: the twin of `nets.stacked_mlp.plain`.

On a CPU a layer of 64x64 takes less time than its call, so a pass of an MLP is one compiled loop: products by BLAS, in
one thread, and between them biases and activations, which vectorize. Of large layers several threads run the loop, each
with an MLP or a part of the rows, as threads that share a product wait for one another after each. Layers that do not
fit in a cache run on oneDNN, through the operator of torch's compiled graphs: on some processors it takes half the
time of `torch.mm`. So do large layers in bfloat16, with sums in float32, as under autocast: hidden outputs and their
gradients are then kept in it.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg.cython_blas  # noqa: F401  # loads the library of `one_thread`
import torch
from numba import njit, prange
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import Tensor

from foresight.ops.fused.latent import FAST, LOCK, fast_exp, share_threads, start_threads

FEW_COLUMNS = 8  # for products with at most so many columns numpy is several times faster than torch
LARGE = 2**15  # for layers with at least so many weights a second thread is worth its start
HUGE = 2**19  # and with so many oneDNN is faster
# Rows that are computed together, so that a row's bits do not depend on the others, and stay in the cache. With AVX2
# alone OpenBLAS sums the last rows of a block in another order: there they may differ in the last bits.
BLOCK = 128
BACK = 256  # the same on the way back, where a row has no result of its own
START: Any = np.int64(0)  # the first row: in compiled loops a literal 0 is a type of its own, compiled once more
LARGE_GRADIENT = 2**23  # the same for the product that computes a weight gradient, in multiplications
ONEDNN = torch.backends.mkldnn.is_available()
BFLOAT16 = ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # of oneDNN on this processor
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
    units: int  # in its hidden layers
    outputs: int
    scratch: int  # floats that `backward_rows` needs, and a gradient
    large: bool  # has a large layer
    huge: bool  # has one that does not fit in a core's cache

    @classmethod
    def of(cls, place: Place, sizes: Sequence[int]) -> Member:
        """The MLP whose weights are at `place`."""
        layers = [Layer(weight, weight.t(), bias) for weight, bias in place.layers]
        most = max(layer.weight.numel() for layer in layers)
        shape = np.array(sizes), sum(sizes[1:-1]), sizes[-1], 2 * BACK * max(sizes) + 2 * len(place.flat)
        return cls(layers, place.flat, *shape, most >= LARGE, ONEDNN and most >= HUGE)


@functools.cache
def one_thread() -> None:
    """Have scipy's BLAS, which compiled loops call, use one thread: in small products a second one only waits."""
    for library in ThreadpoolController().lib_controllers:
        if "scipy.libs" in library.filepath:
            library.set_num_threads(1)


@functools.cache
def start() -> None:
    """Call this before a compiled loop whose threads compute passes."""
    one_thread()
    start_threads()


def outputs(x: Tensor, mlps: Sequence[Member], activation: str) -> list[Tensor]:
    """The outputs `[N, outputs]` of few rows `[N, inputs]`."""
    return [found for _, found in _compiled(x, mlps, activation, x.shape[0], False)]


def forward(
    x: Tensor, mlps: Sequence[Member], activation: str, kind: torch.dtype = torch.float32, keep: bool = True
) -> list[list[Any]]:
    """What `backward` needs of each MLP's pass over rows `[N, inputs]`, and last its outputs `[N, outputs]`, float32.

    `kind`: the dtype of products with large layers, float32 or bfloat16. In float32 a row's bits do not depend on the
    other rows. Without `keep` only the outputs outlive the next call.
    """
    if by_onednn(mlps, kind):
        return [_forward_large(x, mlp.layers, activation, kind) for mlp in mlps]
    return _compiled(x, mlps, activation, block_of(mlps, len(x)), keep)


def by_onednn(mlps: Sequence[Member], kind: torch.dtype) -> bool:
    """Whether oneDNN computes products with large layers in this dtype."""
    return any(mlp.huge or (mlp.large and kind is not torch.float32) for mlp in mlps)


def block_of(mlps: Sequence[Member], rows: int) -> int:
    """How many rows are computed together: fewer where padding a large layer would take longer, and threads wait."""
    if rows > BLOCK or not any(mlp.large for mlp in mlps):
        return BLOCK
    return BLOCK // 4 if rows <= BLOCK // 4 else BLOCK // 2


def backward(
    grads: Sequence[Tensor],
    x: Tensor,
    activations: Sequence[Sequence[Any]],
    mlps: Sequence[Member],
    places: Sequence[Place] | None,
    activation: str,
    inputs: bool,
) -> Tensor:
    """Write the gradient of each MLP's weights to its place, if given; return that of their inputs if `inputs`.

    `grads` are those of the outputs. Products have the dtype that they had in `forward`.
    """
    if not activations[0] or isinstance(activations[0][0], Tensor):  # of `_forward_large`
        into_layers = [None] * len(mlps) if places is None else [place.layers for place in places]
        found = [
            _backward_large(grad, x, kept, mlp.layers, place, activation, inputs)
            for grad, kept, mlp, place in zip(grads, activations, mlps, into_layers, strict=True)
        ]
        return functools.reduce(torch.add, found) if inputs else NO_ROWS
    one_thread()
    threads, count = threads_of(mlps), len(mlps)
    parts = parts_of(threads, mlps, len(x))
    into = torch.empty(count, *x.shape) if inputs else torch.empty(count, 0, 0)
    given, relu, scratch = x.detach().contiguous().numpy(), activation == "relu", passing(mlps, parts)
    written = tuple(NOTHING if places is None else places[i].flat for i in range(count))
    upper, hidden = tuple(grad.contiguous().numpy() for grad in grads), tuple(kept[0] for kept in activations)
    if threads > 1 and count * parts > 1:
        flats, sizes = tuple(mlp.flat for mlp in mlps), tuple(mlp.sizes for mlp in mlps)
        with LOCK:
            backward_threads(upper, given, hidden, flats, sizes, relu, written, into.numpy(), scratch)
    else:
        for i, mlp in enumerate(mlps):
            backward_rows(
                upper[i], given, hidden[i], mlp.flat, mlp.sizes, relu, written[i], into[i].numpy(), scratch[0, 0], 0,
                len(given),
            )  # fmt: skip
    return into[0] if count == 1 else into.sum(0)


def threads_of(mlps: Sequence[Member]) -> int:
    """How many threads share the passes of `mlps`: torch's, if they are large enough to be worth it."""
    large = torch.get_num_threads() > 1 and any(mlp.large for mlp in mlps)
    return share_threads() if large else 1


def several(threads: int) -> int | None:
    """`threads` as a compiled loop takes them: None, not 1, is a type of its own, for which no threads are compiled."""
    return threads if threads > 1 else None


def parts_of(threads: int, mlps: Sequence[Member], rows: int) -> int:
    """Into how many parts `backward_threads` divides the rows."""
    return -(-threads // len(mlps)) if rows > BLOCK // 2 else 1


def _compiled(x: Tensor, mlps: Sequence[Member], activation: str, block: int, keep: bool) -> list[list[Any]]:
    one_thread()
    rows, given, relu = -(-x.shape[0] // block) * block, x.detach().contiguous().numpy(), activation == "relu"
    counts = [rows * mlp.units for mlp in mlps]
    # torch's memory is aligned, and a large piece of numpy's is zeroed by the system each time
    units = (torch.empty(sum(counts)) if keep else memory(3, sum(counts))).numpy()
    hidden = tuple(units[end - count : end] for count, end in zip(counts, itertools.accumulate(counts), strict=True))
    tensors = [torch.empty(rows, mlp.outputs) for mlp in mlps]
    found = tuple(x.numpy() for x in tensors)
    if len(mlps) * rows > BLOCK // 2 and threads_of(mlps) > 1:
        flats, sizes = tuple(mlp.flat for mlp in mlps), tuple(mlp.sizes for mlp in mlps)
        with LOCK:
            forward_threads((given,) * len(mlps), flats, sizes, relu, block, hidden, found)
    else:
        for i, mlp in enumerate(mlps):
            forward_rows(given, mlp.flat, mlp.sizes, relu, block, hidden[i], found[i])
    return [[kept, outputs[: x.shape[0]]] for kept, outputs in zip(hidden, tensors, strict=True)]


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def forward_threads(
    xs: Sequence[Floats], flats: Sequence[Floats], sizes: Sequence[Indices], relu: bool, block: int,
    hidden: Sequence[Floats], found: Sequence[Floats],
) -> None:  # fmt: skip
    """The compiled loop of `forward` of several MLPs, each with its rows; each thread has its blocks of them."""
    blocks = len(found[0]) // block
    for task in prange(len(flats) * blocks):
        i, begin = task // blocks, task % blocks * block
        forward_block(xs[i], flats[i], sizes[i], relu, begin, begin + block, hidden[i], found[i])


@njit(cache=True, nogil=True, error_model="numpy")
def forward_rows(
    x: Floats, flat: Floats, sizes: Indices, relu: bool, block: int, hidden: Floats, found: Floats
) -> None:
    """The compiled loop of `forward`, in blocks of rows; the last block is padded to the length of `found`."""
    for begin in range(0, len(found), block):
        forward_block(x, flat, sizes, relu, begin, begin + block, hidden, found)


@njit(cache=True, nogil=True, fastmath=FAST, error_model="numpy")
def forward_block(
    x: Floats, flat: Floats, sizes: Indices, relu: bool, begin: int, end: int, hidden: Floats, found: Floats
) -> None:
    """Write the rows `begin` to `end` of all layers; rows beyond those of `x` are zeros."""
    rows, padded, last = len(x), len(found), len(sizes) - 2
    below = x[begin:end]
    if end > rows:
        rest = np.zeros((end - begin, x.shape[1]), np.float32)
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
            for i in range(end - begin):
                for j in range(b):
                    above[i, j] += bias[j]
        elif relu:
            for i in range(end - begin):
                for j in range(b):
                    above[i, j] = max(above[i, j] + bias[j], np.float32(0))
        else:
            for i in range(end - begin):
                for j in range(b):
                    above[i, j] = _tanh(above[i, j] + bias[j])
        below = above
        at += a * b + b
        to += padded * b


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def backward_threads(
    grads: Sequence[Floats], x: Floats, hidden: Sequence[Floats], flats: Sequence[Floats], sizes: Sequence[Indices],
    relu: bool, places: Sequence[Floats], into: Floats, scratch: Floats,
) -> None:  # fmt: skip
    """The compiled loop of `backward` of several MLPs; each thread has one, or a part of its rows and a gradient."""
    parts = scratch.shape[1]
    for task in prange(len(flats) * parts):
        i, part = task // parts, task % parts
        memory, size = scratch[i, part], len(places[i])
        backward_rows(
            grads[i], x, hidden[i], flats[i], sizes[i], relu, places[i] if part == 0 else memory[:size], into[i],
            memory[size:], len(x) * part // parts, len(x) * (part + 1) // parts,
        )  # fmt: skip
    for i in range(len(flats)):
        for part in range(1, parts):
            for j in range(len(places[i])):
                places[i][j] += scratch[i, part, j]


@njit(cache=True, nogil=True, fastmath=FAST, error_model="numpy")
def backward_rows(
    whole: Floats, x: Floats, hidden: Floats, flat: Floats, sizes: Indices, relu: bool, place: Floats, into: Floats,
    scratch: Floats, first: int, stop: int,
) -> None:  # fmt: skip
    """The passes back of the rows `first` to `stop`, in blocks. `place` and `into` may be empty."""
    last = len(sizes) - 2
    inside, widest = 0, 0
    for layer in range(1, last + 1):
        inside += sizes[layer]
        widest = max(widest, sizes[layer])
    padded, half = len(hidden) // max(inside, 1), BACK * widest
    product = scratch[2 * half :]
    for begin in range(first, stop, BACK):
        end = min(begin + BACK, stop)
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
                weight, bias = place[at : at + a * b].reshape(b, a), place[at + a * b : at + a * b + b]
                if begin == first:
                    np.dot(grad.T, below, weight)
                    for j in range(b):
                        bias[j] = np.float32(0)
                else:
                    found = product[: a * b].reshape(b, a)
                    np.dot(grad.T, below, found)
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


@njit(cache=True, nogil=True, error_model="numpy")
def forward_mlps(
    xs: Sequence[Floats], flats: Sequence[Floats], sizes: Sequence[Indices], relu: bool, threads: int | None,
    block: int, hidden: Sequence[Floats], found: Sequence[Floats],
) -> None:  # fmt: skip
    """The passes of several MLPs, each with its rows, as a part of a larger loop; in `threads` (see `several`)."""
    if threads is not None and len(flats) * len(found[0]) > block:
        forward_threads(xs, flats, sizes, relu, block, hidden, found)
    else:
        for i in range(len(flats)):
            forward_rows(xs[i], flats[i], sizes[i], relu, block, hidden[i], found[i])


@njit(cache=True, nogil=True, error_model="numpy")
def backward_mlps(
    grads: Sequence[Floats], x: Floats, hidden: Sequence[Floats], flats: Sequence[Floats], sizes: Sequence[Indices],
    relu: bool, threads: int | None, places: Sequence[Floats], into: Floats, scratch: Floats,
) -> None:  # fmt: skip
    """The passes back of several MLPs, as a part of a larger loop, in the parts of `scratch` (see `passing`)."""
    if threads is not None and len(flats) * scratch.shape[1] > 1:
        backward_threads(grads, x, hidden, flats, sizes, relu, places, into, scratch)
    else:
        for i in range(len(flats)):
            backward_rows(
                grads[i], x, hidden[i], flats[i], sizes[i], relu, places[i], into[i], scratch[0, 0], START, len(x)
            )


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _tanh(x: np.float32) -> Any:
    return np.float32(1) - np.float32(2) / (fast_exp(np.float32(2) * x) + np.float32(1))


def _forward_large(x: Tensor, layers: Sequence[Layer], activation: str, kind: torch.dtype) -> list[Tensor]:
    """The output of every layer: of hidden ones in `kind`, of the last one in float32."""
    outputs, last = [], len(layers) - 1
    for i, layer in enumerate(layers):
        if large := _large(layer.weight):
            then = "relu" if i < last and activation == "relu" else "none"
            x = linear(_as(kind, x), _as(kind, layer.weight), _as(kind, layer.bias), then)
        else:  # into given memory, so that autocast leaves it alone
            x = torch.addmm(layer.bias, _as(torch.float32, x), layer.weight_t, out=torch.empty(len(x), len(layer.bias)))
        if i < last:
            if activation == "tanh" and x.dtype == torch.float32:
                array = x.numpy()
                np.tanh(array, out=array)
            elif activation == "tanh":
                x.tanh_()
            elif not large:
                x.relu_()
        x = _as(kind if i < last else torch.float32, x)
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
            grad = _as(kind, grad)
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
                grad = linear(_as(kind, grad), _as(kind, layers[i].weight_t))
            else:
                into = memory(i % 2, below.numel()).view(below.shape) if i else torch.empty(below.shape)
                grad = _product(grad, layers[i].weight, into)
    return _as(torch.float32, grad)


def _product(a: Tensor, b: Tensor, out: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
    """`a @ b` into `out` float32; a large one in `kind`, a narrow and small one in numpy, which uses one thread."""
    if a.numel() * b.shape[1] >= LARGE_GRADIENT and ONEDNN:
        return out.copy_(linear(_as(kind, a), _as(kind, b).t()))
    a, b = _as(torch.float32, a), _as(torch.float32, b)
    if min(out.shape) <= FEW_COLUMNS and a.numel() * b.shape[1] <= 2**18:
        np.dot(a.numpy(), b.numpy(), out=out.numpy())
        return out
    return torch.mm(a, b, out=out)


def _as(kind: torch.dtype, x: Tensor) -> Tensor:
    """`x` in `kind`: `Tensor.to` takes a microsecond also where it does nothing."""
    return x if x.dtype is kind else x.to(kind)


def _large(weight: Tensor) -> bool:
    return weight.numel() >= LARGE and ONEDNN


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none") -> Tensor:
    """A linear layer and an activation ("relu" or "none") by oneDNN, without autograd.

    bfloat16 is rounded and multiplied in float32 where oneDNN has no product of it, as on processors with AVX2 alone.
    """
    if x.dtype is torch.bfloat16 and not BFLOAT16:
        wide = (x.float(), weight.float(), None if bias is None else bias.float())
        return linear(*wide, then).bfloat16()
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "")
    return result


_kept = threading.local()


def passing(mlps: Sequence[Member], parts: int = 1) -> Floats:
    """The memory that `backward_rows` overwrites, `[mlps, parts, ...]`, with a gradient in each before it."""
    size = max([mlp.scratch for mlp in mlps])
    return memory(2, len(mlps) * parts * size).view(len(mlps), parts, size).numpy()


def memory(slot: int, count: int) -> Tensor:
    """Memory for `count` floats that the next call may overwrite: allocating costs more than the product."""
    held = getattr(_kept, f"slot{slot}", None)
    if held is None or held.numel() < count:
        held = torch.empty(count)
        setattr(_kept, f"slot{slot}", held)
    return held[:count]
