"""Policies over the features of a world model, and actions as the features that the model reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn
from torch.nn import functional

from foresight.errors import UserError
from foresight.nets import encoders
from foresight.nets.models.world_model import mlp
from foresight.nets.outputs import Categorical, Normal


def action_width(space: gs.Space[Any]) -> int:
    """The number of action features. Raises UserError for a space that is neither Discrete nor a bounded Box."""
    if isinstance(space, gs.Discrete):
        return int(space.n)
    if isinstance(space, gs.Box) and len(space.shape) == 1 and np.isfinite([space.low, space.high]).all():
        encoders.require_choice(space)
        return int(space.shape[0])
    raise UserError(
        f"World models support Discrete actions and bounded Box actions with one dim, not {space}. "
        "Wrap the environment so that it takes one of these."
    )


def features_of(space: gs.Space[Any], action: Tensor) -> Tensor:
    """What world models read of an env's actions `[N, ...]`, `[N, width]`: see `LatentActor.action_features`."""
    if isinstance(space, gs.Discrete):
        return functional.one_hot(action.long(), int(space.n)).float()
    low, high = (torch.as_tensor(bound, dtype=torch.float32, device=action.device) for bound in (space.low, space.high))  # type: ignore[attr-defined]
    return ((2 * action - low - high) / (high - low)).clamp(-1, 1)


class LatentActor(nn.Module):
    """DreamerV3's actor: `layers` of `units` over features `[..., inputs]`.

    Discrete actions are categoricals with a share `unimix` of uniform probability. Continuous ones are normals in the
    bounds: mean tanh(x), standard deviation between 0.1 and 1 of half the range, not squashed (clipped at the bounds by
    the environment). Source: "Actor learning" of arXiv:2301.04104, bounds as in its code.
    """

    center: Tensor
    scale: Tensor
    eye: Tensor

    def __init__(self, space: gs.Space[Any], inputs: int, units: int, layers: int, unimix: float = 0.01) -> None:
        super().__init__()
        self.width, self.discrete, self.unimix = action_width(space), isinstance(space, gs.Discrete), unimix
        self.net = mlp(inputs, units, layers, self.width if self.discrete else 2 * self.width, scale=0.01)
        low, high = torch.tensor(-1.0), torch.tensor(1.0)
        if isinstance(space, gs.Box):
            low, high = torch.from_numpy(space.low).float(), torch.from_numpy(space.high).float()
        self.register_buffer("center", (high + low) / 2, persistent=False)
        self.register_buffer("scale", (high - low) / 2, persistent=False)
        self.register_buffer("eye", torch.eye(self.width), persistent=False)

    def forward(self, features: Tensor, count: int | None = None) -> Categorical | Normal:
        """The policy; continuous actions are in units of half the range, about its center.

        Of `features` `[N, T, F]`, only at the first `count` steps: reading all and dropping the rest copies less.
        """
        y = self.net(features)
        y = y if count is None else y[:, :count]
        if not self.discrete:
            mean, std = y.chunk(2, -1)
            return Normal(mean.tanh(), 0.1 + 0.9 * torch.sigmoid(std + 2))
        if not self.unimix:
            return Categorical(y)
        return Categorical(((1 - self.unimix) * y.softmax(-1) + self.unimix / self.width).log())

    def random(self, count: int, generator: torch.Generator) -> Tensor:
        """`count` uniform actions."""
        if self.discrete:
            return torch.randint(self.width, (count,), generator=generator, device=self.eye.device)
        return 2 * torch.rand(count, self.width, generator=generator, device=self.eye.device) - 1

    def action_features(self, action: Tensor) -> Tensor:
        """What the world model reads, `[..., width]`: one-hot vectors, or actions scaled down to at most 1."""
        if self.discrete:
            return self.eye[action]
        return action / action.abs().clamp(min=1)

    def to_env(self, action: Tensor) -> Tensor:
        """Actions in the units of the environment."""
        return action if self.discrete else self.center + self.scale * action.clamp(-1, 1)
