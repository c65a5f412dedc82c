"""Networks that predict the noise in a sequence of actions, given its level and observations.

Sources: Chi et al. 2023 (arXiv:2303.04137), §3 and appendix A; the 1-D U-Net is after Janner et al. 2022
(arXiv:2205.09991), its modulation after Perez et al. 2018 (FiLM, arXiv:1709.07871).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from foresight.errors import UserError
from foresight.nets.sequence.transformer import Transformer, TransformerConfig


class LevelEmbedding(nn.Module):
    """Levels `[B]` as vectors `[B, size]`: sines and cosines, and an MLP with one hidden layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.waves = size // 2
        self.mlp = nn.Sequential(nn.Linear(2 * self.waves, 4 * size), nn.Mish(), nn.Linear(4 * size, size))

    def forward(self, level: Tensor) -> Tensor:
        """`[B, size]`."""
        rates = torch.exp(torch.arange(self.waves, device=level.device) * (-math.log(10_000) / max(self.waves - 1, 1)))
        angles = level[:, None] * rates
        y: Tensor = self.mlp(torch.cat([angles.sin(), angles.cos()], -1))
        return y


class FiLMBlock(nn.Module):
    """Two convolutions over time `[B, C, T]`, scaled and shifted per channel by the condition `[B, D]` in between."""

    def __init__(self, inputs: int, outputs: int, condition: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, kernel, groups)
        self.second = _convolution(outputs, outputs, kernel, groups)
        self.modulation = nn.Sequential(nn.Mish(), nn.Linear(condition, 2 * outputs))
        self.skip = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """`[B, outputs, T]`."""
        scale, shift = self.modulation(condition).unsqueeze(-1).chunk(2, 1)
        y: Tensor = self.second(self.first(x) * scale + shift) + self.skip(x)
        return y


class FiLMPair(nn.Module):
    """Two such blocks, one after the other."""

    def __init__(self, inputs: int, outputs: int, condition: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.first = FiLMBlock(inputs, outputs, condition, kernel, groups)
        self.second = FiLMBlock(outputs, outputs, condition, kernel, groups)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """`[B, outputs, T]`."""
        y: Tensor = self.second(self.first(x, condition), condition)
        return y


class UNet1D(nn.Module):
    """A U-Net over time: `widths` channels, halving the time between two widths, and back up with skip connections.

    T must be a multiple of `multiple`. Raises UserError for widths that are no multiple of the groups.
    """

    def __init__(
        self, action: int, condition: int, widths: Sequence[int], kernel: int, groups: int, embedding: int
    ) -> None:
        super().__init__()
        if not widths or any(width % groups for width in widths):
            raise UserError(f"widths must be multiples of groups, {groups}, not {tuple(widths)}.")
        if kernel % 2 == 0:
            raise UserError(f"kernel must be odd, not {kernel}.")
        self.multiple = 2 ** (len(widths) - 1)
        self.level = LevelEmbedding(embedding)
        size = embedding + condition

        def pair(inputs: int, outputs: int) -> FiLMPair:
            return FiLMPair(inputs, outputs, size, kernel, groups)

        steps = list(pairwise((action, *widths)))
        self.down = nn.ModuleList(pair(a, b) for a, b in steps)
        self.shorter = nn.ModuleList(nn.Conv1d(b, b, 3, stride=2, padding=1) for b in widths[:-1])
        self.middle = pair(widths[-1], widths[-1])
        self.up = nn.ModuleList(pair(2 * b, a) for a, b in reversed(steps[1:]))
        self.longer = nn.ModuleList(nn.ConvTranspose1d(a, a, 4, stride=2, padding=1) for a, _ in reversed(steps[1:]))
        self.out = nn.Sequential(_convolution(widths[0], widths[0], kernel, groups), nn.Conv1d(widths[0], action, 1))

    def forward(self, actions: Tensor, level: Tensor, condition: Tensor) -> Tensor:
        """The noise `[B, T, A]` in `actions` `[B, T, A]` at levels `[B]`, given observations `[B, T_o, D]`."""
        given = torch.cat([self.level(level), condition.flatten(1)], -1)
        x, skips = actions.transpose(1, 2), []
        for i, pair in enumerate(self.down):
            x = pair(x, given)
            skips.append(x)
            if i < len(self.shorter):
                x = self.shorter[i](x)
        x = self.middle(x, given)
        for pair, longer in zip(self.up, self.longer, strict=True):
            x = longer(pair(torch.cat([x, skips.pop()], 1), given))
        y: Tensor = self.out(x)
        return y.transpose(1, 2)


class DenoisingTransformer(nn.Module):
    """A causal transformer that reads the level, the observations, and the noisy actions, and predicts at the actions.

    The noise in an action depends on it and on earlier ones.
    """

    multiple = 1

    def __init__(
        self, action: int, observation: int, steps: int, dim: int, layers: int, heads: int, dropout: float
    ) -> None:
        """`steps`: observations and actions together, at most."""
        super().__init__()
        self.level = LevelEmbedding(dim)
        self.embed_observation, self.embed_action = nn.Linear(observation, dim), nn.Linear(action, dim)
        shape = TransformerConfig(
            layers=layers, dim=dim, heads=heads, norm="layer", activation="gelu", bias=True, dropout=dropout,
            positions="learned", max_length=steps + 1,
        )  # fmt: skip
        self.transformer = Transformer(shape)
        self.head = nn.Linear(dim, action)

    def forward(self, actions: Tensor, level: Tensor, condition: Tensor) -> Tensor:
        """The noise `[B, T, A]` in `actions` `[B, T, A]` at levels `[B]`, given observations `[B, T_o, D]`."""
        parts = [self.level(level).unsqueeze(1), self.embed_observation(condition), self.embed_action(actions)]
        features, _ = self.transformer(torch.cat(parts, 1))
        y: Tensor = self.head(features[:, -actions.shape[1] :])
        return y


class DenoisingMLP(nn.Module):
    """Residual blocks over the whole sequence as one vector, after IDQL (Hansen-Estruch et al. 2023, arXiv:2304.10573).

    The cheapest one per sample, as it has no computation per time step.
    """

    multiple = 1

    def __init__(self, size: int, condition: int, dim: int, layers: int, dropout: float) -> None:
        """`size`: numbers of a sequence of actions, T A; `condition`: those of the observations."""
        super().__init__()
        self.level = LevelEmbedding(dim)
        self.embed = nn.Linear(size + condition + dim, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Dropout(dropout), nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Mish(), nn.Linear(4 * dim, dim)
            )
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.Mish(), nn.Linear(dim, size))

    def forward(self, actions: Tensor, level: Tensor, condition: Tensor) -> Tensor:
        """The noise `[B, T, A]` in `actions` `[B, T, A]` at levels `[B]`, given observations `[B, T_o, D]`."""
        x = self.embed(torch.cat([actions.flatten(1), condition.flatten(1), self.level(level)], -1))
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.head(x)
        return y.view_as(actions)


def _convolution(inputs: int, outputs: int, kernel: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2), nn.GroupNorm(groups, outputs), nn.Mish()
    )
