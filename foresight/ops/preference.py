"""Losses on preferences, one number a pair or an answer: what is better, by a score or by a policy's own odds.

`difference` D `[B]` is how much more than the reference a policy prefers the chosen answer to the rejected one:

    D = (log π(y_c|x) - log π_ref(y_c|x)) - (log π(y_r|x) - log π_ref(y_r|x))

β·D is the margin of the implicit rewards. All losses are to be minimized.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

NEARLY_SURE = -1e-6  # a mean log-probability nearer to 0 counts as this: the odds of what is certain are infinite


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """-log σ(s_c - s_r - m): the chosen answer's score ought to be higher by m.

    Shapes: all `[B]`; returns `[B]`. Source: Bradley & Terry 1952; with a margin: Llama 2, Touvron et al. 2023
    (arXiv:2307.09288), eq. 2.
    """
    return -functional.logsigmoid(chosen - rejected - margin)


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(s_c + s_r)²: the loss above knows only differences, so this says where zero is.

    Shapes: all `[B]`; returns `[B]`. Source: Eisenstein et al. 2023 (arXiv:2312.09244), eq. 2.
    """
    return (chosen + rejected).square()


def sigmoid(difference: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """DPO: -(1 - ε) log σ(β D) - ε log σ(-β D).

    Shapes: difference `[B]`; returns `[B]`. Source: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; with ε > 0, the
    share of labels that are wrong, cDPO (Mitchell 2023, "A note on DPO with noisy preferences", eq. 3).
    """
    return -(1 - smoothing) * functional.logsigmoid(beta * difference) - smoothing * functional.logsigmoid(
        -beta * difference
    )


def ipo(difference: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """IPO: (D - 1 / (2β))², so that the odds stop growing once they are as large as the penalty allows.

    Shapes: difference `[B]`; returns `[B]`. Source: Azar et al. 2023 (arXiv:2310.12036), eq. 17. Their D is of whole
    sequences; TRL's is a mean over tokens (see `dpo.Config.length_normalized`). `smoothing` has no meaning here.
    """
    return (difference - 1 / (2 * beta)).square()


def hinge(difference: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """max(0, 1 - β D): no gradient once the margin is reached.

    Shapes: difference `[B]`; returns `[B]`. Source: SLiC, Zhao et al. 2023 (arXiv:2305.10425), as DPO's variant in
    Liu et al. 2023 (arXiv:2309.06657), §3.2. `smoothing` has no meaning here.
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

    r is log π(y|x) - log π_ref(y|x), and z the point from which people count gains and losses, that has no gradient.
    An answer far from z on either side has next to no gradient: what is hopeless and what is learned are let be.

    Shapes: log_ratio `[B]`, desirable `[B]` bool; returns `[B]`. Source: Ethayarajh et al. 2024 (arXiv:2402.01306),
    eq. 8.
    """
    gain = beta * (log_ratio - reference_point)
    weight = torch.where(desirable, desirable_weight, undesirable_weight).to(gain)
    return weight * torch.sigmoid(torch.where(desirable, -gain, gain))  # 1 - σ(x) = σ(-x)


def odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """ORPO's -log σ(log odds(y_c) - log odds(y_r)) with odds(y) = P(y) / (1 - P(y)), P the mean a token.

    Shapes: mean log-probabilities of a token, log P, `[B]` each, at most 0; returns `[B]`. Source: Hong et al. 2024
    (arXiv:2403.07691), eq. 3, 4 and 7.
    """
    return -functional.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logprob: Tensor) -> Tensor:
    logprob = logprob.clamp(max=NEARLY_SURE)
    return logprob - torch.log(-torch.expm1(logprob))


LOSSES = ("sigmoid", "ipo", "hinge")  # those that DPO may use, by name
