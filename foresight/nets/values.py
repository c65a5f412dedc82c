"""Action values as outputs: Q(s, ·) as a scalar, atoms or quantiles per action, and the loss of each.

All have the same interface, so that Q-learning is written once:

- `mean()` `[..., A]`: the values by which actions are compared;
- `pick(action)`: the value of one action, `[...]`;
- `backup(reward, discount)`: of picked values, the Bellman target reward + discount · Z, as data;
- `loss(target)` `[...]`: the loss of picked values for such a target;
- `error(target)` `[...]`: how far they are from it, as data: the priority in a replay (0 where they are equal);
- `sample(generator)`, `[..., A]`: a sampled return.

The heads map network outputs `[..., A, size]` to these outputs.
"""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import Tensor, nn

from foresight.errors import UserError
from foresight.ops import distributional, value


class Values(Protocol):
    """The interface of all action values."""

    def mean(self) -> Tensor:
        """The values by which actions are compared."""

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A sampled return."""

    def pick(self, action: Tensor) -> Self:
        """The value of one action."""

    def backup(self, reward: Tensor, discount: Tensor) -> Tensor:
        """The Bellman target, as data."""

    def loss(self, target: Tensor) -> Tensor:
        """The loss of picked values for a target."""

    def error(self, target: Tensor) -> Tensor:
        """The distance of picked values from a target, as data."""


class Points:
    """A scalar per action: Huber's loss (δ = 1), which is the error clipping of DQN (Mnih et al. 2015)."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def mean(self) -> Tensor:
        """The values."""
        return self.value

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """The values: they have no spread."""
        return self.value

    def pick(self, action: Tensor) -> Points:
        """The value of one action, `[...]`."""
        return Points(self.value.gather(-1, action.unsqueeze(-1)).squeeze(-1))

    def backup(self, reward: Tensor, discount: Tensor) -> Tensor:
        """reward + discount · value, `[...]`."""
        return (reward + discount * self.value).detach()

    def loss(self, target: Tensor) -> Tensor:
        """Huber's loss of the error."""
        return value.huber_loss(self.value, target)

    def error(self, target: Tensor) -> Tensor:
        """|target - value| (Schaul et al. 2016, arXiv:1511.05952, §3.3)."""
        return (target - self.value.detach()).abs()


class Atoms:
    """A categorical over `atoms` `[K]`; `logits` `[..., K]` (C51, Bellemare et al. 2017, arXiv:1707.06887)."""

    __slots__ = ("atoms", "logits")

    def __init__(self, logits: Tensor, atoms: Tensor) -> None:
        self.logits, self.atoms = logits, atoms

    def mean(self) -> Tensor:
        """Σ p·atom."""
        return (self.logits.softmax(-1) * self.atoms).sum(-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A sampled atom."""
        noise = torch.empty_like(self.logits, requires_grad=False).exponential_(generator=generator).log_()
        return self.atoms[(self.logits - noise).argmax(-1)]

    def pick(self, action: Tensor) -> Atoms:
        """The categorical of one action, `[..., K]`."""
        return Atoms(_pick(self.logits, action), self.atoms)

    def backup(self, reward: Tensor, discount: Tensor) -> Tensor:
        """Probabilities `[..., K]`: the Bellman update, projected on the atoms (eq. 7)."""
        return distributional.project(self.logits.softmax(-1).detach(), self.atoms, reward, discount)

    def loss(self, target: Tensor) -> Tensor:
        """Cross-entropy with the probabilities `target` `[..., K]` (algorithm 1)."""
        return -(target * self.logits.log_softmax(-1)).sum(-1)

    def error(self, target: Tensor) -> Tensor:
        """KL(target ‖ values): the loss without the entropy of the target (Rainbow, arXiv:1710.02298, §5)."""
        return Atoms(self.logits.detach(), self.atoms).loss(target) + torch.special.xlogy(target, target).sum(-1)


class Quantiles:
    """K quantiles per action, at the levels (i + ½) / K (QR-DQN, Dabney et al. 2018, arXiv:1710.10044); `[..., K]`."""

    __slots__ = ("quantiles",)

    def __init__(self, quantiles: Tensor) -> None:
        self.quantiles = quantiles

    def mean(self) -> Tensor:
        """The mean of the quantiles."""
        return self.quantiles.mean(-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A sampled quantile."""
        shape, device = self.quantiles.shape, self.quantiles.device
        index = torch.randint(shape[-1], shape[:-1], generator=generator, device=device)
        return self.quantiles.gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def pick(self, action: Tensor) -> Quantiles:
        """The quantiles of one action, `[..., K]`."""
        return Quantiles(_pick(self.quantiles, action))

    def backup(self, reward: Tensor, discount: Tensor) -> Tensor:
        """reward + discount · quantile, `[..., K]`."""
        return (reward.unsqueeze(-1) + discount.unsqueeze(-1) * self.quantiles).detach()

    def loss(self, target: Tensor) -> Tensor:
        """Quantile Huber loss (eq. 10)."""
        return distributional.quantile_huber_loss(self.quantiles, target)

    def error(self, target: Tensor) -> Tensor:
        """|mean of the target - mean|: the loss of quantiles is above 0 also where they are right."""
        return (target.mean(-1) - self.mean().detach()).abs()


class PointHead(nn.Module):
    """A scalar for each value."""

    size = 1

    def forward(self, y: Tensor) -> Points:
        """`[..., A, 1]` to values `[..., A]`."""
        return Points(y.squeeze(-1))


class AtomHead(nn.Module):
    """`size` atoms for each value, evenly spaced from `low` to `high`, saved with the head."""

    atoms: Tensor

    def __init__(self, size: int, low: float, high: float) -> None:
        super().__init__()
        if size < 2 or not low < high:
            raise UserError(
                f"C51 needs at least 2 atoms from a low to a higher value, not {size} from {low} to {high}."
            )
        self.size = size
        self.register_buffer("atoms", torch.linspace(low, high, size))

    def forward(self, y: Tensor) -> Atoms:
        """Logits `[..., A, size]`."""
        return Atoms(y, self.atoms)


class QuantileHead(nn.Module):
    """`size` quantiles for each value."""

    def __init__(self, size: int) -> None:
        super().__init__()
        if size < 1:
            raise UserError(f"QR-DQN needs at least 1 quantile, not {size}.")
        self.size = size

    def forward(self, y: Tensor) -> Quantiles:
        """Quantiles `[..., A, size]`."""
        return Quantiles(y)


ValuesHead = PointHead | AtomHead | QuantileHead


def _pick(x: Tensor, action: Tensor) -> Tensor:
    """`[..., A, K]` and int64 `[...]` to `[..., K]`."""
    index = action[..., None, None].expand(*action.shape, 1, x.shape[-1])
    return x.gather(-2, index).squeeze(-2)
