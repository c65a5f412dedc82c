"""Policy losses, one value per step: `[B, T]` to `[B, T]`. `ops/aggregate.py` reduces them to a scalar.

A step is an environment step or a token. `advantage` is data: no gradient flows into it. All losses are to be
minimized. Shapes that differ raise ValueError: a loss never broadcasts, except with a scalar.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresight.ops import shapes

# e²⁰ is far outside any clip range, and a larger exponent would turn into inf, then inf · 0 = NaN.
LOG_RATIO_LIMIT = 20.0


def reinforce(logprob: Tensor, advantage: Tensor) -> Tensor:
    """The score-function loss: -log π(a|s) · A.

    Shapes: logprob, advantage `[B, T]`; returns `[B, T]`. Source: Williams 1992, theorem 1.
    """
    shapes.same(logprob=logprob, advantage=advantage)
    return -logprob * advantage.detach()


def ratio(logprob: Tensor, old_logprob: Tensor) -> Tensor:
    """The importance ratio of each step: ρ = π(a|s) / π_old(a|s).

    Shapes: logprob, old_logprob `[B, T]`; returns `[B, T]`. Exactly 1 where the two are equal. No gradient flows into
    `old_logprob`. Source: Schulman et al. 2017 (arXiv:1707.06347), §3.
    """
    shapes.same(logprob=logprob, old_logprob=old_logprob)
    return (logprob - old_logprob.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def state_dependent_std(features: Tensor, sigma: Tensor) -> Tensor:
    """The standard deviation of noise that is linear in the features: √(Σ_i z_i² σ_ij²), for θ_ij ~ N(0, σ_ij²).

    Shapes: features `[..., F]`, sigma `[F, D]`; returns `[..., D]`. 1e-6 is added to the variance, as in the authors'
    code. Source: Raffin et al. 2021, gSDE (arXiv:2005.05719), eq. 7.

    Becomes state-independent noise of variance Σ_i z_i² σ_ij² when the features are constant.
    """
    return (features.square() @ sigma.square() + 1e-6).sqrt()


CORRECTIONS = ("none", "truncated", "masked")


def importance_weight(logprob: Tensor, sampled_logprob: Tensor, correction: str, cap: float) -> Tensor:
    """The weight of each step's loss where another program, precision or policy sampled it: w = π_old(a|s) / μ(a|s).

    Shapes: logprob (of π_old, the learner's before the update) and sampled_logprob (of the sampler μ) `[B, T]`; returns
    `[B, T]`, without gradient. "truncated": min(w, cap), the truncated importance sampling of Espeholt et al. 2018
    (arXiv:1802.01561, ρ̄) and of Yao et al. 2025 ("Your efficient RL framework secretly brings you off-policy RL
    training", cap 2). "masked": w, but 0 outside [1 / cap, cap], as IcePop has it (Ling Team 2025, arXiv:2510.18855,
    0.5 to 5). "none": 1.

    Becomes 1 when sampler and learner agree, and the exact w when the cap is infinite.
    """
    weight = ratio(logprob.detach(), sampled_logprob.to(logprob))
    if correction == "truncated":
        return weight.clamp(max=cap)
    if correction == "masked":
        return weight.masked_fill((weight > cap) | (weight < 1 / cap), 0)
    return torch.ones_like(weight)


def sequence_ratio(logprob: Tensor, old_logprob: Tensor, mask: Tensor) -> Tensor:
    """The length-normalized ratio of each whole sequence, repeated at all of its steps.

        s = exp( Σ_t mask_t · (log π - log π_old)_t / Σ_t mask_t )

    Shapes: logprob, old_logprob, mask `[B, T]`; returns `[B, T]`, equal along T (1 in an empty sequence).
    Source: GSPO, Zheng et al. 2025 (arXiv:2507.18071), eq. 7. Together with `aggregate.per_sequence` this
    is their objective, eq. 5.

    Becomes `ratio` when every sequence has one step.
    """
    shapes.same(logprob=logprob, old_logprob=old_logprob, mask=mask)
    difference = (logprob - old_logprob.detach()).masked_fill(mask == 0, 0)
    mean = difference.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().expand_as(logprob)


def clipped_surrogate(
    ratio: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate: -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A).

    Shapes: ratio, advantage `[B, T]`; returns `[B, T]`. `clip_high` None means equal to `clip_low`
    (symmetric). With `dual_clip` c > 1, where A < 0 the loss is at most -c A, so that a huge ratio cannot
    dominate. Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; asymmetric ("clip higher"): DAPO, Yu
    et al. 2025 (arXiv:2503.14476), eq. 8; dual clip: Ye et al. 2020 (arXiv:1912.09729), §3, which for c ≥ 1 + clip_high
    is the two-sided clip of INTELLECT-2 (arXiv:2505.07291).

    Becomes `reinforce` in its gradient when ratio is 1, and the plain importance-weighted loss -ρ A when the
    clip range is infinite.
    """
    shapes.same(ratio=ratio, advantage=advantage)
    advantage = advantage.detach()
    high = clip_low if clip_high is None else clip_high
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(1 - clip_low, 1 + high) * advantage)
    if dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
    return loss


def clipped_weight(
    logprob: Tensor, ratio: Tensor, advantage: Tensor, clip_high: float, clip_low: float | None = None
) -> Tensor:
    """CISPO: clip the weight and stop its gradient, so that no step is dropped: -sg(clip(ρ)) · A · log π.

    Shapes: logprob, ratio, advantage `[B, T]`; returns `[B, T]`. The weight is clipped to at most
    1 + clip_high, and to at least 1 - clip_low unless that is None (the paper clips above only).
    Source: MiniMax-M1, Chen et al. 2025 (arXiv:2506.13585), eq. 4 and 5.

    Becomes `reinforce` when ratio is 1.
    """
    shapes.same(logprob=logprob, ratio=ratio, advantage=advantage)
    weight = ratio.detach().clamp(None if clip_low is None else 1 - clip_low, 1 + clip_high)
    return reinforce(logprob, weight * advantage)


def temperature_loss(log_alpha: Tensor, entropy: Tensor, target_entropy: float | Tensor) -> Tensor:
    """SAC's loss of the temperature α: log α · (H - H̄), which raises α while the entropy is below its target.

    Shapes: scalars; `entropy` H and `target_entropy` H̄ in nats; no gradient flows into them. Source: Haarnoja et al.
    2018 (arXiv:1812.05905), eq. 18, with log α for α as in the authors' code.
    """
    return log_alpha * (entropy - target_entropy).detach()


def clip_fraction(ratio: Tensor, clip_low: float, clip_high: float | None = None, mask: Tensor | None = None) -> Tensor:
    """The share of unmasked steps whose ratio lies outside [1 - clip_low, 1 + clip_high]: a metric.

    Shapes: ratio, mask `[B, T]` (mask None: no step is masked); returns a scalar.
    """
    shapes.same(ratio=ratio, mask=mask)
    high = clip_low if clip_high is None else clip_high
    outside = ((ratio < 1 - clip_low) | (ratio > 1 + high)).to(ratio.dtype)
    if mask is None:
        return outside.mean()
    return outside.masked_fill(mask == 0, 0).sum() / mask.sum().clamp(min=1)
