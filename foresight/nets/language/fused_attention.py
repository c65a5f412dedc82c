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
from foresight.nets.language.fused_token import dot, wide
from foresight.ops.fused.latent import FAST, LOCK, fast_exp, share_threads

Array = NDArray[Any]
# bfloat16 as its bits
KINDS: dict[torch.dtype, Array] = {torch.bfloat16: np.zeros(0, np.uint16), torch.float32: np.zeros(0, np.float32)}
FEW = 32  # shared tokens that are read for each row at little cost
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
    return known and step.reach.shared <= FEW + step.reach.own


def attend(query: Tensor, step: DecodeStep, layer: int) -> Tensor:
    """softmax(q kᵀ) v `[B, H, E]` of scaled queries q `[B, H, D]`, in float32 and without gradient.

    Keys k `[b, KV, t, D]` and values v `[b, KV, t, E]` are those of a layer in all levels of the step.
    """
    levels = [(level.keys[layer], level.values[layer]) for level in (*step.levels, step.level)]
    strides = np.array([k.stride()[:3] + v.stride()[:3] for k, v in levels], np.int64)
    addresses = np.array([(k.data_ptr(), v.data_ptr()) for k, v in levels], np.int64)
    keys, values = levels[-1]
    found = torch.empty(*query.shape[:2], values.shape[-1])
    assert step.reach is not None
    asked, parents, counts = (x.numpy() for x in (query.float().contiguous(), step.reach.parents, step.reach.counts))
    with LOCK:
        share_threads()
        _attend(asked, KINDS[keys.dtype], addresses, strides, keys.shape[1], parents, counts, found.numpy())
    return found


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
    for t in range(to.shape[1]):
        key = keys[t * step : t * step + size]
        for i in range(count):
            to[i, t] = dot(key, queries[i])


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _softmax(scores: Array) -> None:
    for row in scores:
        most, total = np.float32(-np.inf), np.float32(0)
        for t in range(len(row)):
            most = max(most, row[t])
        for t in range(len(row)):
            row[t] = fast_exp(row[t] - most)
        for t in range(len(row)):
            total += row[t]
        for t in range(len(row)):
            row[t] /= total


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


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _attend(
    queries: Array, kind: Array, addresses: Array, strides: Array, shared: int, parents: Array, counts: Array,
    found: Array,
) -> None:  # fmt: skip
    rows, heads, _ = queries.shape
    group, half = heads // shared, (rows * shared + 1) // 2
    for i in prange(rows * shared):
        task = 2 * i if i < half else 2 * (i - half) + 1  # neighbors are alike: each of two threads gets every second
        row, head = task // shared, task % shared
        ends = counts[row].cumsum()
        weights = np.empty((group, ends[-1]), np.float32)
        asked, to = queries[row, head * group : (head + 1) * group], found[row, head * group : (head + 1) * group]
        to[:] = np.float32(0)
        for n in range(len(addresses)):
            step, start = strides[n], parents[row, n] * strides[n, 0] + head * strides[n, 1]
            keys = numba.carray(_at(addresses[n, 0], kind), FAR)[start:]
            _score(asked, keys, step[2], weights[:, ends[n] - counts[row, n] : ends[n]])
        _softmax(weights)
        for n in range(len(addresses)):
            step, start = strides[n], parents[row, n] * strides[n, 3] + head * strides[n, 4]
            values = numba.carray(_at(addresses[n, 1], kind), FAR)[start:]
            _mix(weights[:, ends[n] - counts[row, n] : ends[n]], values, step[5], to)
