"""Metrics of a training run. No gradient flows through them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foresight.ops.policy import clip_fraction


def mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of the metrics of several gradient steps, by name. A missing metric counts as 0.

    The names are those of the last step. Returns an empty dict for no steps.
    """
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in (rows[-1] if rows else {})}


@torch.no_grad()
def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """The share of the targets' variance that the values explain: 1 - Var[G - V] / Var[G].

    Shapes: value, target `[...]`, equal; returns a scalar: 1 for a perfect prediction, 0 for one that is no
    better than a constant, below 0 for a worse one, not finite where the targets do not vary. As in the code of PPO
    (Huang et al. 2022, "The 37 implementation details of PPO").
    """
    return 1 - (target - value).var(correction=0) / target.var(correction=0)


@torch.no_grad()
def rollout_sums(
    ratio: Tensor,
    logprob: Tensor,
    sampled: Tensor,
    entropy: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float | None = None,
) -> dict[str, Tensor]:
    """Sums over the unmasked tokens of a part of a rollout; divided by their number, they are metrics.

    - `entropy`: of the next token;
    - `clip_fraction`: ratios outside [1 - clip_low, 1 + clip_high];
    - `sampler_error`: |log π of the learner - log π of the sampler|, which should be rounding only.

    Shapes: all of one shape `[...]`; `mask` is bool. `logprob` and `entropy` are 0 where it is false.
    """
    mask = mask.to(logprob.device)
    return {
        "entropy": entropy.sum(),
        "clip_fraction": clip_fraction(ratio, clip_low, clip_high, mask) * mask.sum(),
        "sampler_error": ((logprob - sampled.to(logprob)).abs() * mask).sum(),
    }
