"""Board networks: a residual trunk with policy and value heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """relu(x + conv(relu(conv(x)))): AlphaGo Zero's block without batch normalization.

    The second convolution is initialized to zero, so that a trunk of any depth starts as its first layer (Zhang et al.
    2019, Fixup). Without batch statistics the value of a position does not depend on the batch.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.kaiming_normal_(self.first.weight, nonlinearity="relu")
        for zero in (self.first.bias, self.second.weight, self.second.bias):
            assert zero is not None
            nn.init.zeros_(zero)

    def forward(self, x: Tensor) -> Tensor:
        """Features of the same shape."""
        return torch.relu_(x + self.second(torch.relu_(self.first(x))))


class Trunk(nn.Module):
    """Planes `[N, C, H, W]` of any dtype to features `[N, channels, H, W]`."""

    def __init__(self, shape: Sequence[int], channels: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(shape[0], channels, 3, padding=1)
        nn.init.kaiming_normal_(self.first.weight, nonlinearity="relu")
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(blocks)))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # fastest on CPUs

    def forward(self, planes: Tensor) -> Tensor:
        """Features after the last block."""
        x = planes.to(self.first.weight.dtype, memory_format=torch.channels_last)
        return self.blocks(torch.relu_(self.first(x)))


class PolicyHead(nn.Module):
    """Features to logits `[N, A]`: a 1x1 convolution to `width` planes, then one linear layer (AlphaGo Zero)."""

    def __init__(self, shape: Sequence[int], channels: int, actions: int, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 1)
        self.linear = nn.Linear(width * shape[1] * shape[2], actions)
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Logits of all actions, including illegal ones."""
        return self.linear(torch.relu_(self.conv(features)).flatten(1))


class ValueHead(nn.Module):
    """Features to a value `[N]` in (-1, 1), for the player to move."""

    def __init__(self, shape: Sequence[int], channels: int, width: int = 4, hidden: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 1)
        self.hidden = nn.Linear(width * shape[1] * shape[2], hidden)
        self.linear = nn.Linear(hidden, 1)
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Values in (-1, 1)."""
        h = torch.relu_(self.hidden(torch.relu_(self.conv(features)).flatten(1)))
        return torch.tanh(self.linear(h)).squeeze(-1)


class PolicyNet(nn.Module):
    """A trunk with a policy head."""

    def __init__(self, shape: Sequence[int], actions: int, channels: int, blocks: int) -> None:
        super().__init__()
        self.trunk = Trunk(shape, channels, blocks)
        self.head = PolicyHead(shape, channels, actions)

    def forward(self, planes: Tensor) -> Tensor:
        """Logits `[N, A]`."""
        return self.head(self.trunk(planes))


class ValueNet(nn.Module):
    """A trunk with a value head."""

    def __init__(self, shape: Sequence[int], channels: int, blocks: int) -> None:
        super().__init__()
        self.trunk = Trunk(shape, channels, blocks)
        self.head = ValueHead(shape, channels)

    def forward(self, planes: Tensor) -> Tensor:
        """Values `[N]`."""
        return self.head(self.trunk(planes))


class PolicyValueNet(nn.Module):
    """One trunk with both heads (AlphaGo Zero, AlphaZero)."""

    def __init__(self, shape: Sequence[int], actions: int, channels: int, blocks: int) -> None:
        super().__init__()
        self.trunk = Trunk(shape, channels, blocks)
        self.policy = PolicyHead(shape, channels, actions)
        self.value = ValueHead(shape, channels)

    def forward(self, planes: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[N, A]` and values `[N]`."""
        features = self.trunk(planes)
        return self.policy(features), self.value(features)
