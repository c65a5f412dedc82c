"""PPO: the loss of a minibatch, differentiated by hand, and all minibatch steps of an update."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from foresight.ops.fused import mlp
from foresight.ops.fused.adam import Adam, clip_and_step
from foresight.ops.fused.latent import FAST, fast_exp
from foresight.ops.fused.mlp import BLOCK, START, Member, backward_rows, forward_rows

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


def clipped_objective(
    logits: Tensor,
    value: Tensor,
    action: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    target: Tensor,
    old_value: Tensor,
    clip_ratio: float,
    clip_value: float | None,
    value_coef: float,
    entropy_coef: float,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's loss of N unmasked steps with categorical actions, differentiated: the twin of `objective` in `ppo.py`.

    Shapes: logits `[N, A]`, everything else `[N]`, all float32 on the CPU except `action`, which is int64. Returns the
    gradients of the loss with respect to `logits` `[N, A]` and `value` `[N]`, and `[5]`: policy loss, value loss,
    entropy, k3 estimate of the KL, share of clipped steps. `normalize`: see `ops.advantage.normalize`.
    `clip_value` None: see `ops.value.squared_loss`.
    """
    # In torch, so that the first log-probabilities are those of the rollout bit for bit and the ratio is exactly 1.
    logps = torch.log_softmax(logits.detach(), -1)
    grad_logits, grad_value, metrics = torch.empty_like(logps), torch.empty_like(value), torch.empty(5)
    limit = math.inf if clip_value is None else clip_value
    _clipped_objective(
        logps.numpy(), value.detach().numpy(), action.numpy(), old_logprob.numpy(), advantage.numpy(), target.numpy(),
        old_value.numpy(), grad_logits.numpy(), grad_value.numpy(), metrics.numpy(), clip_ratio, limit, value_coef,
        entropy_coef, normalize,
    )  # fmt: skip
    return grad_logits, grad_value, metrics


class Clipping(NamedTuple):
    """The coefficients of PPO's loss, and the bound of the gradient norm."""

    ratio: float
    value: float  # infinite: values are not clipped
    value_coef: float
    entropy_coef: float
    normalize: bool
    max_norm: float


def clipped_epochs(
    policy: Member, value: Member, relu: bool, flat: Tensor, columns: Sequence[Tensor], order: Tensor,
    edges: Sequence[int], clipping: Clipping, adam: Adam,
) -> Tensor:  # fmt: skip
    """Minibatch steps of PPO, in place: the twin of `epochs` in `ppo.py` for two small networks, all of `flat`.

    `columns` are observations `[N, D]`, actions, and log-probabilities, advantages, targets and values `[N]`. The
    minibatches are the rows `order[edges[k] : edges[k + 1]]`. Returns the metrics of `clipped_objective` for each,
    `[K, 5]`.
    """
    metrics, most = torch.empty(len(edges) - 1, 5), max(b - a for a, b in itertools.pairwise(edges))
    obs, action, old_logprob, advantage, target, old_value = (x.numpy() for x in columns)
    mlp.one_thread()
    _clipped_epochs(
        policy.flat, policy.sizes, value.flat, value.sizes, relu, flat.detach().numpy(), obs, action, old_logprob,
        advantage, target, old_value, order.numpy(), np.array(edges), most, *clipping, *adam,
        mlp.passing([policy, value])[0, 0], metrics.numpy(),
    )  # fmt: skip
    torch.autograd.graph.increment_version(flat)
    return metrics


@njit(cache=True)
def _clipped_objective(
    logps: Floats, value: Floats, action: Indices, old_logprob: Floats, advantage: Floats, target: Floats,
    old_value: Floats, grad_logits: Floats, grad_value: Floats, metrics: Floats, clip_ratio: float, clip_value: float,
    value_coef: float, entropy_coef: float, normalize: bool,
) -> None:  # fmt: skip
    rows, actions = logps.shape
    mean, scale = 0.0, 1.0
    if normalize:
        for i in range(rows):
            mean += advantage[i]
        mean /= rows
        squares = 0.0
        for i in range(rows):
            squares += (advantage[i] - mean) ** 2
        scale = 1 / (math.sqrt(squares / max(rows - 1, 1)) + 1e-8)
    policy_loss, value_loss, entropy, divergence, outside = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(rows):
        normalized = (advantage[i] - mean) * scale
        difference = min(max(logps[i, action[i]] - old_logprob[i], -20.0), 20.0)
        ratio = math.exp(difference)
        plain = ratio * normalized
        clipped = min(max(ratio, 1 - clip_ratio), 1 + clip_ratio) * normalized
        policy_loss -= min(plain, clipped)
        divergence += math.expm1(difference) - difference
        outside += ratio < 1 - clip_ratio or ratio > 1 + clip_ratio
        weight = 0.0 if clipped < plain else plain / rows  # of ∇log π in the gradient, as ∇ρ = ρ ∇log π

        step_entropy = 0.0
        for j in range(actions):
            step_entropy -= math.exp(logps[i, j]) * logps[i, j]
        entropy += step_entropy
        for j in range(actions):
            p = math.exp(logps[i, j])
            grad_logits[i, j] = weight * p + entropy_coef / rows * p * (logps[i, j] + step_entropy)
        grad_logits[i, action[i]] -= weight

        error = value[i] - target[i]
        moved = value[i] - old_value[i]
        near = old_value[i] + min(max(moved, -clip_value), clip_value) - target[i]
        if abs(moved) > clip_value and abs(near) > abs(error):
            value_loss += 0.5 * near * near
            error = 0.0  # the clipped value is a constant
        else:
            value_loss += 0.5 * error * error
        grad_value[i] = value_coef * error / rows
    metrics[0], metrics[1], metrics[2] = policy_loss / rows, value_loss / rows, entropy / rows
    metrics[3], metrics[4] = divergence / rows, outside / rows


