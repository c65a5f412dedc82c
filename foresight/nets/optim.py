"""One gradient step, with as few calls as it takes."""

from __future__ import annotations

import torch
from torch import Tensor


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, max_norm: float) -> None:
    """Step `optimizer` down the gradient of `loss`, its global norm clipped to `max_norm` (PPO detail 11).

    The same as `zero_grad`, `backward`, `nn.utils.clip_grad_norm_` and `step`; for a network with few parameter
    tensors half of those calls' time is spent on sorting the tensors by device and type.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = None
    loss.backward()
    clip_norm_([p.grad for p in parameters if p.grad is not None], max_norm)
    optimizer.step()


@torch.no_grad()
def clip_norm_(grads: list[Tensor], max_norm: float) -> Tensor:
    """Scale `grads` in place so that the norm of all of them together is at most `max_norm`; returns what it was."""
    norm = torch.linalg.vector_norm(grads[0]) if len(grads) == 1 else torch.stack(torch._foreach_norm(grads)).norm()
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp_(max=1.0))
    return norm
