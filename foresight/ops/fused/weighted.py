"""Actor-critics: a gradient step on ∇log π weighted by advantages, on the value loss and on the entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from foresight.ops.fused import mlp
from foresight.ops.fused.clipped import inside, log_softmax
from foresight.ops.fused.mlp import BLOCK, START, Member, backward_rows, forward_rows
from foresight.ops.fused.rmsprop import RMSProp, clip_and_step

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


class Weights(NamedTuple):
    """The coefficients of the loss, and the bound of the gradient norm."""

    value_coef: float
    entropy_coef: float
    max_norm: float


def weighted_step(
    policy: Member, value: Member, relu: bool, flat: Tensor, columns: Sequence[Tensor], weights: Weights,
    rmsprop: RMSProp,
) -> Tensor:  # fmt: skip
    """A gradient step on N steps, in place: the twin of `descend` in `a2c.py` for two small networks, all of `flat`.

    `columns` are observations `[N, D]`, actions, advantages and targets `[N]`. Returns the means over the steps, `[3]`:
    policy loss, value loss and entropy.
    """
    metrics = torch.empty(3)
    obs, action, advantage, target = (x.numpy() for x in columns)
    mlp.one_thread()
    _weighted_step(
        policy.flat, policy.sizes, value.flat, value.sizes, relu, flat.detach().numpy(), obs, action, advantage, target,
        *weights, rmsprop.squares, rmsprop.rate, rmsprop.decay, rmsprop.eps, mlp.passing([policy, value])[0, 0],
        metrics.numpy(),
    )  # fmt: skip
    torch.autograd.graph.increment_version(flat)
    return metrics


@njit(cache=True)
def _weighted_step(
    policy: Floats, policy_sizes: Indices, value: Floats, value_sizes: Indices, relu: bool, flat: Floats, obs: Floats,
    action: Indices, advantage: Floats, target: Floats, value_coef: float, entropy_coef: float, max_norm: float,
    squares: Floats, rate: float, decay: float, eps: float, scratch: Floats, metrics: Floats,
) -> None:  # fmt: skip
    rows, actions = len(obs), policy_sizes[-1]
    padded = -(-rows // BLOCK) * BLOCK
    hidden = np.empty(padded * inside(policy_sizes), np.float32)
    other = np.empty(padded * inside(value_sizes), np.float32)
    logps, values = np.empty((padded, actions), np.float32), np.empty((padded, 1), np.float32)
    gradient, nothing = np.empty_like(flat), np.empty((0, 0), np.float32)
    forward_rows(obs, policy, policy_sizes, relu, BLOCK, hidden, logps)
    forward_rows(obs, value, value_sizes, relu, BLOCK, other, values)
    log_softmax(logps[:rows])
    policy_loss, value_loss, entropy = 0.0, 0.0, 0.0
    for i in range(rows):
        weight, chosen, step_entropy = advantage[i] / rows, action[i], 0.0
        policy_loss -= logps[i, chosen] * weight
        for j in range(actions):
            step_entropy -= math.exp(logps[i, j]) * logps[i, j]
        entropy += step_entropy / rows
        for j in range(actions):
            p = math.exp(logps[i, j])
            logps[i, j] = weight * p + entropy_coef / rows * p * (logps[i, j] + step_entropy)
        logps[i, chosen] -= weight
        error = values[i, 0] - target[i]
        value_loss += 0.5 * error * error / rows
        values[i, 0] = value_coef * error / rows
    head, tail = gradient[: len(policy)], gradient[len(policy) :]
    backward_rows(logps[:rows], obs, hidden, policy, policy_sizes, relu, head, nothing, scratch, START, rows)
    backward_rows(values[:rows], obs, other, value, value_sizes, relu, tail, nothing, scratch, START, rows)
    clip_and_step(flat, gradient, max_norm, squares, rate, decay, eps)
    metrics[0], metrics[1], metrics[2] = policy_loss, value_loss, entropy
