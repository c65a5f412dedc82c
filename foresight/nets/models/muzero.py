"""A learned model in a latent space: representation, dynamics, prediction (MuZero, arXiv:1911.08265).

It is a `planning.search.mcts.Model` (`root`, `step`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foresight.data.trajectory import Tree
from foresight.nets.mlp import MLP, Encoder, orthogonal
from foresight.nets.outputs import TwoHot
from foresight.ops import latent, transforms


class CategoricalScalar(nn.Module):
    """A layer that predicts a scalar as a categorical over h(x): `support` bins on each side of 0, `bin_width` apart.

    h is the signed hyperbolic transform: support 20 reaches ±422. Weights start at 0, so the first prediction is 0
    (MuZero, appendix F; the zero initialization is EfficientZero's).
    """

    bins: Tensor

    def __init__(self, inputs: int, support: int, bin_width: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 2 * support + 1)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.register_buffer("bins", bin_width * torch.arange(-support, support + 1, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """The scalar `[...]` of features `[..., D]`."""
        return transforms.signed_parabolic(torch.softmax(self.layer(x), -1) @ self.bins)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy `[...]` with the two bins around h(target)."""
        return TwoHot(self.layer(x), self.bins).loss(transforms.signed_hyperbolic(target))


class LatentModel(nn.Module):
    """Latents `[B, D]` scaled to [0, 1]; actions are features `[B, F]` (one-hot, or the action itself).

    `encoder` is any module with a `size`; the policy output has `policy_width` values. `discount` is the same at
    every step: the model does not predict termination, its values account for it (MuZero).
    """

    eye: Tensor

    def __init__(
        self,
        encoder: Encoder,
        action_features: int,
        policy_width: int,
        latent_size: int = 64,
        hidden: Sequence[int] = (128,),
        support: int = 20,
        discount: float = 0.997,
        activation: str = "relu",
        bin_width: float = 1.0,
    ) -> None:
        super().__init__()
        self.discount = discount
        self.encoder, self.into = encoder, orthogonal(nn.Linear(encoder.size, latent_size), 1.0)
        self.body = MLP(latent_size + action_features, hidden, activation)
        self.next = orthogonal(nn.Linear(self.body.size, latent_size), 1.0)
        self.reward = CategoricalScalar(self.body.size, support, bin_width)
        self.head = MLP(latent_size, hidden, activation)
        self.policy = orthogonal(nn.Linear(self.head.size, policy_width), 0.01)
        self.value = CategoricalScalar(self.head.size, support, bin_width)
        self.register_buffer("eye", torch.eye(action_features), persistent=False)

    def represent(self, obs: Tree) -> Tensor:
        """The latent `[B, D]` of an observation."""
        return latent.unit_interval(self.into(self.encoder(obs)))

    def advance(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """The latent after action features `[B, F]`, and the features that the reward is read from."""
        features = self.body(torch.cat([state, action], -1))
        return latent.unit_interval(self.next(features) + state), features

    def root(self, obs: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """`(logits, value, state)`, see `planning.search.mcts.Model`."""
        state = self.represent(obs)
        features = self.head(state)
        return self.policy(features), self.value(features), state

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`(state, reward, discount, logits, value)`; `action` int64 `[B]` or features `[B, F]`."""
        features = self.eye.index_select(0, action) if action.dim() == 1 else action
        state, on_the_way = self.advance(state, features)
        reward = self.reward(on_the_way)
        ahead = self.head(state)
        return state, reward, torch.full_like(reward, self.discount), self.policy(ahead), self.value(ahead)
