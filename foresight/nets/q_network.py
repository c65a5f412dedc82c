"""From observations to action values: an MLP or a convolutional trunk, dueling and noisy streams, and a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight import errors
from foresight.data.trajectory import Tree
from foresight.nets import encoders
from foresight.nets.actor_critic import VectorizedMLP
from foresight.nets.mlp import MLP, Encoder, orthogonal
from foresight.nets.noisy import NoisyLinear
from foresight.nets.stacked_mlp import StackedMLP
from foresight.nets.values import Values, ValuesHead
from foresight.ops import value
from foresight.ops.fused.mlp import Member

START = 0.1  # gain of the last layer: initial values are near 0
Noise = list[tuple[Tensor, Tensor]]


class Stream(nn.Module):
    """A hidden layer with ReLU and an output layer, both `NoisyLinear` if `sigma` is given."""

    def __init__(self, inputs: int, hidden: int, outputs: int, sigma: float | None = None) -> None:
        super().__init__()
        sizes = ((inputs, hidden), (hidden, outputs))
        if sigma is None:
            layers: list[Any] = [
                orthogonal(nn.Linear(*size), gain) for size, gain in zip(sizes, (2**0.5, START), strict=True)
            ]
        else:
            layers = [NoisyLinear(*size, sigma) for size in sizes]
        self.first, self.last, self.noisy = layers[0], layers[1], sigma is not None

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        """`noise`: a pair for each of the two layers, or None."""
        if not self.noisy:
            return self.last(torch.relu(self.first(x)))
        first, last = noise or (None, None)
        return self.last(torch.relu(self.first(x, first)), last)


class Streams(nn.Module):
    """One `Stream` for each entry of `outputs` over the features of `trunk`."""

    def __init__(self, trunk: Encoder, hidden: int, outputs: Sequence[int], sigma: float | None) -> None:
        super().__init__()
        self.trunk = trunk
        self.streams = nn.ModuleList(Stream(trunk.size, hidden, n, sigma) for n in outputs)

    def forward(self, obs: Tree, noise: Noise | None = None) -> list[Tensor]:
        """The output of every stream."""
        features = self.trunk(obs)
        pairs: list[Any] = [None] * len(self.streams)
        if noise is not None:
            pairs = [noise[2 * i : 2 * i + 2] for i in range(len(self.streams))]
        return [stream(features, pair) for stream, pair in zip(self.streams, pairs, strict=True)]


class QNetwork(nn.Module):
    """The values of `actions` actions, represented by `head` (see `nets.values`).

    Images get the convolutions of `images`, and a `Stream` of `hidden_images` units on them; vectors get an MLP with
    `hidden` layers. With `dueling` state value and advantages have separate streams: after the convolutions; over
    vectors two whole MLPs, or two noisy streams after the second to last hidden layer. `sigma` makes the streams
    noisy. The key `action_mask` of a dict observation masks actions.
    """

    def __init__(
        self,
        space: gs.Space[Any],
        actions: int,
        head: ValuesHead,
        hidden: Sequence[int] = (256, 256),
        activation: str = "relu",
        images: str = "nature",
        dueling: bool = False,
        sigma: float | None = None,
        hidden_images: int = 512,
    ) -> None:
        super().__init__()
        self.actions, self.head, self.dueling, self.noisy = actions, head, dueling, sigma is not None
        self.mask_key = encoders.mask_key(space)
        outputs = [head.size, actions * head.size] if dueling else [actions * head.size]
        self.body: Any
        if encoders.is_image(space):
            trunk = encoders.image_encoder(space, images, size=None)
            self.body = Streams(trunk, hidden_images, outputs, sigma)
        else:
            vector = encoders.vectorizer(space)
            plain = encoders.is_vector(space)
            if sigma is not None and not hidden:
                raise errors.UserError(
                    "Noisy layers need at least one hidden layer, but hidden is (): use --hidden 256."
                )
            if sigma is not None:
                early = MLP(vector.size, hidden[:-1], activation, first=None if plain else vector)
                self.body = Streams(early, hidden[-1], outputs, sigma)
            else:
                mlp = StackedMLP(vector.size, hidden, outputs, [START] * len(outputs), activation)
                self.body = mlp if plain else VectorizedMLP(vector, mlp)

    def forward(self, obs: Tree, noise: Noise | None = None) -> Values:
        """The values of all actions."""
        parts = self.body(obs, noise) if self.noisy else self.body(obs)
        advantage = parts[-1].view(*parts[-1].shape[:-1], self.actions, self.head.size)
        return self.head(value.dueling(parts[0], advantage) if self.dueling else advantage)

    def vjp(self, obs: Tree) -> tuple[Tensor, Callable[[Tensor], None]] | None:
        """Values `[N, A]` without autograd, and the backward pass; for scalar values only. See `StackedMLP.vjp`."""
        if self.dueling or self.head.size > 1 or not hasattr(self.body, "vjp"):
            return None
        found = self.body.vjp(obs)
        if found is None:
            return None
        (values,), back = found
        return values, lambda grad: back([grad])

    def member(self, obs: Tree) -> Member | None:
        """Its MLP for compiled loops over rows such as `obs`; None where it is not one alone, or actions are masked."""
        body = self.body  # looked up once: of a module an attribute costs as much as a small product
        plain = isinstance(body, StackedMLP) and not self.dueling and self.head.size == 1 and self.mask_key is None
        found = body.members(obs) if plain else None
        return None if found is None else found[0]

    def noise(self, generator: torch.Generator | None = None) -> Noise | None:
        """One noise sample for all noisy layers; None where there are none."""
        if not self.noisy:
            return None
        return [layer.noise(generator) for layer in self.modules() if isinstance(layer, NoisyLinear)]

    def best(self, values: Tensor, obs: Tree) -> Tensor:
        """The greedy allowed action, int64 `[...]`, for values `[..., A]` at `obs`."""
        if self.mask_key is not None:
            values = values.masked_fill(obs[self.mask_key] == 0, torch.finfo(values.dtype).min)
        return values.argmax(-1)

    def random(self, obs: Tree, count: int, generator: torch.Generator) -> Tensor:
        """Uniformly random allowed actions, int64 `[count]`."""
        if self.mask_key is None:
            return torch.randint(self.actions, (count,), generator=generator, device=generator.device)
        draw = torch.rand(count, self.actions, generator=generator, device=generator.device)
        return self.best(draw, obs)


def actions_of(space: gs.Space[Any], name: str, instead: str) -> int:
    """The number of actions. Raises UserError, which names what to use `instead` of `name`, if not Discrete."""
    if isinstance(space, gs.Discrete):
        return int(space.n)
    raise errors.UserError(
        f"{name} needs Discrete actions, but this environment takes {space}. "
        f"Use {instead}, or choose an environment with Discrete actions."
    )