@njit(cache=True)
def _clipped_epochs(
    policy: Floats, policy_sizes: Indices, value: Floats, value_sizes: Indices, relu: bool, flat: Floats, obs: Floats,
    action: Indices, old_logprob: Floats, advantage: Floats, target: Floats, old_value: Floats, order: Indices,
    edges: Indices, most: int, clip_ratio: float, clip_value: float, value_coef: float, entropy_coef: float,
    normalize: bool, max_norm: float, average: Floats, squares: Floats, step: int, rate: float,
    betas: tuple[float, float], eps: float, scratch: Floats, metrics: Floats,
) -> None:  # fmt: skip
    padded, actions = -(-most // BLOCK) * BLOCK, policy_sizes[-1]
    x, chosen = np.empty((most, obs.shape[1]), np.float32), np.empty(most, np.int64)
    columns = np.empty((4, most), np.float32)
    units, other_units = inside(policy_sizes), inside(value_sizes)
    hidden, other_hidden = np.empty(padded * units, np.float32), np.empty(padded * other_units, np.float32)
    logps, values = np.empty((padded, actions), np.float32), np.empty((padded, 1), np.float32)
    grad_logps, grad_values = np.empty((most, actions), np.float32), np.empty((most, 1), np.float32)
    gradient, nothing = np.empty_like(flat), np.empty((0, 0), np.float32)
    for k in range(len(edges) - 1):
        rows = order[edges[k] : edges[k + 1]]
        n, count = len(rows), -(-len(rows) // BLOCK) * BLOCK
        for i in range(n):
            row = rows[i]
            for j in range(obs.shape[1]):
                x[i, j] = obs[row, j]
            chosen[i] = action[row]
            columns[0, i], columns[1, i] = old_logprob[row], advantage[row]
            columns[2, i], columns[3, i] = target[row], old_value[row]
        inner, other = hidden[: count * units], other_hidden[: count * other_units]
        forward_rows(x[:n], policy, policy_sizes, relu, BLOCK, inner, logps[:count])
        forward_rows(x[:n], value, value_sizes, relu, BLOCK, other, values[:count])
        log_softmax(logps[:n])
        _clipped_objective(
            logps[:n], values[:n, 0], chosen[:n], columns[0, :n], columns[1, :n], columns[2, :n], columns[3, :n],
            grad_logps[:n], grad_values[:n, 0], metrics[k], clip_ratio, clip_value, value_coef, entropy_coef, normalize,
        )  # fmt: skip
        head, tail = gradient[: len(policy)], gradient[len(policy) :]
        backward_rows(grad_logps[:n], x[:n], inner, policy, policy_sizes, relu, head, nothing, scratch, START, n)
        backward_rows(grad_values[:n], x[:n], other, value, value_sizes, relu, tail, nothing, scratch, START, n)
        clip_and_step(flat, gradient, max_norm, average, squares, rate, betas, eps, step + k + 1)


@njit(cache=True)
def inside(sizes: Indices) -> int:
    """How many hidden units an MLP has."""
    units = 0
    for layer in range(1, len(sizes) - 1):
        units += sizes[layer]
    return units


@njit(cache=True, fastmath=FAST, error_model="numpy")
def log_softmax(rows: Floats) -> None:
    """The log-softmax of each row, in place."""
    for i in range(len(rows)):
        row, total, most = rows[i], np.float32(0), rows[i, 0]
        for j in range(1, len(row)):
            most = max(most, row[j])
        for j in range(len(row)):
            total += fast_exp(row[j] - most)
        most += math.log(total)
        for j in range(len(row)):
            row[j] -= most
