"""Heads: from the output of a network's last layer, `[..., width]`, to an `Output`.

They have no linear layer, so the same head works on a fused MLP, a convolutional trunk or a transformer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foresight.nets.outputs import Categorical, MultiCategorical, Normal, Scalar, TanhNormal, TwoHot
from foresight.ops import policy, value


class CategoricalHead(nn.Module):
    """One of `actions` choices."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.width = actions

    def forward(self, y: Tensor, mask: Tensor | None = None) -> Categorical:
        """`mask` `[..., actions]` (bool) is true where a choice is allowed."""
        return Categorical(y, mask)


class MultiCategoricalHead(nn.Module):
    """Independent choices, one of `sizes[i]` each."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = tuple(int(n) for n in sizes)
        self.width = sum(self.sizes)

    def forward(self, y: Tensor, mask: Tensor | None = None) -> MultiCategorical:
        """`mask` `[..., Σ sizes]` (bool) is true where a choice is allowed."""
        return MultiCategorical(y, self.sizes, mask)


class NormalHead(nn.Module):
    """Normal actions whose standard deviation does not depend on the state (PPO details 23 to 25)."""

    def __init__(self, dims: int, log_std: float = 0.0) -> None:
        super().__init__()
        self.width = dims
        self.log_std = nn.Parameter(torch.full((dims,), log_std))

    def forward(self, y: Tensor, mask: Tensor | None = None) -> Normal:
        """`mask` is ignored: continuous actions cannot be masked."""
        return Normal(y, self.log_std.exp())


class StateDependentHead(nn.Module):
    """Normal actions whose noise is linear in the policy's features (gSDE, arXiv:2005.05719): a = μ(s) + θᵀ z(s).

    The weights θ `[features, dims]` of the noise are normal with learned standard deviations, and are held for some
    steps: while they are held, equal states get equal noise. With `squashed` actions are tanh(a), as in SAC, and the
    features have a gradient from here; without it they have none (as in the authors' code). Call `over` before use.
    """

    def __init__(self, dims: int, log_std: float = 0.0, squashed: bool = False) -> None:
        super().__init__()
        self.width, self.initial, self.squashed = dims, log_std, squashed

    def over(self, features: int) -> None:
        """Set the number of features."""
        self.log_std = nn.Parameter(torch.full((features, self.width), self.initial))

    def forward(self, y: Tensor, mask: Tensor | None = None) -> Normal | TanhNormal:
        """`y` is `[..., dims + features]`. `mask` is ignored: continuous actions cannot be masked."""
        y = y.float()
        mean, features = y[..., : self.width], y[..., self.width :]
        if not self.squashed:
            features = features.detach()
        kind = TanhNormal if self.squashed else Normal
        with torch.autocast(y.device.type, enabled=False):  # log-probabilities are of float32
            return kind(mean, policy.state_dependent_std(features, self.log_std.exp()), features)

    @torch.no_grad()
    def noise(self, rows: int, every: int, generator: torch.Generator) -> Iterator[Tensor]:
        """The weights `[rows, features, dims]` of the noise at one step after the other, redrawn `every` steps."""
        sigma = self.log_std.exp()
        while True:
            drawn = sigma * torch.empty(rows, *sigma.shape, device=sigma.device).normal_(generator=generator)
            for _ in range(every):
                yield drawn


def sampler(head: nn.Module, rows: int, every: int | None, generator: torch.Generator) -> Callable[[Any], Tensor]:
    """Samples an action of every row of an output of `head`, `[rows, ...]`.

    With `every`, `head` is a `StateDependentHead`: its noise has weights that each row holds for so many calls.
    """
    if every is None:
        return lambda output: output.sample(generator)
    assert isinstance(head, StateDependentHead)
    noise = head.noise(rows, every, generator)
    return lambda output: output.perturbed(next(noise))


class TanhNormalHead(nn.Module):
    """Actions in (-1, 1), state-dependent standard deviation, its logarithm clamped (SAC, arXiv 1812.05905)."""

    def __init__(self, dims: int, bounds: tuple[float, float] = (-5.0, 2.0)) -> None:
        super().__init__()
        self.width, self.bounds = 2 * dims, bounds

    def forward(self, y: Tensor, mask: Tensor | None = None) -> TanhNormal:
        """`y` is means, then log-stds. `mask` is ignored."""
        mean, log_std = y.chunk(2, -1)
        return TanhNormal(mean, log_std.clamp(*self.bounds).exp())


class PopArtHead(nn.Module):
    """A scalar value that is normalized by moving moments of its targets (PopArt, arXiv:1602.07714).

    The network's output is (V - μ) / σ. Before the first targets σ is 0, and so is the value.
    """

    width = 1
    moments: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moments", torch.zeros(2))  # μ, σ

    def forward(self, y: Tensor) -> Scalar:
        """`[...]`, in units of the return."""
        return Scalar(self.moments[0] + self.moments[1] * y.squeeze(-1))

    @torch.no_grad()
    def update(self, weight: Tensor, bias: Tensor, target: Tensor, rate: float) -> None:
        """Move the moments toward those of `target`, and `weight` and `bias` of the last layer so that values stay."""
        found = value.popart(weight, bias, self.moments, target, rate)
        for old, new in zip((weight, bias, self.moments), found, strict=True):
            old.copy_(new)


def value_scale(head: nn.Module) -> float:
    """σ of a `PopArtHead`, in which its errors are measured (infinity before the first targets); 1 of others."""
    return (float(head.moments[1]) or math.inf) if isinstance(head, PopArtHead) else 1.0


class ScalarHead(nn.Module):
    """A scalar value."""

    width = 1

    def forward(self, y: Tensor) -> Scalar:
        """`[...]`, without a trailing singleton."""
        return Scalar(y.squeeze(-1))


class TwoHotHead(nn.Module):
    """A scalar as a categorical over `bins` `[K]`, a buffer of the head."""

    bins: Tensor

    def __init__(self, bins: Tensor) -> None:
        super().__init__()
        self.width = len(bins)
        self.register_buffer("bins", bins)

    def forward(self, y: Tensor) -> TwoHot:
        """Logits of the bins."""
        return TwoHot(y, self.bins)


PolicyHead = CategoricalHead | MultiCategoricalHead | NormalHead | StateDependentHead | TanhNormalHead
ValueHead = ScalarHead | TwoHotHead
