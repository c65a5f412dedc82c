"""Optimizer steps, gradient clipping and target-network updates, with as few calls as possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from foresight import distributed
from foresight.errors import NotFinite, UserError
from foresight.nets import precision


def total(terms: Mapping[str, Tensor], coefs: Mapping[str, float]) -> Tensor:
    """Σ coef · mean(term) of named loss terms of any shape; the coefficient is 1 where none is given.

    Raises NotFinite with the names of the terms whose mean is not finite: no weight has changed yet. While a CUDA graph
    is recorded there is no value to check: `require_finite` does so after the update.
    """
    means = torch.stack([term.mean() for term in terms.values()])
    if precision.recording(means.device):
        return torch.stack([coefs.get(name, 1.0) * mean for name, mean in zip(terms, means, strict=True)]).sum()
    if not means.isfinite().all():
        require_finite(dict(zip(terms, means.tolist(), strict=True)))
    return means @ means.new_tensor([coefs.get(name, 1.0) for name in terms])


def require_finite(means: Mapping[str, float]) -> None:
    """Raises NotFinite with the names of the means of loss terms that are not finite."""
    bad = [name for name, mean in means.items() if not math.isfinite(mean)]
    if bad:
        raise NotFinite(f"The loss term{'s' * (len(bad) > 1)} {', '.join(bad)} became NaN or infinite.")


def adam(parameters: Iterable[nn.Parameter], learning_rate: float, eps: float = 1e-8) -> torch.optim.Adam:
    """Fused Adam; on a GPU one whose step a CUDA graph can hold."""
    held = list(parameters)
    capturable = bool(held) and held[0].is_cuda
    return torch.optim.Adam(held, lr=learning_rate, eps=eps, fused=True, capturable=capturable)


def steps_of(rows: int, wanted: int = 1) -> int:
    """The gradient steps to make of `rows` steps of experience: `wanted`, or one of each row where they are fewer.

    Raises UserError for fewer under torchrun, where all processes make equally many.
    """
    if rows < wanted and distributed.processes() > 1:
        raise UserError(
            f"A rollout of this process has {rows} real steps, too few for {wanted} gradient steps, and all processes "
            "of torchrun make equally many. Raise rollout_steps."
        )
    return min(rows, wanted)


def descend(
    optimizer: torch.optim.Optimizer, backward: Callable[[], object], max_norm: float, summed: bool = False
) -> None:
    """Step `optimizer` down the gradient that `backward` computes, its norm clipped to `max_norm` (PPO detail 11).

    Equals `zero_grad`, `backward`, `nn.utils.clip_grad_norm_` and `step`; for a network with few parameter tensors,
    `zero_grad` and `clip_grad_norm_` spend half of their time grouping the tensors by device and dtype. All processes
    take the same step: see `join_`, also for `summed`.
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
    """The same as `optimizer.step()`, without the checks and hooks, which cost more than the math of a small network.

    Only fused Adam is faster, and only without hooks, schedulers, amsgrad or maximize.
    """
    group = optimizer.param_groups[0]
    held = [(p, p.grad, optimizer.state.get(p) or {}) for p in group["params"]]
    # the first step allocates the state
    if not _plain(optimizer) or any(grad is None or not state for _, grad, state in held):
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


def _plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is fused Adam without hooks and schedulers."""
    group = optimizer.param_groups[0]
    return type(optimizer) is torch.optim.Adam and group["fused"] and not group["amsgrad"] and _alone(optimizer)


def _alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing takes part in a step but one group of parameters and its numbers: no hook and no scheduler."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    wrapped = "step" in vars(optimizer)  # by a scheduler, to count steps
    group = optimizer.param_groups[0]
    changed = group["maximize"] or isinstance(group["lr"], Tensor)
    return len(optimizer.param_groups) == 1 and not (hooks or wrapped or changed)


def only_moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor] | None:
    """The state of plain Adam of one parameter, for a compiled loop that makes its steps in this process alone.

    None where `advance` or `join_` do more than such a loop, and before the first step.
    """
    return _only_state(optimizer, parameter) if _plain(optimizer) else None


def only_squares(optimizer: torch.optim.RMSprop, parameter: Tensor) -> dict[str, Tensor] | None:
    """The same for RMSProp without momentum."""
    group = optimizer.param_groups[0]
    plain = _alone(optimizer) and not group["momentum"] and not group["centered"]
    return _only_state(optimizer, parameter) if plain else None


def _only_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor] | None:
    group = optimizer.param_groups[0]
    if group["weight_decay"] or distributed.processes() > 1:
        return None
    alone = len(group["params"]) == 1 and group["params"][0] is parameter
    return (optimizer.state.get(parameter) or None) if alone else None


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
    """All-reduce `grads` in place: their mean over processes, or their sum for a loss that is `summed`.

    With equal weights and equally many rows in each process this is the gradient of the joint batch (Goyal et al. 2017,
    arXiv:1706.02677, §3); statistics of a batch, such as normalized advantages, stay local to each process. One
    all-reduce of the flattened tensors. Does nothing in a single process.
    """
    count = distributed.processes()
    if count == 1 or not grads:
        return
    joint = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(joint)
    if not summed:
        joint /= count
    for grad, part in zip(grads, joint.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


@torch.no_grad()
def track(target: nn.Module, source: nn.Module, rate: float = 1.0) -> None:
    """Move the weights of `target` toward those of `source`: target ← target + rate · (source - target).

    `rate` 1 is a hard copy (Mnih et al. 2015), a small one Polyak averaging (Lillicrap et al. 2016, arXiv:1509.02971).
    Both have the same architecture.
    """
    for weight, online in zip(target.parameters(), source.parameters(), strict=True):
        weight.copy_(online) if rate == 1.0 else weight.lerp_(online, rate)
    for buffer, other in zip(target.buffers(), source.buffers(), strict=True):
        buffer.copy_(other)


@torch.no_grad()
def clip_norm_(grads: Sequence[Tensor], max_norm: float) -> None:
    """Scale `grads` in place so that their global norm is at most `max_norm`."""
    norms = torch._foreach_norm(list(grads))
    norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    if norm.is_cpu:
        if norm > max_norm:
            torch._foreach_mul_(list(grads), max_norm / (norm.item() + 1e-6))
    else:  # no branch, which would synchronize with the device
        scale = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
        for grad in grads:
            grad.mul_(scale)
