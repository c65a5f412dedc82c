"""What soft actor-critics are made of: several critics side by side, and a squashed policy within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight import errors
from foresight.errors import UserError
from foresight.nets import encoders
from foresight.nets.heads import TanhNormalHead
from foresight.nets.outputs import Categorical, TanhNormal
from foresight.nets.towers import Towers


class Critics(nn.Module):
    """`count` critics over the same features: `outputs` values each of (features, action).

    `encoder` makes features of observations: it is the identity for vectors, and convolutions for images, which
    are shared by the critics and learn from their loss only (as in SAC-AE, arXiv 1910.01741: the policy takes them as
    they are). `action_width` is 0 where the values are of all actions.
    """

    def __init__(
        self,
        space: gs.Space[Any],
        action_width: int,
        outputs: int,
        hidden: Sequence[int],
        activation: str = "relu",
        images: str = "nature",
        count: int = 2,
    ) -> None:
        super().__init__()
        self.encoder: Any
        if encoders.is_image(space):
            if images not in encoders.IMAGES:
                raise errors.unknown("image encoder", images, encoders.IMAGES)
            self.encoder = encoders.IMAGES[images](space.shape)
            self.size = int(self.encoder.size)
        else:
            vector = encoders.vectorizer(space)
            self.size = vector.size
            self.encoder = nn.Identity() if encoders.is_vector(space) else vector
        self.towers = Towers(self.size + action_width, hidden, [outputs] * count, [1.0] * count, activation)

    def forward(self, features: Tensor, action: Tensor | None = None) -> Sequence[Tensor]:
        """Values `[..., outputs]` of every critic."""
        return self.towers(features if action is None else torch.cat([features, action], -1))

    def vjp(self, features: Tensor, action: Tensor) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], None]] | None:
        """Values without autograd, and the way back to the weights: see `Towers.vjp`. None where features need one."""
        if features.requires_grad:
            return None
        return self.towers.vjp(torch.cat([features, action], -1))

    def frozen(self, features: Tensor, action: Tensor) -> Sequence[Tensor]:
        """The same, but the critics are taken as given: the gradient goes to `action` alone."""
        return self.towers.frozen(torch.cat([features.detach(), action], -1))


class SquashedActor(nn.Module):
    """Normals under tanh over features; `outward` takes actions from (-1, 1) to the bounds of `space`.

    Raises UserError where `space` is not a Box with bounds and one dim.
    """

    center: Tensor
    reach: Tensor

    def __init__(
        self, features: int, space: gs.Space[Any], name: str, hidden: Sequence[int], activation: str = "relu"
    ) -> None:
        super().__init__()
        if not isinstance(space, gs.Box) or len(space.shape) != 1:
            raise UserError(
                f"{name} acts with real numbers, but this environment takes {space}. "
                "Use sac_discrete, dqn or ppo, or choose an environment with a Box of actions with one dim."
            )
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise UserError(
                f"{name} needs actions with bounds, but this environment takes {space}. Rescale them or use ppo."
            )
        low, high = torch.from_numpy(space.low.astype(np.float32)), torch.from_numpy(space.high.astype(np.float32))
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("reach", (high - low) / 2)
        self.head = TanhNormalHead(space.shape[0])
        self.towers = Towers(features, hidden, [self.head.width], [0.01], activation)
        self.dims = int(space.shape[0])

    def forward(self, features: Tensor) -> TanhNormal:
        """The policy at `features`, over actions in (-1, 1)."""
        return self.head(self.towers(features)[0])

    def outward(self, action: Tensor) -> Tensor:
        """Actions in (-1, 1) as the world takes them."""
        return self.center + self.reach * action

    def inward(self, action: Tensor) -> Tensor:
        """The inverse of `outward`."""
        return (action - self.center) / self.reach


class CategoricalActor(nn.Module):
    """A categorical of `actions` over features; the part `mask_key` of dict observations says which are allowed."""

    def __init__(
        self, features: int, actions: int, mask_key: str | None, hidden: Sequence[int], activation: str = "relu"
    ) -> None:
        super().__init__()
        self.actions, self.mask_key = actions, mask_key
        self.towers = Towers(features, hidden, [actions], [0.01], activation)

    def forward(self, features: Tensor, obs: Any = None) -> Categorical:
        """The policy at `features`; `obs` is looked at for its mask only."""
        mask = None if self.mask_key is None else obs[self.mask_key] > 0
        return Categorical(self.towers(features)[0], mask)

    def uniform(self, like: Categorical) -> Categorical:
        """Every action equally likely that `like` allows."""
        allowed = like.logits > torch.finfo(like.logits.dtype).min
        return Categorical(torch.zeros_like(like.logits), allowed)
