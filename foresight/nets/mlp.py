"""Multi-layer perceptrons, orthogonal initialization, and activations by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresight import errors
from foresight.data.trajectory import Tree

SQRT2 = math.sqrt(2)
Affine = TypeVar("Affine", nn.Linear, nn.Conv2d)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": functional.elu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "leaky_relu": functional.leaky_relu,
}


class Encoder(Protocol):
    """A module that makes features `[..., size]` of observations."""

    size: int

    def __call__(self, obs: Tree) -> Tensor:
        """The features."""


def orthogonal(layer: Affine, gain: float = SQRT2) -> Affine:
    """`layer` with orthogonal weights of `gain` and zero bias (PPO detail 2; Saxe et al. 2014, arXiv 1312.6120)."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Module):
    """Linear layers of the `hidden` sizes, each followed by an activation: `[..., inputs]` to `[..., size]`.

    `first`, if given, is applied before the layers. Raises UserError for an activation that is not in `ACTIVATIONS`.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        activation: str = "tanh",
        gain: float = SQRT2,
        first: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise errors.unknown("activation", activation, ACTIVATIONS)
        sizes = [inputs, *hidden]
        self.first, self.activation, self.size = first, activation, sizes[-1]
        self.layers = nn.ModuleList(orthogonal(nn.Linear(a, b), gain) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """Features of the vectors `x`."""
        if self.first is not None:
            x = self.first(x)
        for layer in self.layers:
            x = ACTIVATIONS[self.activation](layer(x))
        return x
