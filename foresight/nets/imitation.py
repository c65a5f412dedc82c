"""What policies trained on recorded episodes share: encoded observations, and actions as vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight.data.embodiments import MISSION
from foresight.data.episodes import FLAT, statistics
from foresight.data.trajectory import Tree
from foresight.errors import UserError
from foresight.nets import encoders
from foresight.nets.heads import CategoricalHead, TanhNormalHead
from foresight.nets.outputs import Categorical, TanhNormal


class SeenObs(nn.Module):
    """Observations as features `[..., size]`: every image by a network of its own, then the numbers `[..., width]`.

    Observations are one array or a dict of arrays. Without images there are no parameters, and `size` is `width`.
    """

    def __init__(self, space: gs.Space[Any], images: str) -> None:
        """`images` is a name of `encoders.IMAGES`. Raises UserError for instructions, and as `image_encoder`."""
        super().__init__()
        parts: dict[str, gs.Space[Any]] = dict(space.spaces) if isinstance(space, gs.Dict) else {"": space}
        if MISSION in parts:
            raise UserError(f"This policy does not read the instruction '{MISSION}' of {space}. Imitate it with: vla")
        self.names = sorted(name for name, part in parts.items() if encoders.is_image(part))
        nets = [encoders.image_encoder(parts[name], images) for name in self.names]
        self.nets = nn.ModuleList(nets)
        rest = {name: part for name, part in parts.items() if name not in (*self.names, encoders.ACTION_MASK)}
        self.rest = space if "" in rest else gs.Dict(rest)
        self.vector = encoders.vectorizer(self.rest) if rest else None
        self.width = 0 if self.vector is None else self.vector.size
        self.size = self.width + sum(net.size for net in nets)

    def numbers(self, obs: Tree) -> Tensor:
        """What is no image, `[..., width]`."""
        if self.vector is None:
            seen = obs[self.names[0]] if isinstance(obs, dict) else obs
            return torch.zeros(len(seen), 0, device=seen.device)
        y: Tensor = self.vector(obs)
        return y

    def forward(self, obs: Tree, scale: Callable[[Tensor], Tensor]) -> Tensor:
        """`[..., size]`; `scale` takes the numbers `[..., width]` to numbers of the same shape."""
        images = (obs[name] if isinstance(obs, dict) else obs for name in self.names)
        features = [net(image) for net, image in zip(self.nets, images, strict=True)]
        return torch.cat([*features, scale(self.numbers(obs))] if self.width else features, -1)


class NormalizedObs(nn.Module):
    """Observations `[..., *shape]` as vectors `[..., size]` of mean 0 and deviation 1 over the data.

    The statistics are buffers, so that they are saved with the policy. Integers become one-hot. With `images`, a name
    of `encoders.IMAGES`, observations may be an image, or a dict of images and vectors; see `SeenObs`.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, space: gs.Space[Any], images: str | None = None) -> None:
        """Raises UserError for instructions, and without `images` for images and dicts."""
        super().__init__()
        if images is None and (isinstance(space, gs.Dict) or space.dtype == np.uint8):
            raise UserError(
                f"This policy reads one array of floats or one integer, not {space}. Imitate with: "
                f"{'vla' if isinstance(space, gs.Dict) and MISSION in space.spaces else 'behavior_cloning'}"
            )
        self.seen = SeenObs(space, images or "nature")
        self.size, self.measured = self.seen.size, _measured(self.seen.rest)
        self.register_buffer("mean", torch.zeros(self.seen.width))
        self.register_buffer("std", torch.ones(self.seen.width))

    def fit(self, obs: Tree, rows: Tensor | slice = slice(None)) -> None:
        """Take the statistics of the `rows` `[S]` of `obs` `[R, ...]`."""
        if not self.seen.width:
            return
        mean, std = statistics(self.seen.numbers(obs)[rows].to(self.mean.device))
        measured = self.measured.to(mean.device)
        self.mean.copy_(torch.where(measured, mean, 0))
        self.std.copy_(torch.where(measured, std, 1))

    def forward(self, obs: Tree) -> Tensor:
        """`[..., size]`."""
        y: Tensor = self.seen(obs, lambda x: (x - self.mean) / self.std)
        return y


def _measured(space: gs.Space[Any]) -> Tensor:
    """Which entries of the vector of `space` are measurements, `[width]` bool; one-hot ones are not."""
    if isinstance(space, gs.Dict):
        return torch.cat([torch.zeros(0, dtype=torch.bool), *(_measured(part) for _, part in sorted(space.items()))])
    measured = isinstance(space, gs.Box) and not encoders.is_symbolic(space)
    return torch.full((encoders.vectorizer(space).size,), measured)


def elsewhere(obs: gs.Space[Any], action: gs.Space[Any]) -> str:
    """The advice where a policy cannot act in `action`: what imitates with these spaces."""
    if isinstance(obs, gs.Dict) and MISSION in obs.spaces:
        return "Imitate with: vla"
    if isinstance(action, gs.Discrete):
        return "Imitate with: behavior_cloning"
    return "Wrap the environment so that it takes one."


