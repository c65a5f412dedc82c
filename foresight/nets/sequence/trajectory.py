"""The network of the Trajectory Transformer: every number is a token, `nets.sequence.transformer` over them.

Source: Janner et al. 2021 (arXiv:2106.02039), §3.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight.errors import UserError
from foresight.nets.sequence.transformer import Cache, Transformer, TransformerConfig

WAVES = 16  # cosines over the bins of which the first embeddings are made


class Bins(nn.Module):
    """Numbers of `columns` kinds as one of N = `bins` tokens each.

    `edges` `[D, N - 1]` separate the bins, `centers` `[D, N]` are the numbers that they stand for: the mean of their
    data. Numbers beyond the data get the first or the last token. Both are buffers, saved with the policy.
    """

    edges: Tensor
    centers: Tensor

    def __init__(self, columns: int, bins: int) -> None:
        super().__init__()
        self.bins = bins
        self.register_buffer("edges", torch.zeros(columns, bins - 1))
        self.register_buffer("centers", torch.zeros(columns, bins))

    def fit(self, values: Tensor, quantiles: bool, whole: dict[int, int]) -> None:
        """Bins of `values` `[S, D]`: with equally many of them (`quantiles`), or of equal width.

        `whole` maps columns of integers to their number n; token i stands for i there. A constant column has one
        number for all tokens.
        """
        values = values.double()
        share = torch.linspace(0, 1, self.bins + 1, dtype=torch.float64, device=values.device)
        low, high = values.amin(0), values.amax(0)
        between = low + (high - low) * share[:, None]  # [N + 1, D]
        if quantiles:
            between = values.sort(0).values[(share * len(values)).long().clamp(max=len(values) - 1)]
        for column, number in whole.items():
            between[:, column] = (torch.arange(self.bins + 1) - 0.5).clamp(max=number - 0.5)
        edges = between[1:-1].t().float()
        # Where a frequent number fills several bins, the last of them holds what lies between it and the next number.
        again = F.pad(edges[:, 1:] == edges[:, :-1], (1, 0))
        self.edges.copy_(torch.where(again, edges.nextafter(torch.full_like(edges, torch.inf)), edges))
        token = self.encode(values.float())
        index = token + torch.arange(token.shape[1], device=token.device) * self.bins
        size = self.edges.shape[0] * self.bins
        total = torch.zeros(size, dtype=torch.float64, device=values.device).index_add_(
            0, index.flatten(), values.flatten()
        )
        count = torch.bincount(index.flatten(), minlength=size)
        middle = ((between[1:] + between[:-1]) / 2).t().flatten()
        self.centers.copy_(torch.where(count > 0, total / count.clamp(min=1), middle).view_as(self.centers))
        for column, number in whole.items():
            self.centers[column] = torch.arange(self.bins).clamp(max=number - 1)

    def encode(self, values: Tensor, first: int = 0) -> Tensor:
        """Tokens `[..., d]` (int64) of numbers `[..., d]` of the columns from `first` on."""
        columns = values.shape[-1]
        rows = values.float().reshape(-1, columns).t().contiguous()
        edges = self.edges[first : first + columns].contiguous()
        return torch.searchsorted(edges, rows, right=True).t().reshape(values.shape)

    def decode(self, tokens: Tensor, first: int = 0) -> Tensor:
        """The numbers `[..., d]` that tokens `[..., d]` of the columns from `first` on stand for."""
        columns = torch.arange(first, first + tokens.shape[-1], device=tokens.device)
        return self.centers[columns, tokens]

    def expected(self, logits: Tensor, column: int) -> Tensor:
        """The mean `[...]` of a number of this column, of `logits` `[..., N]`."""
        return logits.softmax(-1) @ self.centers[column]


class Prefix(NamedTuple):
    """The tokens `[M, L]` read so far, and their keys and values; without `cache` they are computed again."""

    tokens: Tensor
    mask: Tensor | None
    cache: Cache | None

    def select(self, rows: Tensor) -> Prefix:
        """Row i of the result is row `rows[i]`."""
        mask = None if self.mask is None else self.mask[rows]
        return Prefix(self.tokens[rows], mask, None if self.cache is None else self.cache.select(rows))


class TrajectoryTransformer(nn.Module):
    """The tokens of each step are those of its observation, its action and its reward: I per step.

    Each predicts the next; the token of the reward also predicts the return to go after the step. This number is a
    target only, never read, so no prediction depends on it. Column I of `bins` is that of the return to go.
    Raises UserError for spaces whose numbers are not one row.
    """

    def __init__(
        self,
        obs: gs.Space[Any],
        action: gs.Space[Any],
        bins: int,
        dim: int,
        layers: int,
        heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.obs_space, self.action_space = obs, action
        (self.obs_size, obs_count), (self.action_size, action_count) = _numbers(obs), _numbers(action)
        self.inputs = self.obs_size + self.action_size + 1
        self.whole = {0: obs_count} if obs_count else {}
        if action_count:
            self.whole[self.obs_size] = action_count
        if (most := max(self.whole.values(), default=0)) > bins:
            raise UserError(f"bins must be at least {most}, as there are {most} choices, not {bins}.")
        self.bins = Bins(self.inputs + 1, bins)
        self.embed = nn.Embedding(self.inputs * bins, dim)
        self.embed.weight.data.copy_(0.02 * _smooth(self.inputs, bins, dim).flatten(0, 1))
        shape = TransformerConfig(
            layers=layers, dim=dim, heads=heads, positions="rope", norm="layer", activation="gelu", bias=True,
            dropout=dropout,
        )  # fmt: skip
        self.transformer = Transformer(shape)
        # Head i predicts what follows token i.
        self.heads = nn.Parameter(0.02 * _smooth(self.inputs, bins, dim).transpose(1, 2).contiguous())
        self.value_head = nn.Linear(dim, bins)

    def row(self, obs: Tensor, action: Tensor, reward: Tensor) -> Tensor:
        """The numbers `[..., I]` of steps: observations, actions and rewards, integers from 0 on."""
        parts = []
        for space, x, size in ((self.obs_space, obs, self.obs_size), (self.action_space, action, self.action_size)):
            x = x - int(space.start) if isinstance(space, gs.Discrete) else x
            parts.append(x.reshape(*reward.shape, size).float())
        return torch.cat([*parts, reward.unsqueeze(-1)], -1)

    def to_env(self, tokens: Tensor) -> Tensor:
        """Actions `[B, ...]` of their tokens `[B, A]`."""
        numbers = self.bins.decode(tokens, self.obs_size)
        if isinstance(self.action_space, gs.Discrete):
            return numbers[:, 0].long() + int(self.action_space.start)
        return numbers

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the next token `[B, K, I, N]` and of the return to go `[B, K, N]`, of tokens `[B, K, I]`.

        `mask` `[B, K]` is 0 on padding, which is on the left.
        """
        batch, steps, _ = tokens.shape
        real = None if bool(mask.all()) else mask.repeat_interleave(self.inputs, 1) > 0
        features, _ = self.transformer(self._embedded(tokens.flatten(1)), mask=real)
        features = features.view(batch, steps, self.inputs, -1)
        logits = torch.einsum("bkid,idn->bkin", features, self.heads)
        return logits, self.value_head(features[:, :, -1])

    def start(self, tokens: Tensor, mask: Tensor | None, slots: int = 0) -> tuple[Prefix, Tensor]:
        """Read tokens `[M, L]`; returns the prefix and the features `[M, D]` of the last token.

        With `slots` (of all tokens that will be read) the prefix has a cache.
        """
        cache = self.transformer.empty_cache(len(tokens), slots) if slots else None
        features, cache = self.transformer(self._embedded(tokens), cache, mask=mask)
        return Prefix(tokens, mask, cache if slots else None), features[:, -1]

    def read(self, prefix: Prefix, token: Tensor) -> tuple[Prefix, Tensor]:
        """Read one more token of each row, `[M]`; see `start`."""
        tokens = torch.cat([prefix.tokens, token[:, None]], 1)
        mask = None if prefix.mask is None else F.pad(prefix.mask, (0, 1), value=True)
        if prefix.cache is None:
            return self.start(tokens, mask)
        new = self._embedded(token[:, None], prefix.tokens.shape[1])
        features, cache = self.transformer(new, prefix.cache)
        return Prefix(tokens, mask, cache), features[:, -1]

    def next_logits(self, features: Tensor, column: int) -> Tensor:
        """Logits `[M, N]` of a token of `column`, from the features of the token before it."""
        return features @ self.heads[column - 1]

    def _embedded(self, tokens: Tensor, start: int = 0) -> Tensor:
        if tokens.shape[1] == 1:
            return self.embed(tokens + start % self.inputs * self.bins.bins)
        column = torch.arange(start, start + tokens.shape[1], device=tokens.device) % self.inputs
        return self.embed(tokens + column * self.bins.bins)


def _numbers(space: gs.Space[Any]) -> tuple[int, int]:
    """How many numbers a value of the space has, and the number of choices if it is an integer, otherwise 0."""
    if isinstance(space, gs.Discrete):
        return 1, int(space.n)
    if isinstance(space, gs.Box) and len(space.shape) == 1:
        return int(space.shape[0]), 0
    raise UserError(f"The Trajectory Transformer needs spaces Discrete or Box with one dim, not {space}.")


def _smooth(columns: int, bins: int, dim: int) -> Tensor:
    """Random vectors `[columns, bins, dim]` of variance 1 that are alike for bins that are near each other.

    So what is learned of a number holds for its neighbors from the start; embeddings drawn bin by bin learn it slowly.
    """
    wave = torch.arange(min(WAVES, bins)) * torch.pi * (torch.arange(bins)[:, None] + 0.5) / bins
    return wave.cos() @ torch.randn(columns, wave.shape[1], dim) * (2 / wave.shape[1]) ** 0.5
