"""A few tokens through the layers of a transformer, and through a linear layer, as compiled loops on a CPU.

With few rows a product takes as long as its weights take to arrive: each is read once, and used at once. Torch's
products of one row reach half of the memory's bandwidth, and a layer is a dozen calls of it; here all are one. Each
thread reads four distant rows at a time: four streams arrive faster than one. Weights, keys and values are bfloat16,
given as their bits (`bits`); everything else is float32. The threads are torch's. Each function has a readable twin,
and a test that compares the two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from foresight.ops.fused.bfloat16 import narrow, wide
from foresight.ops.fused.latent import FAST, LOCK, fast_exp, fast_silu, share_threads

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]
Addresses = NDArray[np.int64]
Four = tuple[np.float32, np.float32, np.float32, np.float32]
Eight = tuple[np.float32, np.float32, np.float32, np.float32, np.float32, np.float32, np.float32, np.float32]


class Layers(NamedTuple):
    """N pre-norm layers of a Llama, and the norm after them.

    They have H query heads and K heads of keys and values of width W, and M units in the gated MLP. Each weight is one
    array over all layers: large ones get large pages, by which the processor finds their memory a quarter faster.
    """

    norm: Floats  # [N, D]
    heads: Bits  # [N, (H + 2 K) W, D]: of queries, keys and values
    bias: Floats  # [N, (H + 2 K) W], or [N, 0] without
    query_norm: Floats  # [N, W], or [N, 0]
    key_norm: Floats  # [N, W], or [N, 0]
    out: Bits  # [N, D, H W]
    feed_norm: Floats  # [N, D]
    gates: Bits  # [N, 2 M, D]: gate, then up
    down: Bits  # [N, D, M]
    last_norm: Floats  # [D]
    eps: np.float32  # of all norms
    scale: np.float32  # of the products of queries and keys


def empty(*shape: int) -> Tensor:
    """A tensor for weights in bfloat16, on large pages where the system has them."""
    return torch.from_numpy(np.empty(shape, np.uint16)).view(torch.bfloat16)


def bits(weight: Tensor) -> Bits:
    """A tensor on the CPU as the bits of bfloat16; its own memory if it is in that dtype and contiguous."""
    found: Bits = weight.detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    return found


def floats(weight: Tensor | None) -> Floats:
    """A tensor on the CPU as float32; empty for None."""
    found: Floats = np.empty(0, np.float32) if weight is None else weight.detach().float().contiguous().numpy()
    return found


def linear(weight: Bits, bias: Floats, x: Tensor) -> Tensor:
    """W x + b `[T, O]` of x `[T, D]`, without gradient: the twin of `functional.linear`. `bias` may be empty."""
    found = torch.empty(len(x), len(weight))
    with LOCK:
        share_threads()
        _linear(weight, bias, x.float().numpy(), found.numpy())
    return found


def layers(
    parts: Layers, x: Tensor, cos: Tensor, sin: Tensor, keys: Addresses, values: Addresses, room: int, place: int
) -> Tensor:
    """x `[T, D]` of T tokens after all layers and the norm, without gradient: the twin of `packed._run`.

    `cos` and `sin` `[T, W]` are of their positions. Their keys and values are written from `place` on, of the `room`
    places at the addresses `[N]` of the `keys` and `values` `[K, room, W]` of each layer, in bfloat16; each attends to
    the places before, and to itself.
    """
    x = x.float().clone()
    with LOCK:
        share_threads()
        _layers(*parts, x.numpy(), cos.float().numpy(), sin.float().numpy(), keys, values, room, place)
    return x


@intrinsic
def _at(context: Any, address: Any) -> Any:
    """The pointer to the bits at an address."""

    def generate(_: Any, b: Any, __: Any, args: Any) -> Any:
        return b.inttoptr(args[0], ir.IntType(16).as_pointer())

    return types.CPointer(types.uint16)(types.int64), generate


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def dot(weight: Bits, x: Floats) -> np.float32:
    """w · x, also of a float32 w."""
    total = np.float32(0)
    for j in range(len(x)):
        total += wide(weight[j]) * x[j]
    return total


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _norm(x: Floats, gain: Floats, eps: np.float32, to: Floats) -> None:
    for i in range(len(x)):
        total = np.float32(0)
        for j in range(x.shape[1]):
            total += x[i, j] * x[i, j]
        scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for j in range(x.shape[1]):
            to[i, j] = x[i, j] * scale * gain[j]


@njit(cache=True, fastmath=FAST, error_model="numpy")
def turn(x: Floats, gain: Floats, eps: np.float32, cos: Floats, sin: Floats) -> None:
    """Norm and rotation of the heads `[H, W]` of one token, in place."""
    half = x.shape[1] // 2
    if len(gain):
        _norm(x, gain, eps, x)
    for head in range(len(x)):
        row = x[head]
        for j in range(half):
            first, second = row[j], row[half + j]
            row[j] = first * cos[j] - second * sin[j]
            row[half + j] = second * cos[half + j] + first * sin[half + j]


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _attend(
    query: Floats, keys: Bits, values: Bits, count: int, scale: np.float32, weights: Floats, to: Floats
) -> None:
    """softmax(scale · query keysᵀ) values, `[W]`, over the first `count` places."""
    most = np.float32(-np.inf)
    for t in range(count):
        weights[t] = scale * dot(keys[t], query)
        most = max(most, weights[t])
    total = np.float32(0)
    for t in range(count):
        weights[t] = fast_exp(weights[t] - most)
        total += weights[t]
    to[:] = np.float32(0)
    for t in range(0, count - 3, 4):  # four at once: the sums are loaded and stored a fourth as often
        a, b, c, d = values[t], values[t + 1], values[t + 2], values[t + 3]
        p, q, r, s = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        for j in range(len(to)):
            to[j] += p * wide(a[j]) + q * wide(b[j]) + r * wide(c[j]) + s * wide(d[j])
    for t in range(count - count % 4, count):
        for j in range(len(to)):
            to[j] += weights[t] * wide(values[t, j])
    for j in range(len(to)):
        to[j] /= total


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def four(first: Bits, second: Bits, third: Bits, fourth: Bits, x: Floats) -> Four:
    """`dot` of four rows."""
    a = b = c = d = np.float32(0)
    for j in range(len(x)):
        y = x[j]
        a += wide(first[j]) * y
        b += wide(second[j]) * y
        c += wide(third[j]) * y
        d += wide(fourth[j]) * y
    return a, b, c, d


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def eight(first: Bits, second: Bits, third: Bits, fourth: Bits, x: Floats, y: Floats) -> Eight:
    """`four` of x and then of y: each weight is widened once."""
    a = b = c = d = e = f = g = h = np.float32(0)
    for j in range(len(x)):
        p, q, r, s = wide(first[j]), wide(second[j]), wide(third[j]), wide(fourth[j])
        a += p * x[j]
        b += q * x[j]
        c += r * x[j]
        d += s * x[j]
        e += p * y[j]
        f += q * y[j]
        g += r * y[j]
        h += s * y[j]
    return a, b, c, d, e, f, g, h


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _product(weight: Bits, x: Floats, to: Floats) -> None:
    step = len(weight) // 4
    for i in prange(step):
        j, k, m = i + step, i + 2 * step, i + 3 * step
        for t in range(0, len(x) - 1, 2):
            a, b, c, d, e, f, g, h = eight(weight[i], weight[j], weight[k], weight[m], x[t], x[t + 1])
            to[t, i], to[t, j], to[t, k], to[t, m] = a, b, c, d
            to[t + 1, i], to[t + 1, j], to[t + 1, k], to[t + 1, m] = e, f, g, h
        for t in range(len(x) - len(x) % 2, len(x)):
            to[t, i], to[t, j], to[t, k], to[t, m] = four(weight[i], weight[j], weight[k], weight[m], x[t])
    for i in range(4 * step, len(weight)):
        for t in range(len(x)):
            to[t, i] = dot(weight[i], x[t])


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _gated(weight: Bits, x: Floats, to: Floats) -> None:
    """SiLU(gate) · up, of the rows of the gate `[M]` and then of up `[M]`."""
    units = to.shape[1]
    step = (units + 1) // 2
    for i in prange(step):
        j = min(i + step, units - 1)
        for t in range(0, len(x) - 1, 2):
            a, b, up, other_up, e, f, next_up, last_up = eight(
                weight[i], weight[j], weight[units + i], weight[units + j], x[t], x[t + 1]
            )
            to[t, j], to[t + 1, j] = fast_silu(b) * other_up, fast_silu(f) * last_up
            to[t, i], to[t + 1, i] = fast_silu(a) * up, fast_silu(e) * next_up
        for t in range(len(x) - len(x) % 2, len(x)):
            a, b, up, other_up = four(weight[i], weight[j], weight[units + i], weight[units + j], x[t])
            to[t, j] = fast_silu(b) * other_up
            to[t, i] = fast_silu(a) * up


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _attended(queries: Floats, keys: Bits, values: Bits, place: int, scale: np.float32, to: Floats) -> None:
    """The heads `to` `[T, H, W]` of as many first `queries`, by the keys and values of their groups and places."""
    count, heads = to.shape[0], to.shape[1]
    group, weights = heads // len(keys), np.empty((count * heads, place + count), np.float32)
    for i in prange(count * heads):
        t, head = i // heads, i % heads
        shared = head // group
        _attend(queries[t, head], keys[shared], values[shared], place + t + 1, scale, weights[i], to[t, head])


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _add(x: Floats, y: Floats) -> None:
    for i in range(len(x)):
        for j in range(x.shape[1]):
            x[i, j] += y[i, j]


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _linear(weight: Bits, bias: Floats, x: Floats, to: Floats) -> None:
    _product(weight, x, to)
    for t in range(len(to)):
        for i in range(len(bias)):
            to[t, i] += bias[i]


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _layers(
    norm: Floats, project: Bits, bias: Floats, query_norm: Floats, key_norm: Floats, out: Bits, feed_norm: Floats,
    gates: Bits, down: Bits, last_norm: Floats, eps: np.float32, scale: np.float32, x: Floats, cos: Floats,
    sin: Floats, keys: Addresses, values: Addresses, room: int, place: int,
) -> None:  # fmt: skip
    count, size, width = len(x), cos.shape[1], project.shape[1]
    asked = out.shape[2] // size
    shared = (width // size - asked) // 2
    normed, added, inner = np.empty_like(x), np.empty_like(x), np.empty((count, down.shape[2]), np.float32)
    found, mixed = np.empty((count, width), np.float32), np.empty((count, asked * size), np.float32)
    heads, by_head = found.reshape(count, -1, size), mixed.reshape(count, -1, size)
    for n in range(len(project)):
        own_keys = numba.carray(_at(keys[n]), (shared, room, size))
        own_values = numba.carray(_at(values[n]), (shared, room, size))
        _norm(x, norm[n], eps, normed)
        _linear(project[n], bias[n], normed, found)
        for t in range(count):
            turn(heads[t, :asked], query_norm[n], eps, cos[t], sin[t])
            turn(heads[t, asked : asked + shared], key_norm[n], eps, cos[t], sin[t])
            for head in range(shared):
                for j in range(size):
                    own_keys[head, place + t, j] = narrow(heads[t, asked + head, j])
                    own_values[head, place + t, j] = narrow(heads[t, asked + shared + head, j])
        _attended(heads, own_keys, own_values, place, scale, by_head)
        _product(out[n], mixed, added)
        _add(x, added)
        _norm(x, feed_norm[n], eps, normed)
        _gated(gates[n], normed, inner)
        _product(down[n], inner, added)
        _add(x, added)
    _norm(x, last_norm, eps, x)
