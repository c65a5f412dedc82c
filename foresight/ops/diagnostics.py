"""Numbers to watch: they say how learning goes and no gradient flows through them."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """How much of the targets' variance the values explain: 1 - Var[G - V] / Var[G].

    Shapes: value, target `[...]`, equal; returns a scalar: 1 for a perfect prediction, 0 for one that is no
    better than a constant, below 0 for a worse one, not finite where the targets do not vary. As in the code of PPO
    (Huang et al. 2022, "The 37 implementation details of PPO").
    """
    return 1 - (target - value).var(correction=0) / target.var(correction=0)
