"""LeWorldModel (arXiv:2603.19312): an encoder of images and a causal transformer that predicts the next embedding.

There is no decoder, no reward and no target network. Both networks end in an MLP with batch normalization: a layer norm
at the end would fix the norm of every embedding, and SIGReg could not make their distribution normal.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces as gs
from torch import Tensor, nn
from torch.nn import functional

from foresight.data.trajectory import Tree
from foresight.errors import UserError
from foresight.nets import conv, encoders
from foresight.nets.sequence.transformer import MLP, NO_CACHE, Attention, TransformerConfig


class Projector(nn.Module):
    """A linear layer, batch normalization over everything but the features, GELU, and a linear layer."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        h = self.norm(self.first(x.flatten(0, -2)))
        return self.last(functional.gelu(h)).view(*x.shape[:-1], -1)


class Encoder(nn.Module):
    """Images of any size to embeddings: convolutions of stride 2 down to 4 pixels a side or less, then a `Projector`.

    `depth` is the number of channels after the first convolution, and doubles with every other. Raises UserError for
    observations that are not images.
    """

    def __init__(self, space: gs.Space[Any], depth: int, hidden: int, dim: int) -> None:
        super().__init__()
        if not encoders.is_image(space):
            raise UserError(f"LeWorldModel reads images, not {space}. Choose an environment with images.")
        shape = space.shape or ()
        self.order = conv.order(shape) or ()
        *stack, height, width = (shape[i] for i in self.order)
        self.channels = int(torch.Size(stack).numel())
        layers: list[nn.Module] = []
        channels, outputs = self.channels, depth
        while max(height, width) > 4:
            layers += [nn.Conv2d(channels, outputs, 3 if layers else 5, 2, padding=1 if layers else 2), nn.SiLU()]
            height, width, channels, outputs = (height + 1) // 2, (width + 1) // 2, outputs, 2 * outputs
        self.convs: nn.Sequential = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.projector = Projector(channels * height * width, hidden, dim)

    def forward(self, obs: Tensor) -> Tensor:
        """`[..., dim]`."""
        lead = obs.dim() - len(self.order)
        x = obs.permute(*range(lead), *(lead + i for i in self.order))
        x = x.reshape(-1, self.channels, *x.shape[-2:])
        x = x.to(torch.float32, memory_format=torch.channels_last) / 255 - 0.5
        return self.projector(self.convs(x).flatten(1)).view(*obs.shape[:lead], -1)


class Block(nn.Module):
    """A transformer block whose norms are scaled and shifted, and whose branches are gated, by a condition.

    All six start as 0, so the block starts as the identity: AdaLN-zero of DiT (Peebles & Xie 2023, arXiv:2212.09748).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(config), MLP(config)
        self.norm = nn.LayerNorm(config.dim, elementwise_affine=False)
        self.modulation = nn.Linear(config.dim, 6 * config.dim)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """`[B, T, W]`."""
        parts = self.modulation(functional.silu(condition)).chunk(6, -1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        mixed, *_ = self.attention(self.norm(x) * (1 + scale) + shift, None, None, NO_CACHE, 0)
        x = x + gate * mixed
        return x + mlp_gate * self.mlp(self.norm(x) * (1 + mlp_scale) + mlp_shift)


class Predictor(nn.Module):
    """From embeddings and the blocks of actions that follow them to the next embeddings, causally.

    `history` is the longest sequence it reads, `actions` the numbers in a block of actions.
    """

    def __init__(self, dim: int, actions: int, history: int, width: int, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        if width % heads:
            raise UserError(f"width must be a multiple of heads, {heads}, not {width}.")
        config = TransformerConfig(layers=layers, dim=width, heads=heads, activation="gelu", norm="layer")
        self.history = history
        self.inputs = nn.Linear(dim, width)
        self.position = nn.Parameter(0.02 * torch.randn(history, width))
        self.actions = nn.Sequential(nn.Linear(actions, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.projector = Projector(width, hidden, dim)

    def forward(self, z: Tensor, action: Tensor) -> Tensor:
        """Embeddings `[B, T, D]` and blocks of actions `[B, T, A]` to predictions of the T next embeddings."""
        x, condition = self.inputs(z) + self.position[: z.shape[1]], self.actions(action)
        for block in self.blocks:
            x = block(x, condition)
        return self.projector(self.norm(x))


class LeWM(nn.Module):
    """Encoder and predictor. `actions` is the number of actions A; a block has `block` · A numbers in [-1, 1].

    It observes and takes steps as a `WorldModel`, but is none: a step is a block of actions, and nothing is predicted
    but the next embedding.
    """

    discounted = False
    center: Tensor
    scale: Tensor

    def __init__(
        self, space: gs.Space[Any], action: gs.Box, block: int, dim: int, history: int, depth: int, width: int,
        layers: int, heads: int, hidden: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.actions, self.block, self.size = int(action.shape[0]), block, dim
        low, high = torch.from_numpy(action.low), torch.from_numpy(action.high)
        self.register_buffer("center", (high + low) / 2, persistent=False)
        self.register_buffer("scale", (high - low) / 2, persistent=False)
        self.encoder = Encoder(space, depth, hidden, dim)
        self.predictor = Predictor(dim, block * self.actions, history, width, layers, heads, hidden)

    def to_env(self, action: Tensor) -> Tensor:
        """Actions `[..., A]` in [-1, 1] as the environment takes them."""
        return self.center + self.scale * action

    def forward(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings `[B, T + 1, D]` of images, and the predictions `[B, T, D]` of all but the first of them.

        `obs` `[B, T + 1, ...]`; `action` `[B, T, block · A]`, the blocks of actions between two images.
        """
        z = self.encoder(obs)
        return z, self.predictor(z[:, :-1], action)

    def imagine(self, z: Tensor, action: Tensor) -> Tensor:
        """The embedding `[N, D]` after H blocks of actions `[N, H, block · A]` from the embedding `z` `[N, D]`.

        Each prediction reads at most the last `history` embeddings, its own among them.
        """
        state = self.begin({"latent": z})
        for one in action.unbind(1):
            state, *_ = self.advance(state, one)
        return state["latent"]

    def initial(self, batch: int) -> dict[str, Tensor]:
        """Nothing is remembered."""
        return {}

    def observe(
        self, carry: Tree, obs: Tree, action: Tensor, cut: Tensor, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        """The embeddings of the images, in evaluation mode. They depend on nothing else."""
        return {"latent": self.eval().encoder(obs["image"])}

    def features(self, state: dict[str, Tensor]) -> Tensor:
        """The embedding."""
        return state["latent"]

    def begin(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `WorldModel`: "past" `[N, K, D]` and "acted" `[N, K, block · A]` are what predictions read before."""
        z, width = state["latent"], self.block * self.actions
        return {"latent": z, "past": z.new_zeros(len(z), 0, self.size), "acted": z.new_zeros(len(z), 0, width)}

    def advance(
        self, state: dict[str, Tensor], action: Tensor, generator: torch.Generator | None = None
    ) -> tuple[dict[str, Tensor], None, None]:
        """See `WorldModel`: one block of actions `[N, block · A]`. Neither reward nor continuation is predicted."""
        last = slice(-self.predictor.history, None)
        past = torch.cat([state["past"], state["latent"].unsqueeze(1)], 1)[:, last]
        acted = torch.cat([state["acted"], action.unsqueeze(1)], 1)[:, last]
        return {"latent": self.predictor(past, acted)[:, -1], "past": past, "acted": acted}, None, None
