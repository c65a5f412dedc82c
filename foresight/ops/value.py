"""Value losses, one number a row: `[B, T]` in, `[B, T]` out. The target is data: no gradient flows into it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def squared_loss(value: Tensor, target: Tensor) -> Tensor:
    """Half the squared error: ½ (V - G)².

    Shapes: value, target `[B, T]`; returns `[B, T]`. The half makes the gradient V - G.
    """
    return 0.5 * (value - target.detach()).square()


def clipped_loss(value: Tensor, old_value: Tensor, target: Tensor, clip: float) -> Tensor:
    """PPO's clipped value loss: ½ max((V - G)², (V_old + clip(V - V_old, ±clip) - G)²).

    Shapes: value, old_value, target `[B, T]`; returns `[B, T]`. Not in the paper but in its code; see
    Huang et al. 2022, "The 37 implementation details of PPO", detail 9.

    Becomes `squared_loss` when V stays within `clip` of V_old.
    """
    old_value = old_value.detach()
    near = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(squared_loss(value, target), squared_loss(near, target))


def huber_loss(value: Tensor, target: Tensor, delta: float = 1.0) -> Tensor:
    """Quadratic up to an error of `delta`, linear beyond: ½ e² if |e| ≤ δ, else δ (|e| - ½ δ).

    Shapes: value, target `[B, T]`; returns `[B, T]`. Source: Huber 1964; with δ = 1 the error clipping of
    DQN (Mnih et al. 2015, methods).

    Becomes `squared_loss` when every error is within δ.
    """
    return functional.huber_loss(value, target.detach(), reduction="none", delta=delta)
