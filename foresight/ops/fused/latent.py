"""The parts of world models between the products, as compiled loops over rows on a CPU: norms, gates, draws, two-hots.

Torch makes a pass over memory for every operation, and its exponential takes several times as long as the one here, a
polynomial that the compiler vectorizes (relative error 2e-7). All tensors are float32 on the CPU, and contiguous. Each
function has a readable twin, and a test that compares the two.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from contextlib import AbstractContextManager
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
FAST = {"contract", "reassoc", "nsz"}  # sums in any order, so that they vectorize; NaN and infinity stay what they are
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
NOTHING = np.empty((0, 0), np.float32)
LOCK = threading.Lock()  # held while several threads run a loop: not all of numba's layers allow two at once
_set = threading.local()


def norm_silu(u: Tensor, gain: Tensor, eps: float) -> Tensor:
    """silu(gain · u / rms(u)), differentiable: the twin of RMSNorm and SiLU. Shapes: u `[..., D]`, gain `[D]`."""
    result: Tensor = _NormSilu.apply(u, gain, eps)  # type: ignore[no-untyped-call]  # torch's
    return result


def norm_silu_rows(u: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The same for `[N, R, D]` and gains `[R, D]`, without gradient."""
    found = torch.empty_like(u)
    rows = u.view(-1, u.shape[-1])
    _norm_silu(rows.numpy(), gain.numpy(), np.float32(eps), found.view_as(rows).numpy())
    return found


def gated(gates: Tensor, before: Tensor, out: Tensor) -> None:
    """The state of a GRU in blocks, into `out` `[N, D]`: the twin of the last lines of `RSSM._advance`.

    Shapes: `gates` `[blocks, N, 3 D / blocks]` are reset, candidate and update before their activations; `before`
    `[N, D]`.
    """
    _gated(gates.numpy(), before.numpy(), out.numpy())


def one_hots(logits: Tensor, draws: Tensor | None, groups: int, uniform: float, out: Tensor) -> Tensor:
    """Samples of `groups` categoricals as one-hot vectors, written to `out`: the twin of `nets.outputs.OneHots`.

    Shapes: `logits` and `out` `[N, G C]`, `draws` `[N, G]` uniform in [0, 1), or None for the likeliest class. Returns
    the probabilities `[N, G, C]`, with a share `uniform` of the uniform distribution.
    """
    probs = logits.new_empty(len(logits), groups, logits.shape[1] // groups)
    numbers = NOTHING if draws is None else draws.contiguous().numpy()
    _one_hots(logits.detach().numpy(), numbers, probs.numpy(), out.numpy(), np.float32(uniform))
    return probs


def two_hot_mean(logits: Tensor, bins: Tensor) -> Tensor:
    """Σ softmax(logits) · bins, `[...]` of `[..., >= K]` and `[K]`, without gradient: the twin of `TwoHot.mean`."""
    found = logits.new_empty(logits.shape[:-1])
    rows = logits.detach().contiguous().view(-1, logits.shape[-1])
    _two_hot_mean(rows.numpy(), bins.numpy(), found.view(-1).numpy())
    return found


def two_hot_loss(logits: Tensor, index: Tensor, weight: Tensor, count: int) -> Tensor:
    """The sum of the cross-entropies of softmax(logits) with M two-hot codes, differentiable: see `TwoHot.loss`.

    Shapes: logits `[..., >= K]`, of which the first `count`, K, are read; `index` (int64) and `weight` `[..., M]` as
    `transforms.two_hot_neighbors` returns them; returns `[...]`.
    """
    result: Tensor = _TwoHotLoss.apply(logits, index, weight, count)  # type: ignore[no-untyped-call]  # torch's
    return result


class _NormSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, gain: Tensor, eps: float) -> Tensor:
        u = u.contiguous()
        ctx.save_for_backward(u, gain)
        ctx.eps = eps
        return norm_silu_rows(u.detach().view(-1, 1, u.shape[-1]), gain.detach().unsqueeze(0), eps).view_as(u)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        u, gain = ctx.saved_tensors
        into, gain_grad = torch.empty_like(u), torch.zeros_like(gain)
        rows = u.view(-1, u.shape[-1])
        _norm_silu_backward(
            grad.contiguous().view_as(rows).numpy(), rows.detach().numpy(), gain.detach().numpy(), np.float32(ctx.eps),
            into.view_as(rows).numpy(), gain_grad.numpy(),
        )  # fmt: skip
        return into, gain_grad, None


