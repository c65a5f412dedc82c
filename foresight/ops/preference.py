"""Losses on pairs, one number a pair: which of two answers is better, by a score or by a policy's own odds.

`difference` D `[B]` is how much more than the reference a policy prefers the chosen answer to the rejected one:

    D = (log π(y_c|x) - log π_ref(y_c|x)) - (log π(y_r|x) - log π_ref(y_r|x))

β·D is the margin of the implicit rewards. All losses are to be minimised.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """-log σ(s_c - s_r - m): the chosen answer's score ought to be higher by m.

    Shapes: all `[B]`; returns `[B]`. Source: Bradley & Terry 1952; with a margin: Llama 2, Touvron et al. 2023
    (arXiv:2307.09288), eq. 2.
    """
    return -functional.logsigmoid(chosen - rejected - margin)


def centring(chosen: Tensor, rejected: Tensor) -> Tensor:
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
    sequences; TRL's is a mean over tokens (see `dpo.Config.length_normalised`). `smoothing` has no meaning here.
    """
    return (difference - 1 / (2 * beta)).square()


def hinge(difference: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """max(0, 1 - β D): no gradient once the margin is reached.

    Shapes: difference `[B]`; returns `[B]`. Source: SLiC, Zhao et al. 2023 (arXiv:2305.10425), as DPO's variant in
    Liu et al. 2023 (arXiv:2309.06657), §3.2. `smoothing` has no meaning here.
    """
    return functional.relu(1 - beta * difference)


LOSSES = ("sigmoid", "ipo", "hinge")  # those that DPO may use, by name
