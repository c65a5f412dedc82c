"""DQN: the loss of Q-values, differentiated by hand, and a gradient step."""

from __future__ import annotations

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
    mlp.start()
    threads, block = mlp.threads_of([online]), mlp.block_of([online], rows)
    padded = -(-rows // block) * block
    obs, action, reward, discount, next_obs = (x.contiguous().numpy() for x in columns)
    hidden = mlp.memory(3, 2 * padded * online.units).chunk(2)
    with alone(threads):
        _q_step(
            online.flat, target.flat, online.sizes, relu, mlp.several(threads), block, obs, action, reward, discount,
            next_obs, double, max_norm, *adam, (hidden[0].numpy(), hidden[1].numpy()),
            mlp.memory(4, online.flat.size).numpy(),
            mlp.passing([online], mlp.parts_of(threads, [online], rows)), metrics.numpy(),
        )  # fmt: skip
    return metrics


@njit(cache=True)
def _huber_q(
    q: Floats, action: Indices, reward: Floats, discount: Floats, next_q: Floats, choice: Indices, grad: Floats,
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


@njit(cache=True, nogil=True, error_model="numpy")
def _q_step(
    flat: Floats, target: Floats, sizes: Indices, relu: bool, threads: int | None, block: int, obs: Floats,
    action: Indices, reward: Floats, discount: Floats, next_obs: Floats, double: bool, max_norm: float, average: Floats,
    squares: Floats, step: int, rate: float, betas: tuple[float, float], eps: float, hidden: Pair, gradient: Floats,
    scratch: Floats, metrics: Floats,
) -> None:  # fmt: skip
    rows, actions = len(obs), sizes[-1]
    next_q = np.empty((-(-rows // block) * block, actions), np.float32)
    q, grad, choice = np.empty_like(next_q), np.zeros((rows, actions), np.float32), np.empty(rows, np.int64)
    one, nothing = (sizes,), np.empty((1, 0, 0), np.float32)
    if double:
        forward_mlps((next_obs,), (flat,), one, relu, threads, block, (hidden[0],), (q,))
        _best(q, choice)
    forward_mlps((next_obs, obs), (target, flat), (sizes, sizes), relu, threads, block, hidden, (next_q, q))
    if not double:
        _best(next_q, choice)
    _huber_q(q, action, reward, discount, next_q, choice, grad, metrics)
    backward_mlps((grad,), obs, (hidden[1],), (flat,), one, relu, threads, (gradient,), nothing, scratch)
    clip_and_step_threads(flat, gradient, max_norm, average, squares, rate, betas, eps, step + 1, threads)


@njit(cache=True)
def _best(q: Floats, choice: Indices) -> None:
    for i in range(len(choice)):
        choice[i] = np.argmax(q[i])