class MeanStd(nn.Module):
    """Vectors `[..., size]` scaled to mean 0 and deviation 1 over the data; both are saved with it.

    A dimension that is constant in the data is not divided.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def fit(self, values: Tensor) -> None:
        """Take the statistics of `values` `[S, size]`."""
        mean, std = statistics(values)
        self.mean.copy_(mean)
        self.std.copy_(std)

    def encode(self, values: Tensor) -> Tensor:
        """`[..., size]`."""
        return (values - self.mean) / self.std

    def decode(self, y: Tensor) -> Tensor:
        """The values `[..., size]` for `y`."""
        return y * self.std + self.mean


class MinMax(nn.Module):
    """Vectors `[..., size]` scaled to [-1, 1] by the least and the highest values of the data, which are saved with it.

    A dimension that is constant in the data, but for `FLAT`, becomes 0, and comes back as that constant.
    """

    low: Tensor
    high: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("low", -torch.ones(size))
        self.register_buffer("high", torch.ones(size))

    def fit(self, values: Tensor) -> None:
        """Take the bounds of `values` `[S, size]`."""
        self.low.copy_(values.amin(0))
        self.high.copy_(values.amax(0))

    def encode(self, values: Tensor) -> Tensor:
        """`[..., size]`; values outside the data are clipped to them."""
        width = self.high - self.low
        moves = width > FLAT
        share = (values - self.low) / torch.where(moves, width, 1)
        return torch.where(moves, (2 * share - 1).clamp(-1, 1), 0)

    def decode(self, y: Tensor) -> Tensor:
        """The values `[..., size]` for `y`, clipped to [-1, 1]: -1 and 1 give the bounds exactly."""
        return torch.lerp(self.low, self.high, (y.clamp(-1, 1) + 1) / 2)


class ActionCode(nn.Module):
    """Actions as vectors `[..., width]`: one-hot, or scaled to [-1, 1] by the bounds of a Box; and their loss.

    Raises UserError for other spaces.
    """

    low: Tensor
    high: Tensor

    def __init__(self, space: gs.Space[Any]) -> None:
        super().__init__()
        self.discrete = isinstance(space, gs.Discrete)
        bounded = isinstance(space, gs.Box) and len(space.shape) == 1 and np.isfinite([space.low, space.high]).all()
        if not (self.discrete or bounded):
            raise UserError(f"Actions must be Discrete or a bounded Box with one dim, not {space}.")
        encoders.require_choice(space)
        self.width: int = int(space.n) if isinstance(space, gs.Discrete) else int(space.shape[0])  # type: ignore[index]
        self.first = int(space.start) if isinstance(space, gs.Discrete) else 0
        if isinstance(space, gs.Box):
            self.register_buffer("low", torch.tensor(space.low, dtype=torch.float32))
            self.register_buffer("high", torch.tensor(space.high, dtype=torch.float32))

    def encode(self, action: Tensor) -> Tensor:
        """`[..., width]`; actions of a Box outside the bounds are clipped to them, as the environment does."""
        if self.discrete:
            return F.one_hot(action.long() - self.first, self.width).float()
        middle, half = (self.high + self.low) / 2, (self.high - self.low) / 2
        return ((action - middle) / half).clamp(-1, 1)

    def decode(self, y: Tensor) -> Tensor:
        """The likeliest action for the network's output `y` `[..., width]`."""
        return self.to_env(y.argmax(-1) if self.discrete else y.tanh())

    def to_env(self, x: Tensor) -> Tensor:
        """Actions `[..., *shape]` of choices from 0 on, or of vectors in [-1, 1] `[..., width]`."""
        return x + self.first if self.discrete else self.low + (x + 1) / 2 * (self.high - self.low)

    def loss(self, y: Tensor, action: Tensor) -> Tensor:
        """Cross-entropy, or mean squared error in [-1, 1], `[...]`."""
        target = self.encode(action)
        if self.discrete:
            return -(target * y.log_softmax(-1)).sum(-1)
        return (y.tanh() - target).square().mean(-1)


class ActionDistribution(nn.Module):
    """Distributions over actions from outputs `[..., outputs]` of a network: `Categorical`, or `TanhNormal` of a Box.

    `code` encodes actions, and `to_env` scales samples. Raises UserError for other spaces.
    """

    def __init__(self, space: gs.Space[Any]) -> None:
        super().__init__()
        self.code = ActionCode(space)
        self.head = CategoricalHead(self.code.width) if self.code.discrete else TanhNormalHead(self.code.width)
        self.outputs = self.head.width

    def forward(self, y: Tensor) -> Categorical | TanhNormal:
        """The `Output`."""
        return self.head(y)

    def logp(self, output: Categorical | TanhNormal, action: Tensor) -> Tensor:
        """Log-probability `[...]` of actions as the environment takes them; a density of them scaled to [-1, 1]."""
        return output.logp(action.long() - self.code.first if self.code.discrete else self.code.encode(action))
