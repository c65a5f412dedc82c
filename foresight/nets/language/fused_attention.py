"""Attention of a decoding step as one compiled loop on a CPU: one query a row and head, over all levels of the cache.

Torch needs a dozen calls for it, and small products of batches in bfloat16 reach little of the processor's speed. Keys
and values are bfloat16 or float32; everything else is float32. The threads are torch's. The readable twin is the rest
of `tree_attention.tree_attention`, and a test compares the two.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from foresight.nets.language.cache import DecodeStep
from foresight.nets.language.fused_token import dot, floats, four, turn
from foresight.ops.fused.bfloat16 import narrow, numbers, wide
from foresight.ops.fused.latent import FAST, fast_exp, loop

Array = NDArray[Any]
# bfloat16 as its bits
KINDS: dict[torch.dtype, Array] = {torch.bfloat16: np.zeros(0, np.uint16), torch.float32: np.zeros(0, np.float32)}
FEW = 6400  # shared tokens that rows read in all, each for itself, at little cost
FAR = (1 << 40,)  # more elements than any cache has: the loop's own bounds are those of the levels


def able(query: Tensor, step: DecodeStep, layer: int) -> bool:
    """Whether `attend` can compute this step, and faster than torch.

    It can on a CPU, without gradient, of keys and values in one known dtype. Each row reads the tokens that it shares
    with others for itself, torch all at once: with many of these, torch is faster.
    """
    if query.device.type != "cpu" or torch.is_grad_enabled() or step.reach is None:
        return False
    held = [x for level in (*step.levels, step.level) for x in (level.keys[layer], level.values[layer])]
    known = held[-1].dtype in KINDS and all(x.dtype == held[-1].dtype and x.stride(-1) == 1 for x in held)
    return known and len(query) * (step.reach.shared - step.reach.own) <= FEW


def attend(query: Tensor, step: DecodeStep, layer: int) -> Tensor:
    """softmax(q kᵀ) v `[B, H, E]` of scaled queries q `[B, H, D]`, in float32 and without gradient.

    Keys k `[b, KV, t, D]` and values v `[b, KV, t, E]` are those of a layer in all levels of the step.
    """
    keys, values = step.level.keys[layer], step.level.values[layer]
    found = torch.empty(*query.shape[:2], values.shape[-1])
    asked = query.float().contiguous().numpy()
    loop(_attend, _attend_threads, asked, keys.shape[1], KINDS[keys.dtype], *_levels(step, layer), found.numpy())
    return found


def turn_and_attend(heads: Tensor, cos: Tensor, sin: Tensor, attention: Any, step: DecodeStep, layer: int) -> Tensor:
    """As `attend`, of queries, keys and values `[B, H + 2 KV, D]` in bfloat16, as they are projected.

    Queries and keys are normalized, if the `attention` of transformers does so, and rotated by `cos` and `sin`
    `[B, D]`; the new keys and values are written to the level of the step.
    """
    found = torch.empty(len(heads), heads.shape[1] - 2 * step.level.keys[layer].shape[1], heads.shape[2])
    norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    gain, key_gain = (floats(None if norm is None else norm.weight) for norm in norms)
    eps = np.float32(0 if norms[0] is None else norms[0].variance_epsilon)
    cosine, sine = cos.float().contiguous().numpy(), sin.float().contiguous().numpy()
    projected = numbers(heads.contiguous())
    given = projected, cosine, sine, gain, key_gain, eps, np.float32(attention.scaling)
    loop(_turned, _turned_threads, *given, *_levels(step, layer), found.numpy())
    return found


def _levels(step: DecodeStep, layer: int) -> tuple[Array, Array, Array, Array]:
    """Addresses and strides of the keys and values in all levels, and the `Reach` of the step."""
    levels = [(level.keys[layer], level.values[layer]) for level in (*step.levels, step.level)]
    addresses = np.array([(k.data_ptr(), v.data_ptr()) for k, v in levels], np.int64)
    strides = np.array([k.stride()[:3] + v.stride()[:3] for k, v in levels], np.int64)
    assert step.reach is not None
    return addresses, strides, step.reach.parents.numpy(), step.reach.counts.numpy()


@intrinsic
def _at(context: Any, address: Any, kind: Any) -> Any:
    """The pointer to the elements at an address."""

    def generate(_: Any, b: Any, __: Any, args: Any) -> Any:
        word = ir.IntType(16) if kind.dtype == types.uint16 else ir.FloatType()
        return b.inttoptr(args[0], word.as_pointer())

    return types.CPointer(kind.dtype)(types.int64, kind), generate


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _score(queries: Array, keys: Array, step: int, to: Array) -> None:
    """Scores `to` `[R, t]` of queries `[R, D]` against keys, of which one begins at every `step` numbers."""
    count, size = queries.shape
    places = to.shape[1]
    for t in range(0, places - 3, 4):  # four at once, as in `_mix`
        a, b = keys[t * step : t * step + size], keys[(t + 1) * step : (t + 1) * step + size]
        c, d = keys[(t + 2) * step : (t + 2) * step + size], keys[(t + 3) * step : (t + 3) * step + size]
        for i in range(count):
            to[i, t], to[i, t + 1], to[i, t + 2], to[i, t + 3] = four(a, b, c, d, queries[i])
    for t in range(places - places % 4, places):
        key = keys[t * step : t * step + size]
        for i in range(count):
            to[i, t] = dot(key, queries[i])


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _exponents(scores: Array) -> None:
    """e^(x - max x) of each row, in place: a softmax before its division."""
    for row in scores:
        most = row[0]
        for t in range(len(row)):
            most = row[t] if row[t] > most else most
        for t in range(len(row)):
            row[t] -= most
    flat = scores.reshape(-1)
    for t in range(len(flat)):
        flat[t] = fast_exp(flat[t])


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _divide(to: Array, weights: Array) -> None:
    """Rows `to` `[R, E]` over the sums of their weights `[R, t]`, in place."""
    for i in range(len(to)):
        total, row = np.float32(0), to[i]
        for t in range(weights.shape[1]):
            total += weights[i, t]
        scale = np.float32(1) / total
        for j in range(len(row)):
            row[j] *= scale


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _mix(weights: Array, values: Array, step: int, to: Array) -> None:
    """Weights `[R, t]` times values, of which one begins at every `step` numbers, added to `to` `[R, E]`."""
    count, size = to.shape
    places = weights.shape[1]
    for t in range(0, places - 3, 4):  # four at once: the sums are loaded and stored a fourth as often
        a, b = values[t * step : t * step + size], values[(t + 1) * step : (t + 1) * step + size]
        c, d = values[(t + 2) * step : (t + 2) * step + size], values[(t + 3) * step : (t + 3) * step + size]
        for i in range(count):
            p, q, r, s = weights[i, t], weights[i, t + 1], weights[i, t + 2], weights[i, t + 3]
            for j in range(size):
                to[i, j] += p * wide(a[j]) + q * wide(b[j]) + r * wide(c[j]) + s * wide(d[j])
    for t in range(places - places % 4, places):
        value = values[t * step : t * step + size]
        for i in range(count):
            for j in range(size):
                to[i, j] += weights[i, t] * wide(value[j])


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _row(
    asked: Array, row: int, head: int, kind: Array, addresses: Array, strides: Array, parents: Array, counts: Array,
    to: Array,
) -> None:  # fmt: skip
    """The queries `asked` `[R, D]` of one row and head of keys and values."""
    ends = counts[row].cumsum()
    weights = np.empty((len(asked), ends[-1]), np.float32)
    to[:] = np.float32(0)
    for n in range(len(addresses)):
        step, start = strides[n], parents[row, n] * strides[n, 0] + head * strides[n, 1]
        keys = numba.carray(_at(addresses[n, 0], kind), FAR)[start:]
        _score(asked, keys, step[2], weights[:, ends[n] - counts[row, n] : ends[n]])
    _exponents(weights)
    for n in range(len(addresses)):
        step, start = strides[n], parents[row, n] * strides[n, 3] + head * strides[n, 4]
        values = numba.carray(_at(addresses[n, 1], kind), FAR)[start:]
        _mix(weights[:, ends[n] - counts[row, n] : ends[n]], values, step[5], to)
    _divide(to, weights)


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _widen(x: Array, to: Array) -> None:
    for i in range(len(x)):
        row, into = x[i], to[i]
        for j in range(len(row)):
            into[j] = wide(row[j])


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _task(i: int, rows: int, shared: int) -> tuple[int, int]:
    """A row and a head: neighbors are alike, so each of two threads gets every second task."""
    half = (rows * shared + 1) // 2
    task = 2 * i if i < half else 2 * (i - half) + 1
    return task // shared, task % shared


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _one(
    i: int, queries: Array, shared: int, kind: Array, addresses: Array, strides: Array, parents: Array, counts: Array,
    found: Array,
) -> None:  # fmt: skip
    group, (row, head) = queries.shape[1] // shared, _task(i, len(queries), shared)
    first, last = head * group, (head + 1) * group
    _row(queries[row, first:last], row, head, kind, addresses, strides, parents, counts, found[row, first:last])


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _turned_one(
    i: int, projected: Array, cos: Array, sin: Array, query_gain: Array, key_gain: Array, eps: np.float32,
    scale: np.float32, addresses: Array, strides: Array, parents: Array, counts: Array, found: Array,
) -> None:  # fmt: skip
    rows, heads, size = found.shape
    shared = (projected.shape[1] - heads) // 2
    group, (row, head) = heads // shared, _task(i, rows, shared)
    first, last = head * group, (head + 1) * group
    asked, key = np.empty((group, size), np.float32), np.empty((1, size), np.float32)
    _widen(projected[row, heads + head : heads + head + 1], key)
    _widen(projected[row, first:last], asked)
    turn(key, key_gain, eps, cos[row], sin[row])
    turn(asked, query_gain, eps, cos[row], sin[row])
    step, place = strides[-1], counts[row, -1] - 1
    keys = numba.carray(_at(addresses[-1, 0], projected), FAR)[row * step[0] + head * step[1] + place * step[2] :]
    values = numba.carray(_at(addresses[-1, 1], projected), FAR)[row * step[3] + head * step[4] + place * step[5] :]
    value = projected[row, heads + shared + head]
    for j in range(size):
        keys[j] = narrow(key[0, j])
    for j in range(size):
        values[j] = value[j]
    for g in range(group):
        for j in range(size):
            asked[g, j] *= scale
    _row(asked, row, head, projected, addresses, strides, parents, counts, found[row, first:last])


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _attend(
    queries: Array, shared: int, kind: Array, addresses: Array, strides: Array, parents: Array, counts: Array,
    found: Array,
) -> None:  # fmt: skip
    for i in range(len(queries) * shared):
        _one(i, queries, shared, kind, addresses, strides, parents, counts, found)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _attend_threads(
    queries: Array, shared: int, kind: Array, addresses: Array, strides: Array, parents: Array, counts: Array,
    found: Array,
) -> None:  # fmt: skip
    for i in prange(len(queries) * shared):
        _one(i, queries, shared, kind, addresses, strides, parents, counts, found)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _turned(
    projected: Array, cos: Array, sin: Array, query_gain: Array, key_gain: Array, eps: np.float32, scale: np.float32,
    addresses: Array, strides: Array, parents: Array, counts: Array, found: Array,
) -> None:  # fmt: skip
    for i in range(len(found) * (projected.shape[1] - found.shape[1]) // 2):
        _turned_one(
            i, projected, cos, sin, query_gain, key_gain, eps, scale, addresses, strides, parents, counts, found
        )


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _turned_threads(
    projected: Array, cos: Array, sin: Array, query_gain: Array, key_gain: Array, eps: np.float32, scale: np.float32,
    addresses: Array, strides: Array, parents: Array, counts: Array, found: Array,
) -> None:  # fmt: skip
    for i in prange(len(found) * (projected.shape[1] - found.shape[1]) // 2):
        _turned_one(
            i, projected, cos, sin, query_gain, key_gain, eps, scale, addresses, strides, parents, counts, found
        )
