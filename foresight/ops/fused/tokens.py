"""Log-probabilities of tokens as one compiled loop on a CPU: a row of logits stays in the cache until it is done.

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
        p = np.float32(0) if logp < LOWEST else fast_exp(seen)
        to[j] = narrow_as(-p * (pull + by * seen), kind)
    token = tokens[i]
    logp = wide(row[token]) * inverse - total[i]
    seen = LOWEST if logp < LOWEST else logp
    p = np.float32(0) if logp < LOWEST else fast_exp(seen)
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
