"""The network of ACT: a conditional variational autoencoder of chunks of actions, made of transformers.

Source: Zhao et al. 2023 (arXiv:2304.13705), §4 and appendix C, for vector observations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class ActionChunker(nn.Module):
    """Chunks of T actions for an observation and a latent.

    `posterior` reads the observation and the actions; `forward` reads the observation and the latent with an encoder,
    and its decoder asks one learned question per action.
    """

    def __init__(
        self, obs: int, action: int, chunk: int, dim: int, heads: int, hidden: int, layers: tuple[int, int, int],
        latent: int, dropout: float,
    ) -> None:  # fmt: skip
        """`layers`: of the posterior, the encoder and the decoder."""
        super().__init__()
        self.latent = latent

        def encoder(count: int) -> nn.TransformerEncoder:
            layer = nn.TransformerEncoderLayer(dim, heads, hidden, dropout, batch_first=True)
            return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)

        self.posterior_obs, self.posterior_action = nn.Linear(obs, dim), nn.Linear(action, dim)
        self.summary = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.positions: Tensor
        self.register_buffer("positions", _sines(2 + chunk, dim), persistent=False)
        self.posterior_encoder = encoder(layers[0])
        self.posterior_head = nn.Linear(dim, 2 * latent)
        self.embed_obs, self.embed_latent = nn.Linear(obs, dim), nn.Linear(latent, dim)
        self.kind = nn.Parameter(0.02 * torch.randn(1, 2, dim))  # tells the latent from the observation
        self.encoder = encoder(layers[1])
        self.questions = nn.Parameter(torch.randn(1, chunk, dim))
        decoder = nn.TransformerDecoderLayer(dim, heads, hidden, dropout, batch_first=True)
        self.decoder = nn.TransformerDecoder(decoder, layers[2], nn.LayerNorm(dim))
        self.head = nn.Linear(dim, action)

    def posterior(self, obs: Tensor, actions: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance `[B, latent]` for observations `[B, D]` and actions `[B, T, A]`; padding: `real` 0."""
        parts = (
            self.summary.expand(len(obs), -1, -1),
            self.posterior_obs(obs)[:, None],
            self.posterior_action(actions),
        )
        hidden = functional.pad(real < 1, (2, 0))
        x = self.posterior_encoder(torch.cat(parts, 1) + self.positions, src_key_padding_mask=hidden)
        mean, log_variance = self.posterior_head(x[:, 0]).chunk(2, -1)
        return mean, log_variance

    def forward(self, obs: Tensor, latent: Tensor) -> Tensor:
        """Actions `[B, T, A]` for observations `[B, D]` and latents `[B, latent]`."""
        memory = self.encoder(torch.stack([self.embed_latent(latent), self.embed_obs(obs)], 1) + self.kind)
        y: Tensor = self.head(self.decoder(self.questions.expand(len(obs), -1, -1), memory))
        return y


def _sines(steps: int, dim: int) -> Tensor:
    """The sinusoidal positions `[1, steps, dim]` of Vaswani et al. 2017 (arXiv:1706.03762), §3.5."""
    rates = torch.exp(torch.arange(0, dim, 2) * (-math.log(10_000) / dim))
    angles = torch.arange(steps)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[None, :, :dim]
