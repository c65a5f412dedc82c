"""SAC: actions in (-1, 1), the loss of two critics, differentiated by hand, and a gradient step of all networks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from foresight.ops.fused import mlp
from foresight.ops.fused.adam import Adam, clip_and_step_threads
from foresight.ops.fused.latent import alone
from foresight.ops.fused.mlp import Member, backward_mlps, forward_mlps

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
Pair = tuple[Floats, Floats]


def squash(mean: Tensor, std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """tanh(mean + std · noise) `[..., D]`, and its log-density `[...]`: the twin of `nets.outputs.TanhNormal`.

    Shapes: all `[..., D]`, float32 on the CPU.
    """
    action, logp = torch.empty_like(mean, memory_format=torch.contiguous_format), mean.new_empty(mean.shape[:-1])
    dims = mean.shape[-1]
    means, stds, noises = (x.detach().contiguous().view(-1, dims).numpy() for x in (mean, std, noise))
    _squash(means, stds, noises, action.view(-1, dims).numpy(), logp.view(-1).numpy())
    return action, logp


def soft_q(
    values: Sequence[Tensor], reward: Tensor, discount: Tensor, following: Sequence[Tensor], logp: Tensor, alpha: float
) -> tuple[list[Tensor], Tensor]:
    """The squared loss of two critics and the soft target, differentiated: the twin of `critic_loss` in `sac.py`.

    Shapes: `values` of the actions taken and `following` of the next ones are two `[N, 1]` each; reward, discount and
    logp (of the next actions) `[N]`; float32 on the CPU. Returns the gradients of the loss with respect to the values,
    two `[N, 1]`, and `[2]`: the loss and the mean of the values.
    """
    grads, metrics = [torch.empty_like(q) for q in values], torch.empty(2)
    (q, other), (first, second), (grad, other_grad) = values, following, grads
    _soft_q(
        q.numpy(), other.numpy(), reward.numpy(), discount.numpy(), first.numpy(), second.numpy(), logp.numpy(),
        grad.numpy(), other_grad.numpy(), metrics.numpy(), alpha,
    )  # fmt: skip
    return grads, metrics


def soft_step(
    policy: Member, critics: Sequence[Member], targets: Sequence[Member], policy_relu: bool, relu: bool, flat: Tensor,
    columns: Sequence[Tensor], bounds: tuple[float, float], alpha: float, adam: Adam, policy_adam: Adam,
) -> Tensor:  # fmt: skip
    """Gradient steps of SAC, in place: the twin of `descend` in `sac.py`, for two critics, whose weights are `flat`.

    `columns` are the features `[N, D]` of observation and next observation for the critics and for the policy, actions
    `[N, A]` in (-1, 1), rewards and discounts `[N]`, and the noise of the next actions and of the policy's, `[N, A]`;
    where the latter is empty the policy makes no step. `bounds` are those of the log standard deviation. Returns
    `[3]`: as `soft_q` does, and the entropy of the policy.
    """
    obs, next_obs, own, next_own, action, reward, discount, next_noise, noise = (
        x.detach().contiguous().numpy() for x in columns
    )
    rows, metrics, mlps = len(obs), torch.zeros(3), [policy, *critics]
    mlp.start()
    threads, block = mlp.threads_of(mlps), mlp.block_of(mlps, rows)
    padded = -(-rows // block) * block
    parts = mlp.parts_of(threads, critics, rows), mlp.parts_of(threads, [policy], rows)
    sizes = [critics[0].flat.size] * 2, [padded * critics[0].units] * 2
    gradients, hidden = (
        mlp.memory(slot, sum(counts)).split(counts) for slot, counts in zip((4, 3), sizes, strict=True)
    )
    with alone(threads):
        _soft_step(
            policy.flat, policy.sizes, policy_relu, (critics[0].flat, critics[1].flat),
            (targets[0].flat, targets[1].flat), critics[0].sizes, relu, flat.detach().numpy(), mlp.several(threads),
            block, obs, next_obs, own, next_own, action, reward, discount, next_noise, noise, *bounds, alpha, adam,
            policy_adam,
            (hidden[0].numpy(), hidden[1].numpy()), mlp.memory(5, padded * policy.units).numpy(),
            mlp.memory(4, sum(sizes[0])).numpy(), (gradients[0].numpy(), gradients[1].numpy()),
            mlp.passing(critics, parts[0]), mlp.memory(6, policy.flat.size).numpy(),
            mlp.passing([policy], parts[1]), metrics.numpy(),
        )  # fmt: skip
    return metrics


@njit(cache=True)
def _squash(mean: Floats, std: Floats, noise: Floats, action: Floats, logp: Floats) -> None:
    rows, dims = mean.shape
    for i in range(rows):
        total = 0.0
        for j in range(dims):
            u = mean[i, j] + std[i, j] * noise[i, j]
            action[i, j] = math.tanh(u)
            softplus = max(-2.0 * u, 0.0) + math.log1p(math.exp(-abs(2.0 * u)))
            slope = 2.0 * (math.log(2.0) - u - softplus)
            total -= 0.5 * noise[i, j] ** 2 + math.log(std[i, j]) + 0.5 * math.log(2.0 * math.pi) + slope
        logp[i] = total


@njit(cache=True)
def _soft_q(
    q: Floats, other: Floats, reward: Floats, discount: Floats, next_q: Floats, next_other: Floats, logp: Floats,
    grad: Floats, other_grad: Floats, metrics: Floats, alpha: float,
) -> None:  # fmt: skip
    rows = len(reward)
    loss, total = 0.0, 0.0
    for i in range(rows):
        target = reward[i] + discount[i] * (min(next_q[i, 0], next_other[i, 0]) - alpha * logp[i])
        error, other_error = q[i, 0] - target, other[i, 0] - target
        grad[i, 0], other_grad[i, 0] = error / rows, other_error / rows
        loss += 0.5 * (error * error + other_error * other_error)
        total += 0.5 * (q[i, 0] + other[i, 0])
    metrics[0], metrics[1] = loss / rows, total / rows


@njit(cache=True, nogil=True, error_model="numpy")
def _soft_step(
    policy: Floats, policy_sizes: Indices, policy_relu: bool, critics: Pair, targets: Pair, sizes: Indices, relu: bool,
    flat: Floats, threads: int | None, block: int, obs: Floats, next_obs: Floats, own: Floats, next_own: Floats,
    action: Floats, reward: Floats, discount: Floats, next_noise: Floats, noise: Floats, low: float, high: float,
    alpha: float, adam: Adam, policy_adam: Adam, hidden: Pair, policy_hidden: Floats, gradient: Floats,
    gradients: Pair, scratch: Floats, policy_gradient: Floats, policy_scratch: Floats, metrics: Floats,
) -> None:  # fmt: skip
    (rows, dims), padded = action.shape, -(-len(obs) // block) * block
    y, std, chosen = np.empty((padded, 2 * dims), np.float32), np.empty_like(action), np.empty_like(action)
    logp, x = np.empty(rows, np.float32), np.empty((rows, obs.shape[1] + dims), np.float32)
    next_q = np.empty((padded, 1), np.float32), np.empty((padded, 1), np.float32)
    q = np.empty((padded, 1), np.float32), np.empty((padded, 1), np.float32)
    grads, both = (np.empty((rows, 1), np.float32), np.empty((rows, 1), np.float32)), (sizes, sizes)
    nothing = np.empty((2, 0, 0), np.float32)

    forward_mlps((next_own,), (policy,), (policy_sizes,), policy_relu, threads, block, (policy_hidden,), (y,))
    _spread(y, low, high, std)
    _squash(y[:rows, :dims], std, next_noise, chosen, logp)
    _join(next_obs, chosen, x)
    forward_mlps((x, x), targets, both, relu, threads, block, hidden, next_q)
    _join(obs, action, x)
    forward_mlps((x, x), critics, both, relu, threads, block, hidden, q)
    _soft_q(q[0], q[1], reward, discount, next_q[0], next_q[1], logp, grads[0], grads[1], metrics, alpha)
    backward_mlps(grads, x, hidden, critics, both, relu, threads, gradients, nothing, scratch)
    clip_and_step_threads(
        flat, gradient, np.inf, adam.average, adam.squares, adam.rate, adam.betas, adam.eps, adam.step + 1, threads
    )
    if not len(noise):
        return

    forward_mlps((own,), (policy,), (policy_sizes,), policy_relu, threads, block, (policy_hidden,), (y,))
    _spread(y, low, high, std)
    _squash(y[:rows, :dims], std, noise, chosen, logp)
    _join(obs, chosen, x)
    forward_mlps((x, x), critics, both, relu, threads, block, hidden, q)
    for i in range(rows):  # the gradient of -min(q)
        first, second = q[0][i, 0], q[1][i, 0]
        share = np.float32(0.5) if first == second else np.float32(first < second)
        grads[0][i, 0], grads[1][i, 0] = -share / rows, (share - np.float32(1)) / rows
    into = np.empty((2, rows, x.shape[1]), np.float32)
    none = np.empty(0, np.float32), np.empty(0, np.float32)
    backward_mlps(grads, x, hidden, critics, both, relu, threads, none, into, scratch)
    upper, of_logp, entropy = np.empty((rows, 2 * dims), np.float32), alpha / rows, 0.0
    for i in range(rows):
        entropy -= logp[i]
        for j in range(dims):
            a, k = chosen[i, j], obs.shape[1] + j
            upper[i, j] = (1 - a * a) * (into[0, i, k] + into[1, i, k]) + 2 * a * of_logp
            inside = low <= y[i, dims + j] <= high
            upper[i, dims + j] = (noise[i, j] * upper[i, j] * std[i, j] - of_logp) if inside else 0.0
    metrics[2] = entropy / rows
    backward_mlps(
        (upper,), own, (policy_hidden,), (policy,), (policy_sizes,), policy_relu, threads, (policy_gradient,), nothing,
        policy_scratch,
    )  # fmt: skip
    clip_and_step_threads(
        policy, policy_gradient, np.inf, policy_adam.average, policy_adam.squares, policy_adam.rate, policy_adam.betas,
        policy_adam.eps, policy_adam.step + 1, threads,
    )  # fmt: skip


@njit(cache=True)
def _spread(y: Floats, low: float, high: float, std: Floats) -> None:
    rows, dims = std.shape
    for i in range(rows):
        for j in range(dims):
            std[i, j] = math.exp(min(max(y[i, dims + j], low), high))


@njit(cache=True)
def _join(a: Floats, b: Floats, x: Floats) -> None:
    width = a.shape[1]
    for i in range(len(x)):
        for j in range(width):
            x[i, j] = a[i, j]
        for j in range(b.shape[1]):
            x[i, width + j] = b[i, j]
