"""Compositions of other ops as one compiled loop, for small networks on a CPU, where calls take longer than arithmetic.

Each has a readable twin, which computes the same with the other ops, and a test that compares the two.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from foresight.ops import fused_mlp
from foresight.ops.fused_latent import FAST, alone, fast_exp, start_threads
from foresight.ops.fused_mlp import BLOCK, Member, backward_rows, backward_threads, forward_rows, forward_threads

Floats = NDArray[np.float32]
Actions = NDArray[np.int64]
Indices = NDArray[np.int64]
Pair = tuple[Floats, Floats]
Each = tuple[Floats, ...]

SCALED = np.arange(256, dtype=np.float32) / np.float32(255)  # a table of byte / 255, as a division takes longer


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


class Adam(NamedTuple):
    """Adam's settings and, for one flat parameter, its averages of gradients and of their squares, in place."""

    average: Floats
    squares: Floats
    step: int  # steps made before
    rate: float
    betas: tuple[float, float]
    eps: float


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
    fused_mlp.one_thread()
    _clipped_epochs(
        policy.flat, policy.sizes, value.flat, value.sizes, relu, flat.detach().numpy(), obs, action, old_logprob,
        advantage, target, old_value, order.numpy(), np.array(edges), most, *clipping, *adam,
        fused_mlp.passing([policy, value])[0, 0], metrics.numpy(),
    )  # fmt: skip
    torch.autograd.graph.increment_version(flat)
    return metrics


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