class _TwoHotLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, weight: Tensor, count: int) -> Tensor:
        rows = logits.detach().contiguous().view(-1, logits.shape[-1])
        index, weight = index.contiguous().view(len(rows), -1), weight.contiguous().view(len(rows), -1)
        loss, scale = rows.new_empty(len(rows)), rows.new_empty(len(rows))
        _two_hot_loss(rows.numpy(), index.numpy(), weight.numpy(), loss.numpy(), scale.numpy(), count)
        ctx.save_for_backward(rows, index, weight, scale)
        ctx.count = count
        return loss.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows, index, weight, scale = ctx.saved_tensors
        into = torch.empty_like(rows)
        _two_hot_loss_backward(
            grad.contiguous().view(-1).numpy(), rows.numpy(), index.numpy(), weight.numpy(), scale.numpy(),
            into.numpy(), ctx.count,
        )  # fmt: skip
        return into.view(*grad.shape, -1), None, None, None


@intrinsic
def fast_exp(context: Any, x: Any) -> Any:
    """e^x: 2^k times a polynomial in the rest, the method of the Cephes library. Between e^-87 and e^88."""

    def generate(_: Any, b: Any, __: Any, args: Any) -> Any:
        f, i = ir.FloatType(), ir.IntType(32)

        def c(value: float) -> Any:
            return ir.Constant(f, float(np.float32(value)))

        x = args[0]
        x = b.select(b.fcmp_ordered("<", x, c(-87.0)), c(-87.0), x)
        x = b.select(b.fcmp_ordered(">", x, c(88.0)), c(88.0), x)
        k = b.call(b.module.declare_intrinsic("llvm.rint", [f]), [b.fmul(x, c(1.44269504088896341))])
        r = b.fadd(b.fsub(x, b.fmul(k, c(0.693359375))), b.fmul(k, c(2.12194440e-4)))  # k ln 2 in two parts
        p = c(POLYNOMIAL[0])
        for coefficient in POLYNOMIAL[1:]:
            p = b.fadd(b.fmul(p, r), c(coefficient))
        p = b.fadd(b.fadd(b.fmul(b.fmul(p, r), r), r), c(1.0))
        power = b.shl(b.add(b.fptosi(k, i), ir.Constant(i, 127)), ir.Constant(i, 23))
        return b.fmul(p, b.bitcast(power, f))

    return types.float32(types.float32), generate


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def fast_silu(x: np.float32) -> np.float32:
    """x / (1 + e^-x)."""
    found: np.float32 = x / (np.float32(1) + fast_exp(-x))
    return found


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _norm_silu(u: Floats, gain: Floats, eps: np.float32, found: Floats) -> None:
    rows, width = u.shape
    one = np.float32(1)
    for i in range(rows):
        row, to, by = u[i], found[i], gain[i % len(gain)]
        total = np.float32(0)
        for j in range(width):
            total += row[j] * row[j]
        scale = one / np.sqrt(total / np.float32(width) + eps)
        for j in range(width):
            to[j] = fast_silu(row[j] * scale * by[j])


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _norm_silu_backward(
    grad: Floats, u: Floats, gain: Floats, eps: np.float32, into: Floats, gain_grad: Floats
) -> None:
    rows, width = u.shape
    one = np.float32(1)
    for i in range(rows):
        row, to, above = u[i], into[i], grad[i]
        total = np.float32(0)
        for j in range(width):
            total += row[j] * row[j]
        scale = one / np.sqrt(total / np.float32(width) + eps)
        along = np.float32(0)
        for j in range(width):
            unit = row[j] * scale
            y = unit * gain[j]
            gate = one / (one + fast_exp(-y))
            slope = above[j] * gate * (one + y * (one - gate))
            gain_grad[j] += slope * unit
            to[j] = slope * gain[j] * scale
            along += to[j] * unit
        along *= scale / np.float32(width)
        for j in range(width):
            to[j] -= row[j] * along


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _gated(gates: Floats, before: Floats, out: Floats) -> None:
    blocks, rows, _ = gates.shape
    part = before.shape[1] // blocks
    one, two = np.float32(1), np.float32(2)
    for i in range(rows):
        for k in range(blocks):
            at, old, to = gates[k, i], before[i, k * part : (k + 1) * part], out[i, k * part : (k + 1) * part]
            for j in range(part):
                new = one - two / (
                    one + fast_exp(two * at[part + j] / (one + fast_exp(-at[j])))
                )  # tanh(σ(reset) candidate)
                to[j] = old[j] + (new - old[j]) / (one + fast_exp(one - at[2 * part + j]))


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _one_hots(logits: Floats, draws: Floats, probs: Floats, out: Floats, uniform: np.float32) -> None:
    rows, groups, classes = probs.shape
    share, rest = uniform / np.float32(classes), np.float32(1) - uniform
    for i in range(rows):
        row, to, flat = logits[i], out[i], probs[i].reshape(-1)
        for g in range(groups):
            top = row[g * classes]
            for c in range(g * classes + 1, (g + 1) * classes):
                top = row[c] if row[c] > top else top
            for c in range(g * classes, (g + 1) * classes):
                flat[c] = row[c] - top
        for c in range(groups * classes):
            flat[c] = fast_exp(flat[c])
            to[c] = np.float32(0)
        for g in range(groups):
            first = g * classes
            total = np.float32(0)
            for c in range(first, first + classes):
                total += flat[c]
            scale, below, chosen, top = rest / total, 0.0, 0, np.float32(-1)
            for c in range(classes):
                p = flat[first + c] * scale + share
                flat[first + c] = p
                below += p
                if len(draws):
                    chosen += np.float32(below) <= draws[i, g]
                elif p > top:
                    top, chosen = p, c
            to[first + min(chosen, classes - 1)] = np.float32(1)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _two_hot_mean(logits: Floats, bins: Floats, found: Floats) -> None:
    rows, count = len(logits), len(bins)
    half = count // 2
    for i in range(rows):
        row = logits[i]
        top = row[0]
        for j in range(1, count):
            top = row[j] if row[j] > top else top
        total, mean = np.float32(0), np.float32(0)
        for j in range(half):  # mirror images together: symmetric bins with equal p give exactly 0
            low, high = fast_exp(row[j] - top), fast_exp(row[count - 1 - j] - top)
            total += low + high
            mean += low * bins[j] + high * bins[count - 1 - j]
        if count % 2:
            middle = fast_exp(row[half] - top)
            total += middle
            mean += middle * bins[half]
        found[i] = mean / total


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _two_hot_loss(logits: Floats, index: Indices, weight: Floats, loss: Floats, scale: Floats, count: int) -> None:
    for i in range(len(logits)):
        row = logits[i]
        top = row[0]
        for j in range(1, count):
            top = row[j] if row[j] > top else top
        total = np.float32(0)
        for j in range(count):
            total += fast_exp(row[j] - top)
        scale[i] = top + np.log(total)
        found = np.float32(0)
        for m in range(index.shape[1]):
            low, high = row[index[i, m]], row[index[i, m] + 1]
            found += scale[i] - low - weight[i, m] * (high - low)
        loss[i] = found


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _two_hot_loss_backward(
    grad: Floats, logits: Floats, index: Indices, weight: Floats, scale: Floats, into: Floats, count: int
) -> None:
    codes = index.shape[1]
    for i in range(len(logits)):
        row, to, above = logits[i], into[i], grad[i]
        to[count:] = 0
        for j in range(count):
            to[j] = np.float32(codes) * above * fast_exp(row[j] - scale[i])
        for m in range(codes):
            to[index[i, m]] -= above * (np.float32(1) - weight[i, m])
            to[index[i, m] + 1] -= above * weight[i, m]


