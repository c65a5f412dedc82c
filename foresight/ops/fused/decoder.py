"""The parts of a decoder layer between the products as compiled loops on a CPU: norm, rotation, gate.

Torch makes a pass over memory for every operation, in the backward pass twice as many; here each row is read once and
written once. Arguments are float32 or bfloat16, arithmetic and sums are float32. The threads are torch's. Each function
has a readable twin, in `nets.language.checkpointing` or in transformers, and a test that compares the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from foresight.ops.fused.bfloat16 import narrow, narrow_as, numbers, wide
from foresight.ops.fused.latent import FAST, fast_exp, fast_silu, loop

Array = NDArray[Any]
KINDS = (torch.float32, torch.bfloat16)
PARTS = 32  # of the rows, each with its own sum for the gradient of a gain, so that the result depends on no thread


def able(*given: Tensor) -> bool:
    """Whether the loops can read these tensors."""
    return all(x.device.type == "cpu" and x.dtype in KINDS and x.numel() > 0 for x in given)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `[B, T, H, W]` turned by the angles of `cos` and `sin` `[B, T, W]`: `[B, H, T, W]`, float32.

    Pairs are the first and the second half of a head (Su et al. 2021, arXiv:2104.09864, eq. 34, in another order).
    Differentiable in the heads.
    """
    found: Tensor = _Rotated.apply(heads, cos, sin)  # type: ignore[no-untyped-call]  # torch's
    return found


def rms_norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """gain · x / √(mean x² + ε) in `dtype`, of x `[..., D]` and a gain `[D]`. Differentiable."""
    found: Tensor = _RMSNorm.apply(x, gain, eps, dtype)  # type: ignore[no-untyped-call]  # torch's
    return found


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up of equal shapes and dtypes. Differentiable; saves its arguments alone."""
    found: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]  # torch's
    return found


def normed(x: Tensor, gain: Array, eps: float, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x + branch `[..., D]`, and its `rms_norm` in bfloat16; without gradient, and without a branch of x itself."""
    rows = x.reshape(-1, x.shape[-1])
    found, added = torch.empty(rows.shape, dtype=torch.bfloat16), branch is not None
    total = torch.empty_like(rows) if added else rows
    held = numbers(rows if branch is None else branch.reshape(rows.shape))
    loop(_sum, _sum_threads, numbers(rows), held, added, gain, np.float32(eps), numbers(total), numbers(found))
    return total.view(x.shape), found.view(x.shape)


