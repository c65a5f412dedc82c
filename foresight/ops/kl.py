"""KL divergences: estimators from samples, and exact values.

In all of them x is drawn from the first distribution π, and the second is the reference:
KL(π ‖ π_ref) = E_{x~π}[log π(x) - log π_ref(x)].

Source of k1, k2, k3: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). An
estimator may be used in two places, which need different ones:

- in the *reward*, detached: `k1`, the only one whose mean is the KL and whose score-function gradient is
  therefore the gradient of the KL;
- in the *loss*, differentiated: `k2`, whose gradient (log π - log π_ref) · ∇log π is, on average over
  x ~ π, the gradient of KL(π ‖ π_ref). The gradient of `k1` is zero on average: it only adds noise. That of
  `k3` is the gradient of the *other* divergence, KL(π_ref ‖ π).

Shapes that differ raise ValueError, except that a scalar fits any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresight.ops import shapes


def k1(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """log π - log π_ref: unbiased as a value, often negative. Any one shape."""
    shapes.same(logprob=logprob, ref_logprob=ref_logprob)
    return logprob - ref_logprob


def k2(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """½ (log π - log π_ref)²: never negative, biased as a value, right as a loss. Any one shape."""
    shapes.same(logprob=logprob, ref_logprob=ref_logprob)
    return 0.5 * (logprob - ref_logprob).square()


def k3(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """e^d - d - 1 with d = log π_ref - log π: never negative, unbiased as a value. Any one shape.

    d is clamped to ±20, so that a token of almost no probability cannot give inf. The KL term of
    GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 4).
    """
    shapes.same(logprob=logprob, ref_logprob=ref_logprob)
    difference = (ref_logprob - logprob).clamp(-20, 20)
    return torch.expm1(difference) - difference


def categorical(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Exact KL between categoricals: Σ_a π(a) (log π(a) - log π_ref(a)).

    Shapes: logits, ref_logits `[..., A]`, normalized or not; returns `[...]`. An action with
    logit -inf under π adds 0; one with logit -inf under π_ref only makes the KL infinite.
    """
    logprob, ref_logprob = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    impossible = logprob == -torch.inf
    difference = logprob.masked_fill(impossible, 0) - ref_logprob.masked_fill(impossible, 0)
    return (logprob.exp() * difference).sum(-1)


def likeliest(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """KL between categoricals of which K outcomes are given and all others are one: a lower bound of the exact KL.

    Shapes: log-probabilities of the same K outcomes under π and π_ref `[..., K]`; returns `[...]`. Outcomes are chosen
    by either distribution, such as the K likeliest ones; with all but one of them it is exact.
    """

    def whole(given: Tensor) -> Tensor:
        rest = 1 - given.exp().sum(-1, keepdim=True)
        return torch.cat([given, rest.clamp(min=1e-6).log()], -1)

    return categorical(whole(logprob), whole(ref_logprob))


def normal(mean: Tensor, std: Tensor, ref_mean: Tensor, ref_std: Tensor) -> Tensor:
    """Exact KL between normals with independent dimensions.

        Σ_i  log(σ_ref / σ) + (σ² + (μ - μ_ref)²) / (2 σ_ref²) - ½

    Shapes: all `[..., D]`; returns `[...]`.
    """
    shapes.same(mean=mean, std=std, ref_mean=ref_mean, ref_std=ref_std)
    variance_ratio = (std / ref_std).square()
    distance = ((mean - ref_mean) / ref_std).square()
    return 0.5 * (variance_ratio + distance - 1 - variance_ratio.log()).sum(-1)


ESTIMATORS = ("k1", "k2", "k3")  # k1 is for rewards: as a loss its gradient is zero on average


def penalty(logprob: Tensor, ref_logprob: Tensor, estimator: str) -> Tensor:
    """`k2` or `k3`, by its name: a penalty in a loss. Shapes: any one shape."""
    return {"k2": k2, "k3": k3}[estimator](logprob, ref_logprob)