@functools.cache
def start_threads() -> None:
    """Start the threads, and leave torch's count as it is: numba changes that of OpenMP, which may be torch's too.

    Needed before a compiled loop that is linked with one in threads: read from the cache, it does not do so itself.
    """
    count = torch.get_num_threads()
    numba.get_num_threads()  # type: ignore[attr-defined]  # it is exported late
    torch.set_num_threads(count)


def share_threads(wanted: int | None = None) -> int:
    """Have loops of this Python thread use `wanted` threads, by default torch's; returns how many there are."""
    start_threads()
    count: int = max(1, min(wanted or torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    if getattr(_set, "count", 0) != count:  # a call takes as long as a small product
        numba.set_num_threads(count)
        _set.count = count
    return count


def loop(one: Any, several: Any, *given: Any) -> None:
    """Run the loop `one` if torch has one thread, else `several`, the same loop in parallel.

    With one thread no others are started, which a forked process could not use. The loops are two functions, since
    numba's cache would take one for the other.
    """
    if torch.get_num_threads() == 1:
        one(*given)
        return
    with LOCK:
        share_threads()
        several(*given)


def alone(threads: int) -> AbstractContextManager[object]:
    """The context of a loop in so many threads."""
    return LOCK if threads > 1 else contextlib.nullcontext()
