"""One token through a layer of a transformer, and through a linear layer, as compiled loops on a CPU.

With one row every weight is read once and used once, so a product takes as long as its weights take to arrive. Torch's
products of one row reach half of the memory's bandwidth, and a layer is a dozen calls of it; here it is one. Weights,
keys and values are bfloat16, given as their bits (`bits`); everything else is float32. The threads are torch's. Each
function has a readable twin, and a test that compares the two.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from foresight.ops.fused_latent import FAST, fast_exp

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]
LOCK = threading.Lock()  # not every pool of threads that numba can use serves two callers at once


class Layer(NamedTuple):
    """A pre-norm layer of a Llama: H query heads and K heads of keys and values of width W, M units in the gated MLP.

    `bias` `[(H + 2 K) W]`, `query_norm` and `key_norm` `[W]` are empty in a layer without them.
    """

    norm: Floats  # [D]
    query: Bits  # [H W, D]
    key: Bits  # [K W, D]
    value: Bits  # [K W, D]
    bias: Floats
    query_norm: Floats
    key_norm: Floats
    out: Bits  # [D, H W]
    feed_norm: Floats  # [D]
    gate: Bits  # [M, D]
    up: Bits  # [M, D]
    down: Bits  # [D, M]
    eps: np.float32  # of all norms
    scale: np.float32  # of the products of queries and keys


def bits(weight: Tensor) -> Bits:
    """A tensor on the CPU as the bits of bfloat16; its own memory if it is in that dtype and contiguous."""
    found: Bits = weight.detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    return found


def floats(weight: Tensor | None) -> Floats:
    """A tensor on the CPU as float32; empty for None."""
    found: Floats = np.empty(0, np.float32) if weight is None else weight.detach().float().contiguous().numpy()
    return found


def linear(weight: Bits, bias: Floats, x: Tensor) -> Tensor:
    """W x + b `[O]` of x `[D]`, without gradient: the twin of `functional.linear`. `bias` may be empty."""
    found = torch.empty(len(weight))
    with LOCK:
        _share()
        _linear(weight, bias, x.float().numpy(), found.numpy())
    return found


def layers(
    parts: Sequence[Layer], x: Tensor, cos: Tensor, sin: Tensor, keys: list[Bits], values: list[Bits], place: int
) -> Tensor:
    """x `[D]` of one token after all layers, without gradient: the twin of `packed._run`.

    `cos` and `sin` `[W]` are of its position. Its keys and values are written at `place` of `keys` and `values`
    `[1, K, T, W]` of each layer; it attends to the places before, and to itself.
    """
    x = x.float().clone()
    state, angles = x.numpy(), (cos.float().numpy(), sin.float().numpy())
    with LOCK:
        _share()
        for part, key, value in zip(parts, keys, values, strict=True):
            _layer(*part, state, *angles, key, value, place)
    return x


def _share() -> None:
    numba.set_num_threads(max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)))


@intrinsic
def _wide(context: Any, bits: Any) -> Any:
    """The float32 of the bits of a bfloat16."""

    def generate(_: Any, b: Any, __: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return b.bitcast(b.shl(b.zext(args[0], word), ir.Constant(word, 16)), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _narrow(context: Any, x: Any) -> Any:
    """The bits of the bfloat16 nearest to a float32, even where two are."""

    def generate(_: Any, b: Any, __: Any, args: Any) -> Any:
        word = ir.IntType(32)
        x = b.bitcast(args[0], word)
        odd = b.and_(b.lshr(x, ir.Constant(word, 16)), ir.Constant(word, 1))
        x = b.add(x, b.add(odd, ir.Constant(word, 0x7FFF)))
        return b.trunc(b.lshr(x, ir.Constant(word, 16)), ir.IntType(16))

    return types.uint16(types.float32), generate


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _dot(weight: Bits, x: Floats) -> np.float32:
    total = np.float32(0)
    for j in range(len(x)):
        total += _wide(weight[j]) * x[j]
    return total


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _norm(x: Floats, gain: Floats, eps: np.float32, to: Floats) -> None:
    total = np.float32(0)
    for j in range(len(x)):
        total += x[j] * x[j]
    scale = np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)
    for j in range(len(x)):
        to[j] = x[j] * scale * gain[j]


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _turn(x: Floats, gain: Floats, eps: np.float32, cos: Floats, sin: Floats) -> None:
    """Norm and rotation of the heads `[H, W]` of one token, in place."""
    half = x.shape[1] // 2
    for head in range(len(x)):
        row = x[head]
        if len(gain):
            _norm(row, gain, eps, row)
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
        weights[t] = scale * _dot(keys[t], query)
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
            to[j] += p * _wide(a[j]) + q * _wide(b[j]) + r * _wide(c[j]) + s * _wide(d[j])
    for t in range(count - count % 4, count):
        for j in range(len(to)):
            to[j] += weights[t] * _wide(values[t, j])
    for j in range(len(to)):
        to[j] /= total


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _linear(weight: Bits, bias: Floats, x: Floats, to: Floats) -> None:
    for i in prange(len(to)):
        to[i] = _dot(weight[i], x) + (bias[i] if len(bias) else np.float32(0))


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _layer(
    norm: Floats, query: Bits, key: Bits, value: Bits, bias: Floats, query_norm: Floats, key_norm: Floats, out: Bits,
    feed_norm: Floats, gate: Bits, up: Bits, down: Bits, eps: np.float32, scale: np.float32, x: Floats, cos: Floats,
    sin: Floats, keys: Bits, values: Bits, place: int,
) -> None:  # fmt: skip
    asked, kept, size = len(query), len(key), len(cos)
    normed, heads, mixed = np.empty_like(x), np.empty(asked + 2 * kept, np.float32), np.empty(asked, np.float32)
    _norm(x, norm, eps, normed)
    for i in prange(len(heads)):
        if i < asked:
            y = _dot(query[i], normed)
        elif i < asked + kept:
            y = _dot(key[i - asked], normed)
        else:
            y = _dot(value[i - asked - kept], normed)
        heads[i] = y + bias[i] if len(bias) else y
    queries = heads[:asked].reshape(-1, size)
    own = heads[asked : asked + kept].reshape(-1, size)
    _turn(queries, query_norm, eps, cos, sin)
    _turn(own, key_norm, eps, cos, sin)
    for head in range(len(own)):
        for j in range(size):
            keys[0, head, place, j] = _narrow(own[head, j])
            values[0, head, place, j] = _narrow(heads[asked + kept + head * size + j])
    group, weights = len(queries) // len(own), np.empty((len(queries), place + 1), np.float32)
    for head in prange(len(queries)):
        shared = head // group
        to = mixed[head * size : (head + 1) * size]
        _attend(queries[head], keys[0, shared], values[0, shared], place + 1, scale, weights[head], to)
    for i in prange(len(x)):
        x[i] += _dot(out[i], mixed)
    _norm(x, feed_norm, eps, normed)
    inner = np.empty(len(gate), np.float32)
    for i in prange(len(gate)):
        y = _dot(gate[i], normed)
        inner[i] = y / (np.float32(1) + fast_exp(-y)) * _dot(up[i], normed)
    for i in prange(len(x)):
        x[i] += _dot(down[i], inner)
