"""Value losses, one value per step: `[B, T]` to `[B, T]`. The target is data: no gradient flows into it.

Shapes that differ raise ValueError: a loss never broadcasts, except with a scalar.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foresight.ops import shapes


def squared_loss(value: Tensor, target: Tensor) -> Tensor:
    """Half the squared error: ½ (V - G)².

    Shapes: value, target `[B, T]`; returns `[B, T]`. The half makes the gradient V - G.
    """
    shapes.same(value=value, target=target)
    return 0.5 * (value - target.detach()).square()


def clipped_loss(value: Tensor, old_value: Tensor, target: Tensor, clip: float) -> Tensor:
    """PPO's clipped value loss: ½ max((V - G)², (V_old + clip(V - V_old, ±clip) - G)²).

    Shapes: value, old_value, target `[B, T]`; returns `[B, T]`. Not in the paper but in its code; see
    Huang et al. 2022, "The 37 implementation details of PPO", detail 9.

    Becomes `squared_loss` when V stays within `clip` of V_old.
    """
    shapes.same(value=value, old_value=old_value)
    old_value = old_value.detach()
    near = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(squared_loss(value, target), squared_loss(near, target))


def popart(weight: Tensor, bias: Tensor, moments: Tensor, target: Tensor, rate: float) -> tuple[Tensor, Tensor, Tensor]:
    """New moments of the targets, and the last layer that preserves the values V = μ + σ (w h + b) under them.

        w ← w σ / σ',   b ← (σ b + μ - μ') / σ',   μ' = (1 - β) μ + β E[G],   σ'² likewise, of the mixture

    Shapes: weight `[1, D]`, bias `[1]`, moments (μ, σ) `[2]`, target any shape; returns weight, bias and moments. β
    is `rate`, but 1 at the first targets (σ = 0). Then no value was learned that could be preserved: the layer stays as
    it is, and values begin near the mean of the targets. The variance of the mixture is that within its parts and
    between them, which is exact also where the mean is far greater than the deviation. σ' is at least 10⁻⁴. Sources:
    van Hasselt et al. 2016 (arXiv:1602.07714), prop. 1 and eq. 3; Hessel et al. 2018 (arXiv:1809.04474).

    Becomes the identity when the moments of the targets are those already known.
    """
    mean, std = moments
    if std == 0:
        return weight, bias, torch.stack([target.mean(), target.std(correction=0).clamp(min=1e-4)])
    between = rate * (1 - rate) * (target.mean() - mean).square()
    variance = (1 - rate) * std.square() + rate * target.var(correction=0) + between
    new_mean, new_std = mean + rate * (target.mean() - mean), variance.sqrt().clamp(min=1e-4)
    return weight * std / new_std, (std * bias + mean - new_mean) / new_std, torch.stack([new_mean, new_std])


def huber_loss(value: Tensor, target: Tensor, delta: float = 1.0) -> Tensor:
    """Quadratic up to an error of `delta`, linear beyond: ½ e² if |e| ≤ δ, else δ (|e| - ½ δ).

    Shapes: value, target `[B, T]`; returns `[B, T]`. Source: Huber 1964; with δ = 1 the error clipping of
    DQN (Mnih et al. 2015, methods).

    Becomes `squared_loss` when every error is within δ.
    """
    shapes.same(value=value, target=target)
    return functional.huber_loss(value, target.detach(), reduction="none", delta=delta)


def double_q_target(reward: Tensor, discount: Tensor, next_value: Tensor, choice: Tensor) -> Tensor:
    """The target of Q(s, a): reward + discount · Q'(s', choice), with the next action `choice`.

    Shapes: reward, discount, choice (int64) `[...]`, next_value `[..., A]` of the target network; returns `[...]`.
    Sources: Mnih et al. 2015 (Nature 518), where `choice` is the argmax of `next_value`; van Hasselt et al. 2016
    (arXiv:1509.06461), eq. 4, where it is the argmax of the online network.
    """
    shapes.same(reward=reward, discount=discount, choice=choice)
    return reward + discount * next_value.gather(-1, choice.unsqueeze(-1)).squeeze(-1)


def soft_reward(reward: Tensor, weight: Tensor, entropy: Tensor, alpha: Tensor | float) -> Tensor:
    """An n-step reward with the entropy bonuses of the states in between: R + α Σ_k w_k H(π(·|s_k)).

    Shapes: reward `[N]`; weight and entropy `[N, n - 1]`, of the steps after the first, whose own entropy is not part
    of Q(s, a); returns `[N]`. The weights are those of `returns.n_step_weights`. The entropy is that of the policy
    whose values are estimated, not of the policy that acted, as in the one-step target. The formula follows from
    applying the soft Bellman equation (Haarnoja et al. 2018, arXiv:1812.05905, eq. 2 and 3) n times. Becomes `reward`
    when n = 1.
    """
    return reward + alpha * (weight * entropy).sum(-1)


def dueling(value: Tensor, advantage: Tensor) -> Tensor:
    """Q(s, a) = V(s) + A(s, a) - mean over actions of A(s, ·).

    Shapes: value `[..., K]`, advantage `[..., A, K]`, where each value has K components (1 for a scalar, otherwise
    atoms or quantiles); returns `[..., A, K]`. Source: Wang et al. 2016 (arXiv:1511.06581), eq. 9.

    Becomes `value`, for every action, when all advantages are equal.
    """
    return value.unsqueeze(-2) + advantage - advantage.mean(-2, keepdim=True)
