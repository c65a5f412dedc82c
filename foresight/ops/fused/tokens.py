"""Log-probabilities and divergences of tokens as compiled loops on a CPU: a row of logits stays in the cache.

Torch makes a pass over memory for every operation, half a dozen of them over a slice of rows in float32. Logits are
float32 or bfloat16, everything else is float32. The threads are torch's. The readable twin is the rest of
`ops.tokens`, and a test compares the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from foresight.ops.fused.bfloat16 import narrow_as, numbers, wide
from foresight.ops.fused.latent import FAST, fast_exp, loop

Array = NDArray[Any]
LOWEST = np.float32(-87)  # e^x is 0 below
SMALLEST = np.float32(torch.finfo(torch.float32).min)


def able(logits: Tensor) -> bool:
    """Whether the loops can read these logits."""
    return logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16) and logits.numel() > 0


def token_logprob(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """log softmax(z / τ)[token], the entropy, and log Σ e^(z / τ), `[N]` each, of z `[N, V]`, without gradient.

    Raises IndexError unless each row has one token, from 0 to V - 1: the loop would read memory that is not its own.
    """
    logits, vocabulary = logits.detach().contiguous(), logits.shape[-1]
    if tokens.shape != logits.shape[:1] or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise IndexError(f"tokens of shape {list(tokens.shape)}: {len(logits)} from 0 to {vocabulary - 1} are needed")
    highest = logits.amax(-1).float() / temperature  # torch vectorizes a maximum, the compiler does not
    chosen, entropy, total = (torch.empty(len(logits)) for _ in range(3))
    of = numbers(logits), tokens.contiguous().numpy(), highest.numpy(), np.float32(1 / temperature)
    loop(_forward, _forward_threads, *of, chosen.numpy(), entropy.numpy(), total.numpy())
    return chosen, entropy, total


def token_logprob_backward(
    logits: Tensor, tokens: Tensor, temperature: float, total: Tensor, entropy: Tensor, outer: Tensor, slope: Tensor
) -> Tensor:
    """The gradient `[N, V]` of the logits, in their dtype.

    `outer` and `slope` `[N]` are the gradients of the log-probability and of the entropy, divided by the temperature;
    `total` and `entropy` `[N]` are results of `token_logprob`.
    """
    logits = logits.detach().contiguous()
    result = torch.empty_like(logits)
    rows = (x.detach().float().contiguous().numpy() for x in (total, entropy, outer, slope))
    of = numbers(logits), tokens.contiguous().numpy(), np.float32(1 / temperature), *rows
    loop(_backward, _backward_threads, *of, numbers(result))
    return result


def token_divergence(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """KL(p* ‖ p) and Σ min(p, p*) of p = softmax(z), p* = softmax(z*), and log Σ e^z of both, `[N]` each.

    Of logits z and z* `[N, V]`, without gradient.
    """
    if logits.shape != target.shape:
        raise ValueError(f"logits of shape {list(logits.shape)} and a target of {list(target.shape)}: they differ")
    both = [x.detach().contiguous() for x in (logits, target)]
    distance, overlap, total, wanted = (torch.empty(len(logits)) for _ in range(4))
    highest = [x.amax(-1).float().numpy() for x in both]
    found = (x.numpy() for x in (distance, overlap, total, wanted))
    loop(_divergence, _divergence_threads, *map(numbers, both), *highest, *found)
    return distance, overlap, total, wanted


def token_divergence_backward(logits: Tensor, target: Tensor, total: Tensor, wanted: Tensor, outer: Tensor) -> Tensor:
    """The gradient `[N, V]` of the logits, in their dtype.

    `outer` `[N]` is that of the divergence; `total` and `wanted` `[N]` are results of `token_divergence`.
    """
    both = [x.detach().contiguous() for x in (logits, target)]
    result = torch.empty_like(both[0])
    rows = (x.detach().float().contiguous().numpy() for x in (total, wanted, outer))
    loop(_divergence_backward, _divergence_backward_threads, *map(numbers, both), *rows, numbers(result))
    return result


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _chance(logp: np.float32) -> np.float32:
    """e^logp, also of -inf."""
    return np.float32(0) if logp < LOWEST else fast_exp(logp)


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _row(row: Array, highest: np.float32, inverse: np.float32) -> tuple[np.float32, np.float32]:
    """Σ e^d and Σ e^d d of d = z / τ - max z / τ."""
    mass, mean = np.float32(0), np.float32(0)
    for j in range(len(row)):
        d = wide(row[j]) * inverse - highest
        d = LOWEST if d < LOWEST else d  # also of -inf, whose product with 0 would be NaN
        weight = fast_exp(d)
        mass += weight
        mean += weight * d
    return mass, mean


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _one(
    i: int, logits: Array, tokens: Array, highest: Array, inverse: np.float32, chosen: Array, entropy: Array,
    total: Array,
) -> None:  # fmt: skip
    mass, mean = _row(logits[i], highest[i], inverse)
    total[i] = highest[i] + np.log(mass)
    chosen[i] = wide(logits[i, tokens[i]]) * inverse - total[i]
    entropy[i] = np.log(mass) - mean / mass


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _one_backward(
    i: int, logits: Array, tokens: Array, inverse: np.float32, total: Array, entropy: Array, outer: Array,
    slope: Array, result: Array,
) -> None:  # fmt: skip
    row, to, kind = logits[i], result[i], logits[i, 0]
    pull, by = outer[i] + slope[i] * entropy[i], slope[i]
    for j in range(len(row)):
        logp = wide(row[j]) * inverse - total[i]
        seen = LOWEST if logp < LOWEST else logp
        p = _chance(logp)
        to[j] = narrow_as(-p * (pull + by * seen), kind)
    token = tokens[i]
    logp = wide(row[token]) * inverse - total[i]
    seen = LOWEST if logp < LOWEST else logp
    p = _chance(logp)
    to[token] = narrow_as(outer[i] - p * (pull + by * seen), kind)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _forward(
    logits: Array, tokens: Array, highest: Array, inverse: np.float32, chosen: Array, entropy: Array, total: Array
) -> None:
    for i in range(len(logits)):
        _one(i, logits, tokens, highest, inverse, chosen, entropy, total)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _forward_threads(
    logits: Array, tokens: Array, highest: Array, inverse: np.float32, chosen: Array, entropy: Array, total: Array
) -> None:
    for i in prange(len(logits)):
        _one(i, logits, tokens, highest, inverse, chosen, entropy, total)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _backward(
    logits: Array, tokens: Array, inverse: np.float32, total: Array, entropy: Array, outer: Array, slope: Array,
    result: Array,
) -> None:  # fmt: skip
    for i in range(len(logits)):
        _one_backward(i, logits, tokens, inverse, total, entropy, outer, slope, result)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _backward_threads(
    logits: Array, tokens: Array, inverse: np.float32, total: Array, entropy: Array, outer: Array, slope: Array,
    result: Array,
) -> None:  # fmt: skip
    for i in prange(len(logits)):
        _one_backward(i, logits, tokens, inverse, total, entropy, outer, slope, result)


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _total(row: Array, highest: np.float32) -> np.float32:
    """log Σ e^z."""
    mass, _ = _row(row, highest, np.float32(1))
    found: np.float32 = highest + np.log(mass)
    return found


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _one_divergence(
    i: int, logits: Array, target: Array, highest: Array, peak: Array, distance: Array, overlap: Array, total: Array,
    wanted: Array,
) -> None:  # fmt: skip
    row, goal = logits[i], target[i]
    all_p, all_q = _total(row, highest[i]), _total(goal, peak[i])
    far, shared = np.float32(0), np.float32(0)
    for j in range(len(row)):
        logp, logq = wide(row[j]) - all_p, wide(goal[j]) - all_q
        p, q = _chance(logp), _chance(logq)
        logp, logq = SMALLEST if logp < SMALLEST else logp, LOWEST if logq < LOWEST else logq  # 0 · -inf would be NaN
        far += q * (logq - logp)
        shared += min(p, q)
    distance[i], overlap[i], total[i], wanted[i] = far, shared, all_p, all_q


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _one_divergence_backward(
    i: int, logits: Array, target: Array, total: Array, wanted: Array, outer: Array, result: Array
) -> None:
    row, goal, to, kind = logits[i], target[i], result[i], logits[i, 0]
    for j in range(len(row)):
        p, q = _chance(wide(row[j]) - total[i]), _chance(wide(goal[j]) - wanted[i])
        to[j] = narrow_as(outer[i] * (p - q), kind)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _divergence(
    logits: Array, target: Array, highest: Array, peak: Array, distance: Array, overlap: Array, total: Array,
    wanted: Array,
) -> None:  # fmt: skip
    for i in range(len(logits)):
        _one_divergence(i, logits, target, highest, peak, distance, overlap, total, wanted)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _divergence_threads(
    logits: Array, target: Array, highest: Array, peak: Array, distance: Array, overlap: Array, total: Array,
    wanted: Array,
) -> None:  # fmt: skip
    for i in prange(len(logits)):
        _one_divergence(i, logits, target, highest, peak, distance, overlap, total, wanted)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _divergence_backward(
    logits: Array, target: Array, total: Array, wanted: Array, outer: Array, result: Array
) -> None:
    for i in range(len(logits)):
        _one_divergence_backward(i, logits, target, total, wanted, outer, result)


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _divergence_backward_threads(
    logits: Array, target: Array, total: Array, wanted: Array, outer: Array, result: Array
) -> None:
    for i in prange(len(logits)):
        _one_divergence_backward(i, logits, target, total, wanted, outer, result)