def gated(both: Tensor) -> Tensor:
    """silu(gate) · up `[..., M]` of a gate and up in one tensor, `[..., 2 M]`; without gradient."""
    rows = both.reshape(-1, both.shape[-1])
    found = torch.empty(len(rows), rows.shape[1] // 2, dtype=both.dtype)
    loop(_halves, _halves_threads, numbers(rows), numbers(found))
    return found.view(*both.shape[:-1], -1)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.kind = heads.dtype
        rows, places, count, width = heads.shape
        found = torch.empty(rows, count, places, width)
        loop(_turn, _turn_threads, *map(numbers, (heads.contiguous(), cos.contiguous(), sin.contiguous(), found)))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        rows, count, places, width = grad.shape
        into = torch.empty(rows, places, count, width, dtype=ctx.kind)
        loop(_back, _back_threads, *map(numbers, (grad.contiguous(), cos.contiguous(), sin.contiguous(), into)))
        return into, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        rows = x.view(-1, x.shape[-1])
        found, scale = torch.empty(rows.shape, dtype=dtype), torch.empty(len(rows))
        results = numbers(found), numbers(scale)
        loop(_norm, _norm_threads, numbers(rows), _of_weight(gain), np.float32(eps), *results)
        ctx.save_for_backward(x, gain, scale)
        return found.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, gain, scale = ctx.saved_tensors
        rows, into = x.view(-1, x.shape[-1]), torch.empty_like(x)
        sums = torch.zeros(PARTS, len(gain))
        given, results = (grad.contiguous().view(rows.shape), rows), (scale, into.view(rows.shape), sums)
        loop(_norm_back, _norm_back_threads, *map(numbers, given), _of_weight(gain), *map(numbers, results))
        return into, sums.sum(0).to(gain.dtype) if ctx.needs_input_grad[1] else None, None, None


def _of_weight(gain: Tensor) -> Array:
    """`numbers` of a copy: FSDP frees the memory of a weight, which cannot be done while an array shares it."""
    return numbers(gain.detach().clone())


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        found = torch.empty_like(gate)
        loop(_gate, _gate_threads, *(numbers(x.view(-1, x.shape[-1])) for x in (gate, up, found)))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        to_gate, to_up = torch.empty_like(gate), torch.empty_like(up)
        given = grad.contiguous(), gate, up, to_gate, to_up
        loop(_gate_back, _gate_back_threads, *(numbers(x.view(-1, x.shape[-1])) for x in given))
        return to_gate, to_up


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _inverse_rms(row: Array, eps: np.float32) -> np.float32:
    total = np.float32(0)
    for j in range(len(row)):
        total += wide(row[j]) * wide(row[j])
    found: np.float32 = np.float32(1) / np.sqrt(total / np.float32(len(row)) + eps)
    return found


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _gate_row(gate: Array, up: Array, to: Array) -> None:
    kind = to[0]
    for j in range(len(to)):
        to[j] = narrow_as(fast_silu(wide(gate[j])) * wide(up[j]), kind)


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _turn_one(i: int, heads: Array, cos: Array, sin: Array, found: Array) -> None:
    row, place = i // cos.shape[1], i % cos.shape[1]
    half = cos.shape[2] // 2
    c, s = cos[row, place], sin[row, place]
    for head in range(heads.shape[2]):
        x, to = heads[row, place, head], found[row, head, place]
        for j in range(half):
            first, second = wide(x[j]), wide(x[half + j])
            to[j] = first * c[j] - second * s[j]
            to[half + j] = second * c[half + j] + first * s[half + j]


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _back_one(i: int, grad: Array, cos: Array, sin: Array, into: Array) -> None:
    row, place = i // cos.shape[1], i % cos.shape[1]
    half, kind = cos.shape[2] // 2, into[0, 0, 0, 0]
    c, s = cos[row, place], sin[row, place]
    for head in range(grad.shape[1]):
        above, to = grad[row, head, place], into[row, place, head]
        for j in range(half):
            first, second = wide(above[j]), wide(above[half + j])
            to[j] = narrow_as(first * c[j] + second * s[half + j], kind)
            to[half + j] = narrow_as(second * c[half + j] - first * s[j], kind)


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _norm_one(i: int, x: Array, gain: Array, eps: np.float32, found: Array, scale: Array) -> None:
    row, to, kind = x[i], found[i], found[0, 0]
    scale[i] = by = _inverse_rms(row, eps)
    for j in range(len(row)):
        to[j] = narrow_as(wide(row[j]) * by * wide(gain[j]), kind)


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _norm_back_part(part: int, grad: Array, x: Array, gain: Array, scale: Array, into: Array, sums: Array) -> None:
    count, total, kind = len(x), sums[part], into[0, 0]
    for i in range(part * count // PARTS, (part + 1) * count // PARTS):
        above, row, to, by = grad[i], x[i], into[i], scale[i]
        along = np.float32(0)
        for j in range(len(row)):
            slope = wide(above[j]) * wide(row[j]) * by
            total[j] += slope
            along += slope * wide(gain[j])
        along *= by / np.float32(len(row))
        for j in range(len(row)):
            to[j] = narrow_as(by * (wide(above[j]) * wide(gain[j]) - wide(row[j]) * along), kind)


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _gate_one(i: int, gate: Array, up: Array, found: Array) -> None:
    _gate_row(gate[i], up[i], found[i])


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _gate_back_one(i: int, grad: Array, gate: Array, up: Array, to_gate: Array, to_up: Array) -> None:
    above, row, other, into, into_up, kind = grad[i], gate[i], up[i], to_gate[i], to_up[i], to_up[0, 0]
    for j in range(len(row)):
        x, g = wide(row[j]), wide(above[j])
        open_ = np.float32(1) / (np.float32(1) + fast_exp(-x))
        into_up[j] = narrow_as(g * x * open_, kind)
        into[j] = narrow_as(g * wide(other[j]) * open_ * (np.float32(1) + x * (np.float32(1) - open_)), kind)


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _sum_one(
    i: int, x: Array, branch: Array, add: bool, gain: Array, eps: np.float32, total: Array, found: Array
) -> None:
    row, more, into, to, kind = x[i], branch[i], total[i], found[i], total[0, 0]
    if add:
        for j in range(len(row)):
            into[j] = narrow_as(wide(row[j]) + wide(more[j]), kind)
    by = _inverse_rms(into, eps)
    for j in range(len(row)):
        to[j] = narrow(wide(into[j]) * by * gain[j])


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _halves_one(i: int, both: Array, found: Array) -> None:
    units = found.shape[1]
    _gate_row(both[i, :units], both[i, units:], found[i])


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _sum(x: Array, branch: Array, add: bool, gain: Array, eps: np.float32, total: Array, found: Array) -> None:
    for i in range(len(x)):
        _sum_one(i, x, branch, add, gain, eps, total, found)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _sum_threads(x: Array, branch: Array, add: bool, gain: Array, eps: np.float32, total: Array, found: Array) -> None:
    for i in prange(len(x)):
        _sum_one(i, x, branch, add, gain, eps, total, found)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _halves(both: Array, found: Array) -> None:
    for i in range(len(both)):
        _halves_one(i, both, found)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _halves_threads(both: Array, found: Array) -> None:
    for i in prange(len(both)):
        _halves_one(i, both, found)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _turn(heads: Array, cos: Array, sin: Array, found: Array) -> None:
    for i in range(cos.shape[0] * cos.shape[1]):
        _turn_one(i, heads, cos, sin, found)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _turn_threads(heads: Array, cos: Array, sin: Array, found: Array) -> None:
    for i in prange(cos.shape[0] * cos.shape[1]):
        _turn_one(i, heads, cos, sin, found)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _back(grad: Array, cos: Array, sin: Array, into: Array) -> None:
    for i in range(cos.shape[0] * cos.shape[1]):
        _back_one(i, grad, cos, sin, into)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _back_threads(grad: Array, cos: Array, sin: Array, into: Array) -> None:
    for i in prange(cos.shape[0] * cos.shape[1]):
        _back_one(i, grad, cos, sin, into)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _norm(x: Array, gain: Array, eps: np.float32, found: Array, scale: Array) -> None:
    for i in range(len(x)):
        _norm_one(i, x, gain, eps, found, scale)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _norm_threads(x: Array, gain: Array, eps: np.float32, found: Array, scale: Array) -> None:
    for i in prange(len(x)):
        _norm_one(i, x, gain, eps, found, scale)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _norm_back(grad: Array, x: Array, gain: Array, scale: Array, into: Array, sums: Array) -> None:
    for part in range(PARTS):
        _norm_back_part(part, grad, x, gain, scale, into, sums)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _norm_back_threads(grad: Array, x: Array, gain: Array, scale: Array, into: Array, sums: Array) -> None:
    for part in prange(PARTS):
        _norm_back_part(part, grad, x, gain, scale, into, sums)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _gate(gate: Array, up: Array, found: Array) -> None:
    for i in range(len(gate)):
        _gate_one(i, gate, up, found)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _gate_threads(gate: Array, up: Array, found: Array) -> None:
    for i in prange(len(gate)):
        _gate_one(i, gate, up, found)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _gate_back(grad: Array, gate: Array, up: Array, to_gate: Array, to_up: Array) -> None:
    for i in range(len(gate)):
        _gate_back_one(i, grad, gate, up, to_gate, to_up)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _gate_back_threads(grad: Array, gate: Array, up: Array, to_gate: Array, to_up: Array) -> None:
    for i in prange(len(gate)):
        _gate_back_one(i, grad, gate, up, to_gate, to_up)