def huber_q(
    q: Tensor, action: Tensor, reward: Tensor, discount: Tensor, following: Tensor, choice: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean Huber loss (δ = 1) of Q(s, a) and `value.double_q_target`, differentiated: the twin of that in `dqn.py`.

    Shapes: q and following (of the next state) `[N, A]`, everything else `[N]`, on the CPU: float32 except action and
    choice, which are int64. Returns the gradient of the loss with respect to `q` `[N, A]`, and `[2]`: the loss and the
    mean of Q(s, a).
    """
    grad, metrics = torch.zeros_like(q), torch.empty(2)
    _huber_q(
        q.numpy(), action.numpy(), reward.numpy(), discount.numpy(), following.numpy(), choice.numpy(), grad.numpy(),
        metrics.numpy(),
    )  # fmt: skip
    return grad, metrics


def q_step(
    online: Member, target: Member, relu: bool, columns: Sequence[Tensor], double: bool, max_norm: float, adam: Adam
) -> Tensor:
    """A gradient step of DQN, in place: the twin of `descend` in `dqn.py`. Returns `[2]`, as `huber_q` does.

    `columns` are observations `[N, D]`, actions, rewards and discounts `[N]` and next observations `[N, D]`.
    """
    rows, metrics = len(columns[0]), torch.empty(2)
    _prepare()
    threads, block = fused_mlp.threads_of([online]), fused_mlp.block_of([online], rows)
    padded = -(-rows // block) * block
    obs, action, reward, discount, next_obs = (x.contiguous().numpy() for x in columns)
    with alone(threads):
        _q_step(
            online.flat, target.flat, online.sizes, relu, threads, block, obs, action, reward, discount, next_obs,
            double, max_norm, *adam, fused_mlp.memory(3, padded * online.units).numpy(),
            fused_mlp.memory(4, online.flat.size).numpy(),
            fused_mlp.passing([online], fused_mlp.parts_of(threads, [online], rows)), metrics.numpy(),
        )  # fmt: skip
    return metrics


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
    _prepare()
    threads, block = fused_mlp.threads_of(mlps), fused_mlp.block_of(mlps, rows)
    padded = -(-rows // block) * block
    parts = fused_mlp.parts_of(threads, critics, rows), fused_mlp.parts_of(threads, [policy], rows)
    sizes = [critics[0].flat.size] * 2, [padded * critics[0].units] * 2
    gradients, hidden = (
        fused_mlp.memory(slot, sum(counts)).split(counts) for slot, counts in zip((4, 3), sizes, strict=True)
    )
    with alone(threads):
        _soft_step(
            policy.flat, policy.sizes, policy_relu, (critics[0].flat, critics[1].flat),
            (targets[0].flat, targets[1].flat), critics[0].sizes, relu, flat.detach().numpy(), threads, block, obs,
            next_obs, own, next_own, action, reward, discount, next_noise, noise, *bounds, alpha, adam, policy_adam,
            (hidden[0].numpy(), hidden[1].numpy()), fused_mlp.memory(5, padded * policy.units).numpy(),
            fused_mlp.memory(4, sum(sizes[0])).numpy(), (gradients[0].numpy(), gradients[1].numpy()),
            fused_mlp.passing(critics, parts[0]), fused_mlp.memory(6, policy.flat.size).numpy(),
            fused_mlp.passing([policy], parts[1]), metrics.numpy(),
        )  # fmt: skip
    return metrics


@functools.cache
def _prepare() -> None:
    fused_mlp.one_thread()
    start_threads()


def pixels(images: Tensor) -> Tensor:
    """Bytes `[N, C, H, W]` on the CPU as floats in [0, 1] in channels-last layout: the twin of `_pixels` in `conv.py`.

    Torch takes longer for this permutation than a small network for its convolutions.
    """
    count, channels, height, width = images.shape
    found = torch.empty(count, height, width, channels)
    _pixels(images.contiguous().view(count, channels, -1).numpy(), found.view(count, -1, channels).numpy(), SCALED)
    return found.permute(0, 3, 1, 2)


@njit(cache=True)
def _pixels(images: NDArray[np.uint8], found: Floats, scaled: Floats) -> None:
    count, channels, places = images.shape
    for i in range(count):
        for k in range(channels):
            for j in range(places):
                found[i, j, k] = scaled[images[i, k, j]]


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


@njit(cache=True)
def _huber_q(
    q: Floats, action: Actions, reward: Floats, discount: Floats, next_q: Floats, choice: Actions, grad: Floats,
    metrics: Floats,
) -> None:  # fmt: skip
    rows = len(action)
    loss, total = 0.0, 0.0
    for i in range(rows):
        value = q[i, action[i]]
        error = value - (reward[i] + discount[i] * next_q[i, choice[i]])
        total += value
        loss += 0.5 * error * error if abs(error) <= 1 else abs(error) - 0.5
        grad[i, action[i]] = min(max(error, -1.0), 1.0) / rows
    metrics[0], metrics[1] = loss / rows, total / rows


@njit(cache=True)
def _clipped_objective(
    logps: Floats, value: Floats, action: Actions, old_logprob: Floats, advantage: Floats, target: Floats,
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
    action: Actions, old_logprob: Floats, advantage: Floats, target: Floats, old_value: Floats, order: Indices,
    edges: Indices, most: int, clip_ratio: float, clip_value: float, value_coef: float, entropy_coef: float,
    normalize: bool, max_norm: float, average: Floats, squares: Floats, step: int, rate: float,
    betas: tuple[float, float], eps: float, scratch: Floats, metrics: Floats,
) -> None:  # fmt: skip
    padded, actions = -(-most // BLOCK) * BLOCK, policy_sizes[-1]
    x, chosen = np.empty((most, obs.shape[1]), np.float32), np.empty(most, np.int64)
    columns = np.empty((4, most), np.float32)
    inside, other_inside = _inside(policy_sizes), _inside(value_sizes)
    hidden, other_hidden = np.empty(padded * inside, np.float32), np.empty(padded * other_inside, np.float32)
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
        inner, other = hidden[: count * inside], other_hidden[: count * other_inside]
        forward_rows(x[:n], policy, policy_sizes, relu, BLOCK, inner, logps[:count])
        forward_rows(x[:n], value, value_sizes, relu, BLOCK, other, values[:count])
        _log_softmax(logps[:n])
        _clipped_objective(
            logps[:n], values[:n, 0], chosen[:n], columns[0, :n], columns[1, :n], columns[2, :n], columns[3, :n],
            grad_logps[:n], grad_values[:n, 0], metrics[k], clip_ratio, clip_value, value_coef, entropy_coef, normalize,
        )  # fmt: skip
        head, tail = gradient[: len(policy)], gradient[len(policy) :]
        backward_rows(grad_logps[:n], x[:n], inner, policy, policy_sizes, relu, head, nothing, scratch, 0, n)
        backward_rows(grad_values[:n], x[:n], other, value, value_sizes, relu, tail, nothing, scratch, 0, n)
        _clip_and_step(flat, gradient, max_norm, average, squares, rate, betas, eps, step + k + 1)


@njit(cache=True, nogil=True, error_model="numpy")
def _q_step(
    flat: Floats, target: Floats, sizes: Indices, relu: bool, threads: int, block: int, obs: Floats, action: Actions,
    reward: Floats, discount: Floats, next_obs: Floats, double: bool, max_norm: float, average: Floats,
    squares: Floats, step: int, rate: float, betas: tuple[float, float], eps: float, hidden: Floats, gradient: Floats,
    scratch: Floats, metrics: Floats,
) -> None:  # fmt: skip
    rows, actions = len(obs), sizes[-1]
    next_q = np.empty((-(-rows // block) * block, actions), np.float32)
    q, grad = np.empty_like(next_q), np.zeros((rows, actions), np.float32)
    one = (sizes,)
    _forward(next_obs, (target,), one, relu, threads, block, (hidden,), (next_q,))
    if double:
        _forward(next_obs, (flat,), one, relu, threads, block, (hidden,), (q,))
    chooses = q if double else next_q
    choice = np.array([np.argmax(chooses[i]) for i in range(rows)])
    _forward(obs, (flat,), one, relu, threads, block, (hidden,), (q,))
    _huber_q(q, action, reward, discount, next_q, choice, grad, metrics)
    nothing = np.empty((1, 0, 0), np.float32)
    _backward((grad,), obs, (hidden,), (flat,), one, relu, threads, (gradient,), nothing, scratch)
    _clip_and_step(flat, gradient, max_norm, average, squares, rate, betas, eps, step + 1)


@njit(cache=True, nogil=True, error_model="numpy")
def _forward(
    x: Floats, flats: Each, sizes: Sequence[Indices], relu: bool, threads: int, block: int, hidden: Each, found: Each
) -> None:
    if threads > 1 and len(flats) * len(found[0]) > block:
        forward_threads(x, flats, sizes, relu, block, hidden, found)
    else:
        for i in range(len(flats)):
            forward_rows(x, flats[i], sizes[i], relu, block, hidden[i], found[i])


@njit(cache=True, nogil=True, error_model="numpy")
def _soft_step(
    policy: Floats, policy_sizes: Indices, policy_relu: bool, critics: Pair, targets: Pair, sizes: Indices, relu: bool,
    flat: Floats, threads: int, block: int, obs: Floats, next_obs: Floats, own: Floats, next_own: Floats,
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

    _forward(next_own, (policy,), (policy_sizes,), policy_relu, threads, block, (policy_hidden,), (y,))
    _spread(y, low, high, std)
    _squash(y[:rows, :dims], std, next_noise, chosen, logp)
    _join(next_obs, chosen, x)
    _forward(x, targets, both, relu, threads, block, hidden, next_q)
    _join(obs, action, x)
    _forward(x, critics, both, relu, threads, block, hidden, q)
    _soft_q(q[0], q[1], reward, discount, next_q[0], next_q[1], logp, grads[0], grads[1], metrics, alpha)
    _backward(grads, x, hidden, critics, both, relu, threads, gradients, nothing, scratch)
    _clip_and_step(flat, gradient, np.inf, adam.average, adam.squares, adam.rate, adam.betas, adam.eps, adam.step + 1)
    if not len(noise):
        return

    _forward(own, (policy,), (policy_sizes,), policy_relu, threads, block, (policy_hidden,), (y,))
    _spread(y, low, high, std)
    _squash(y[:rows, :dims], std, noise, chosen, logp)
    _join(obs, chosen, x)
    _forward(x, critics, both, relu, threads, block, hidden, q)
    for i in range(rows):  # the gradient of -min(q)
        first, second = q[0][i, 0], q[1][i, 0]
        share = np.float32(0.5) if first == second else np.float32(first < second)
        grads[0][i, 0], grads[1][i, 0] = -share / rows, (share - np.float32(1)) / rows
    into = np.empty((2, rows, x.shape[1]), np.float32)
    none = np.empty(0, np.float32), np.empty(0, np.float32)
    _backward(grads, x, hidden, critics, both, relu, threads, none, into, scratch)
    upper, of_logp, entropy = np.empty((rows, 2 * dims), np.float32), alpha / rows, 0.0
    for i in range(rows):
        entropy -= logp[i]
        for j in range(dims):
            a, k = chosen[i, j], obs.shape[1] + j
            upper[i, j] = (1 - a * a) * (into[0, i, k] + into[1, i, k]) + 2 * a * of_logp
            inside = low <= y[i, dims + j] <= high
            upper[i, dims + j] = (noise[i, j] * upper[i, j] * std[i, j] - of_logp) if inside else 0.0
    metrics[2] = entropy / rows
    _backward(
        (upper,), own, (policy_hidden,), (policy,), (policy_sizes,), policy_relu, threads, (policy_gradient,), nothing,
        policy_scratch,
    )  # fmt: skip
    _clip_and_step(
        policy, policy_gradient, np.inf, policy_adam.average, policy_adam.squares, policy_adam.rate, policy_adam.betas,
        policy_adam.eps, policy_adam.step + 1,
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


@njit(cache=True, nogil=True, error_model="numpy")
def _backward(
    grads: Each, x: Floats, hidden: Each, flats: Each, sizes: Sequence[Indices], relu: bool, threads: int, places: Each,
    into: Floats, scratch: Floats,
) -> None:  # fmt: skip
    if threads > 1 and len(flats) * scratch.shape[1] > 1:
        backward_threads(grads, x, hidden, flats, sizes, relu, places, into, scratch)
    else:
        for i in range(len(flats)):
            backward_rows(
                grads[i], x, hidden[i], flats[i], sizes[i], relu, places[i], into[i], scratch[0, 0], 0, len(x)
            )  # fmt: skip


@njit(cache=True)
def _inside(sizes: Indices) -> int:
    """How many hidden units an MLP has."""
    units = 0
    for layer in range(1, len(sizes) - 1):
        units += sizes[layer]
    return units


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _log_softmax(rows: Floats) -> None:
    for i in range(len(rows)):
        row, total, most = rows[i], np.float32(0), rows[i, 0]
        for j in range(1, len(row)):
            most = max(most, row[j])
        for j in range(len(row)):
            total += fast_exp(row[j] - most)
        most += math.log(total)
        for j in range(len(row)):
            row[j] -= most


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _clip_and_step(
    flat: Floats, gradient: Floats, max_norm: float, average: Floats, squares: Floats, rate: float,
    betas: tuple[float, float], eps: float, step: int,
) -> None:  # fmt: skip
    """One step of Adam (Kingma and Ba 2015, alg. 1) down the clipped gradient."""
    total = np.float32(0)
    for i in range(len(gradient)):
        total += gradient[i] * gradient[i]
    norm = math.sqrt(total)
    scale = np.float32(max_norm / (norm + 1e-6)) if norm > max_norm else np.float32(1)
    first, second = np.float32(betas[0]), np.float32(betas[1])
    size = np.float32(rate / (1 - betas[0] ** step))
    root, small = np.float32(math.sqrt(1 - betas[1] ** step)), np.float32(eps)
    one = np.float32(1)
    for i in range(len(flat)):
        slope = gradient[i] * scale
        average[i] = first * average[i] + (one - first) * slope
        squares[i] = second * squares[i] + (one - second) * slope * slope
        flat[i] -= size * average[i] / (np.sqrt(squares[i]) / root + small)
