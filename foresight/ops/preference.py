"""Preference losses, one value per pair or per answer: from scores, or from a policy's log-probabilities.

`difference` D `[B]` is the policy's log-ratio of chosen to rejected answer, less that of the reference:

    D = (log π(y_c|x) - log π_ref(y_c|x)) - (log π(y_r|x) - log π_ref(y_r|x))

β·D is the margin of the implicit rewards. All losses are to be minimized. Shapes that differ raise ValueError, except
that a scalar fits any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foresight.ops import shapes

NEARLY_SURE = -1e-6  # upper bound of a mean log-probability: at probability 1 the odds are infinite


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """-log σ(s_c - s_r - m): the chosen answer should score higher by m.

    Shapes: all `[B]`; returns `[B]`. Source: Bradley & Terry 1952; with a margin: Llama 2, Touvron et al. 2023
    (arXiv:2307.09288), eq. 2.
    """
    shapes.same(chosen=chosen, rejected=rejected, margin=margin)
    return -functional.logsigmoid(chosen - rejected - margin)


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(s_c + s_r)²: centers the scores at 0, as `bradley_terry` depends on differences only.

    Shapes: all `[B]`; returns `[B]`. Source: Eisenstein et al. 2023 (arXiv:2312.09244), eq. 2.
    """
    shapes.same(chosen=chosen, rejected=rejected)
    return (chosen + rejected).square()


def sigmoid(difference: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """DPO: -(1 - ε) log σ(β D) - ε log σ(-β D).

    Shapes: difference `[B]`; returns `[B]`. Source: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; with ε > 0, the
    share of labels that are wrong, cDPO (Mitchell 2023, "A note on DPO with noisy preferences", eq. 3).
    """
    return -(1 - smoothing) * functional.logsigmoid(beta * difference) - smoothing * functional.logsigmoid(
        -beta * difference
    )


def robust(difference: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """rDPO: (-(1 - ε) log σ(β D) + ε log σ(-β D)) / (1 - 2ε), whose mean over labels of which ε are wrong is DPO's.

    Shapes: difference `[B]`; returns `[B]`. Source: Chowdhury et al. 2024 (arXiv:2403.00409).

    Becomes `sigmoid` when ε is 0.
    """
    right, wrong = functional.logsigmoid(beta * difference), functional.logsigmoid(-beta * difference)
    return (smoothing * wrong - (1 - smoothing) * right) / (1 - 2 * smoothing)


def ipo(difference: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """IPO: (D - 1 / (2β))², so that D stops growing at 1 / (2β).

    Shapes: difference `[B]`; returns `[B]`. Source: Azar et al. 2023 (arXiv:2310.12036), eq. 17. Their D is of whole
    sequences; TRL's is a mean over tokens (see `dpo.Config.length_normalized`). `smoothing` is ignored.
    """
    return (difference - 1 / (2 * beta)).square()


def hinge(difference: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """max(0, 1 - β D): no gradient once the margin is reached.

    Shapes: difference `[B]`; returns `[B]`. Source: SLiC, Zhao et al. 2023 (arXiv:2305.10425), as DPO's variant in
    Liu et al. 2023 (arXiv:2309.06657), §3.2. `smoothing` is ignored.
    """
    return functional.relu(1 - beta * difference)


def kto(
    log_ratio: Tensor,
    reference_point: Tensor | float,
    desirable: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO: λ_D (1 - σ(β (r - z))) of a desirable answer and λ_U (1 - σ(β (z - r))) of an undesirable one.

    r is log π(y|x) - log π_ref(y|x), and z the reference point that separates gains from losses; it has no gradient.
    The gradient vanishes for an answer far from z on either side.

    Shapes: log_ratio `[B]`, desirable `[B]` bool; returns `[B]`. Source: Ethayarajh et al. 2024 (arXiv:2402.01306),
    eq. 8.
    """
    shapes.same(log_ratio=log_ratio, reference_point=reference_point, desirable=desirable)
    margin = beta * (log_ratio - reference_point)
    weight = torch.where(desirable, desirable_weight, undesirable_weight).to(margin)
    return weight * torch.sigmoid(torch.where(desirable, -margin, margin))  # 1 - σ(x) = σ(-x)


def odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """ORPO's -log σ(log odds(y_c) - log odds(y_r)) with odds(y) = P(y) / (1 - P(y)), P the mean per token.

    Shapes: mean log-probabilities per token, log P, `[B]` each, at most 0; returns `[B]`. Source: Hong et al. 2024
    (arXiv:2403.07691), eq. 3, 4 and 7.
    """
    shapes.same(chosen=chosen, rejected=rejected)
    return -functional.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logprob: Tensor) -> Tensor:
    logprob = logprob.clamp(max=NEARLY_SURE)
    return logprob - torch.log(-torch.expm1(logprob))


LOSSES = ("sigmoid", "robust", "ipo", "hinge")  # DPO's choices
