"""One gradient step, and one step of a network that follows another, with as few calls as it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def descend(optimizer: torch.optim.Optimizer, backward: Callable[[], object], max_norm: float) -> None:
    """Step `optimizer` down the gradient that `backward` computes, its norm clipped to `max_norm` (PPO detail 11).

    The same as `zero_grad`, `backward`, `nn.utils.clip_grad_norm_` and `step`; for a network with few parameter
    tensors half of the time of the former two goes into sorting the tensors by device and type.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = None
    backward()
    clip_norm_([p.grad for p in parameters if p.grad is not None], max_norm)
    optimizer.step()


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Step `optimizer` down the gradient of `loss`."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


@torch.no_grad()
def track(target: nn.Module, source: nn.Module, rate: float = 1.0) -> None:
    """Move the weights of `target` towards those of `source`: target ← target + rate · (source - target).

    Copies them where `rate` is 1 (Mnih et al. 2015), and follows them slowly where it is small (Lillicrap et al. 2016,
    arXiv:1509.02971). The two are alike.
    """
    for weight, goal in zip(target.parameters(), source.parameters(), strict=True):
        weight.copy_(goal) if rate == 1.0 else weight.lerp_(goal, rate)
    for buffer, other in zip(target.buffers(), source.buffers(), strict=True):
        buffer.copy_(other)


@torch.no_grad()
def clip_norm_(grads: Sequence[Tensor], max_norm: float) -> None:
    """Scale `grads` in place so that the norm of all of them together is at most `max_norm`."""
    norms = torch._foreach_norm(list(grads))
    norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    if norm.is_cpu:
        if norm > max_norm:
            torch._foreach_mul_(list(grads), max_norm / (norm.item() + 1e-6))
    else:  # no branch: it would wait for the device
        scale = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
        for grad in grads:
            grad.mul_(scale)
