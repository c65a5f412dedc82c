"""One gradient step, and one step of a network that follows another, with as few calls as it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed, nn

from foresight import distributed as sharded


def descend(
    optimizer: torch.optim.Optimizer, backward: Callable[[], object], max_norm: float, summed: bool = False
) -> None:
    """Step `optimizer` down the gradient that `backward` computes, its norm clipped to `max_norm` (PPO detail 11).

    The same as `zero_grad`, `backward`, `nn.utils.clip_grad_norm_` and `step`; for a network with few parameter
    tensors half of the time of the former two goes into sorting the tensors by device and type. Processes that learn
    together take the same step: see `join_`, which `summed` is for.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = None
    backward()
    grads = [p.grad for p in parameters if p.grad is not None]
    join_(grads, summed)
    clip_norm_(grads, max_norm)
    advance(optimizer)


def advance(optimizer: torch.optim.Optimizer) -> None:
    """The same as `optimizer.step()`; for a small network its checks and hooks cost more than the sums.

    Only fused Adam is quicker, and only without hooks, schedulers and whatever else Adam can be told to do.
    """
    group = optimizer.param_groups[0]
    plain = type(optimizer) is torch.optim.Adam and len(optimizer.param_groups) == 1 and group["fused"]
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    wrapped = "step" in vars(optimizer)  # by a scheduler that counts
    if not plain or hooks or wrapped or group["amsgrad"] or group["maximize"] or isinstance(group["lr"], Tensor):
        optimizer.step()
        return
    held = [(p, p.grad, optimizer.state.get(p) or {}) for p in group["params"]]
    if any(grad is None or not state for _, grad, state in held):  # the first step makes its memory
        optimizer.step()
        return
    steps = [state["step"] for _, _, state in held]
    with torch.no_grad():
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(
            [p for p, _, _ in held],
            [grad for _, grad, _ in held],
            [state["exp_avg"] for _, _, state in held],
            [state["exp_avg_sq"] for _, _, state in held],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def step(optimizer: torch.optim.Optimizer, backward: Callable[[], object]) -> None:
    """Step `optimizer` down the gradient that `backward` computes."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = None
    backward()
    join_([p.grad for p in parameters if p.grad is not None])
    advance(optimizer)


@torch.no_grad()
def join_(grads: Sequence[Tensor], summed: bool = False) -> None:
    """Make `grads` in place those of all processes together: their mean, or their sum for a loss that is `summed`.

    With equal weights and equally many rows in each process that is the gradient of the joint batch (Goyal et al. 2017,
    arXiv:1706.02677, §3); what is computed of a batch before, such as normalized advantages, stays each process's own.
    All tensors travel as one. Nothing where there is one process.
    """
    count = sharded.processes()
    if count == 1 or not grads:
        return
    joint = torch.cat([grad.flatten() for grad in grads])
    distributed.all_reduce(joint)
    if not summed:
        joint /= count
    for grad, part in zip(grads, joint.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


@torch.no_grad()
def track(target: nn.Module, source: nn.Module, rate: float = 1.0) -> None:
    """Move the weights of `target` toward those of `source`: target ← target + rate · (source - target).

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
