"""Actions as tokens: choices, bins of numbers (RT-1, arXiv:2212.06817), and points of a picture as cells of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight.data import embodiments
from foresight.errors import UserError
from foresight.nets.outputs import Categorical
from foresight.ops import transforms

ROWS = 1_000_000  # steps of which quantiles are taken, at most


def spread(action: Tensor) -> Tensor:
    """At most `ROWS` of the steps `[S, ...]`, evenly spaced over all."""
    return action[:: max(1, -(-len(action) // ROWS))]


class ActionTokens(nn.Module):
    """Actions of a space as K tokens of a vocabulary of V: `encode` and `decode` are inverse at the bins' centers.

    A Box has one dim, or two: a chunk `[C, A]` of C actions of A numbers each, whose K = C A tokens are in this order.
    The range of each number is that of the space, until `fit` takes the quantiles 0.01 and 0.99 of the data (OpenVLA,
    arXiv:2406.09246, §3.2); numbers outside are in the outer bins. `allowed` `[K, V]` is true for the tokens that a
    place may have. With a `grid` of (rows, columns), a Box begins with `points` points, x and y (down) from 0 to 1, of
    which each is one token: its cell, row by row. Raises UserError for other spaces.
    """

    low: Tensor
    high: Tensor
    allowed: Tensor

    def __init__(
        self, space: gs.Space[Any], edges: int = 256, grid: tuple[int, int] | None = None, points: int = 1
    ) -> None:
        super().__init__()
        if grid is not None and not _begins_with(points, space):
            raise UserError(
                f"Head 'point' is for actions that begin with x and y from 0 to 1, once for each of {points} --points, "
                f"not {space}. Use --head bins."
            )
        if isinstance(space, gs.Discrete):
            sizes = [int(space.n)]
        elif isinstance(space, gs.MultiDiscrete):
            sizes = space.nvec.tolist()
        elif isinstance(space, gs.Box) and len(space.shape) in (1, 2) and np.isfinite([space.low, space.high]).all():
            sizes = [edges - 1] * int(np.prod(space.shape))
            sizes = sizes if grid is None else [grid[0] * grid[1]] * points + sizes[2 * points :]
            self.register_buffer("low", torch.tensor(space.low, dtype=torch.float32).flatten())
            self.register_buffer("high", torch.tensor(space.high, dtype=torch.float32).flatten())
        else:
            raise UserError(
                f"Actions must be Discrete, MultiDiscrete or a bounded Box of one or two dims, not {space}."
            )
        self.chunked = space.shape if isinstance(space, gs.Box) and len(space.shape) == 2 else None
        self.continuous, self.single = isinstance(space, gs.Box), isinstance(space, gs.Discrete)
        self.grid, self.points = grid, points if grid is not None else 0
        self.edges, self.count, self.vocabulary = edges, len(sizes), max(sizes)
        allowed = torch.arange(self.vocabulary) < torch.tensor(sizes)[:, None]
        self.register_buffer("allowed", allowed, persistent=False)

    def fit(self, action: Tensor) -> None:
        """Take the ranges of `action` `[S, K]`, or `[S, C, A]`. A constant number keeps the range of the space."""
        if self.continuous:
            rows = self.flat(spread(action)).float()
            low, high = torch.quantile(rows, torch.tensor([0.01, 0.99], device=rows.device), dim=0)
            moves = high - low > 1e-6
            self.low.copy_(torch.where(moves, low, self.low))
            self.high.copy_(torch.where(moves, high, self.high))

    def encode(self, action: Tensor) -> Tensor:
        """Tokens, int64 `[..., K]`."""
        if self.continuous:
            bins = transforms.to_bins(self.flat(action), self.low, self.high, self.edges)
            first = action[..., : 2 * self.points].unflatten(-1, (self.points, 2)) if self.points else None
            return bins if first is None else torch.cat([self._cell(first), bins[..., 2 * self.points :]], -1)
        return action.long().unsqueeze(-1) if self.single else action.long()

    def decode(self, tokens: Tensor) -> Tensor:
        """The action for tokens `[..., K]`."""
        if self.continuous and self.grid is not None:
            rest = slice(2 * self.points, None)
            numbers = transforms.from_bins(tokens[..., self.points :], self.low[rest], self.high[rest], self.edges)
            return torch.cat([self._center(tokens[..., : self.points]).flatten(-2), numbers], -1)
        if self.continuous:
            return self.shaped(transforms.from_bins(tokens, self.low, self.high, self.edges))
        return tokens.squeeze(-1) if self.single else tokens

    def _cell(self, point: Tensor) -> Tensor:
        """The number `[...]` of the cell of a point `[..., 2]`."""
        rows, columns = self.grid or (1, 1)
        x, y = point.unbind(-1)
        row, column = (y * rows).long().clamp(0, rows - 1), (x * columns).long().clamp(0, columns - 1)
        return row * columns + column

    def _center(self, cell: Tensor) -> Tensor:
        """The middle `[..., 2]` of a cell `[...]`."""
        rows, columns = self.grid or (1, 1)
        return torch.stack([(cell % columns + 0.5) / columns, (cell // columns + 0.5) / rows], -1)

    def flat(self, action: Tensor) -> Tensor:
        """The numbers `[..., K]` of actions of a Box."""
        return action if self.chunked is None else action.flatten(-2)

    def shaped(self, x: Tensor) -> Tensor:
        """Actions of a Box of their numbers `[..., K]`."""
        return x if self.chunked is None else x.unflatten(-1, self.chunked)


class SharedTokens(nn.Module):
    """Actions `[..., K]` in [-1, 1] that E embodiments share (`data.embodiments`) as K tokens of one vocabulary.

    A choice of n is one of n bins, a number one of `edges` - 1 between the quantiles 0.01 and 0.99 of its embodiment's
    own data, as OpenVLA keeps them for each data set (arXiv:2406.09246, §3.2). Padding is always the one bin 0.
    """

    low: Tensor
    high: Tensor
    bins: Tensor

    def __init__(self, actions: Sequence[gs.Space[Any]], edges: int) -> None:
        super().__init__()
        sizes = [[n or edges - 1 for n in embodiments.choices(action)] for action in actions]
        self.lengths, self.count = [len(row) for row in sizes], max(map(len, sizes))
        self.vocabulary, self.points, self.continuous = max(map(max, sizes)), 0, True
        bins = torch.tensor([row + [1] * (self.count - len(row)) for row in sizes])
        self.numbers = [torch.tensor([n == 0 for n in embodiments.choices(action)]) for action in actions]
        self.register_buffer("bins", bins, persistent=False)
        self.register_buffer("low", -torch.ones(bins.shape))
        self.register_buffer("high", torch.ones(bins.shape))

    def fit(self, action: Tensor, which: int) -> None:
        """Take the ranges of embodiment `which` from its actions `[S, K]`; choices and constants keep theirs."""
        own = spread(action)[:, : self.lengths[which]]
        low, high = torch.quantile(own, torch.tensor([0.01, 0.99], device=own.device), dim=0)
        moves = (high - low > 1e-6) & self.numbers[which].to(own.device)
        for table, values in ((self.low, low), (self.high, high)):
            row = table[which, : len(values)]
            row.copy_(torch.where(moves, values, row))

    def of(self, which: Tensor) -> OwnTokens:
        """The tokens of steps of the embodiments `which` `[...]`."""
        bins = self.bins[which]
        allowed = torch.arange(self.vocabulary, device=bins.device) < bins.unsqueeze(-1)
        return OwnTokens(allowed, self.low[which], self.high[which], bins + 1)


class OwnTokens(NamedTuple):
    """The code of steps of some embodiments each: `allowed` `[..., K, V]`, ranges and edges `[..., K]`."""

    allowed: Tensor
    low: Tensor
    high: Tensor
    edges: Tensor
    chunked: None = None  # the numbers of a shared action are one action

    def encode(self, action: Tensor) -> Tensor:
        """Tokens, int64 `[..., K]`."""
        return transforms.to_bins(action, self.low, self.high, self.edges)

    def decode(self, tokens: Tensor) -> Tensor:
        """The shared action for tokens `[..., K]`."""
        return transforms.from_bins(tokens, self.low, self.high, self.edges)


def _begins_with(points: int, space: gs.Space[Any]) -> bool:
    """Whether actions are numbers that begin with pairs from 0 to 1."""
    box, pairs = isinstance(space, gs.Box) and len(space.shape) == 1 and space.shape[0] >= 2 * points, 2 * points
    return box and (space.low[:pairs] == 0).all() and (space.high[:pairs] == 1).all()  # type: ignore[attr-defined]


class Tokens:
    """Independent action tokens as an `Output` over actions, from logits `[..., K, V]` limited to allowed tokens.

    They are independent as no action token sees another: log π(a) is the sum of the tokens' log-probabilities.
    """

    __slots__ = ("code", "tokens")

    def __init__(self, logits: Tensor, code: ActionTokens | OwnTokens) -> None:
        self.tokens, self.code = Categorical(logits, code.allowed), code

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """An action."""
        return self.code.decode(self.tokens.sample(generator))

    def mode(self) -> Tensor:
        """The likeliest action."""
        return self.code.decode(self.tokens.mode())

    def mean(self) -> Tensor:
        """Probabilities of all tokens, `[..., K, V]`."""
        return self.tokens.mean()

    def token_logp(self, x: Tensor) -> Tensor:
        """Log-probability of each token of the actions `x`, `[..., K]`."""
        return self.tokens.logp(self.code.encode(x))

    def action_logp(self, x: Tensor) -> Tensor:
        """Log-probability of each action of the chunks `x`, `[..., C]`; without chunks that of `x`, `[...]`."""
        each = self.token_logp(x)
        return (each if self.code.chunked is None else each.unflatten(-1, self.code.chunked)).sum(-1)

    def logp(self, x: Tensor) -> Tensor:
        """Log-probability of the actions `x`, or of whole chunks, `[...]`."""
        return self.token_logp(x).sum(-1)

    def entropy(self) -> Tensor:
        """Sum of the tokens' entropies."""
        return self.tokens.entropy().sum(-1)

    def kl(self, other: Tokens) -> Tensor:
        """Sum of the tokens' divergences."""
        return self.tokens.kl(other.tokens).sum(-1)

    def loss(self, target: Tensor) -> Tensor:
        """Cross-entropy with the tokens of the actions `target`."""
        return -self.logp(target)

    def smoothed_loss(self, target: Tensor, share: float) -> Tensor:
        """`loss`, with this share of each token's probability spread evenly over the allowed ones.

        Source: label smoothing, Szegedy et al. 2016 (arXiv:1512.00567), §7.
        """
        allowed = self.code.allowed
        even = -self.tokens.logps.where(allowed, 0).sum(-1) / allowed.sum(-1)
        return (1 - share) * self.loss(target) + share * even.sum(-1)


class Flow:
    """Continuous actions by flow matching: noise that a learned velocity field moves to an action.

        x_τ = (1 - τ) ε + τ a,     loss = ‖v(x_τ, τ, h) - (a - ε)‖²

    Source: Lipman et al. 2022 (arXiv:2210.02747), eq. 23 with σ = 0, as π0 has it (Black et al. 2024,
    arXiv:2410.24164, §IV). There is no log-probability.
    """

    __slots__ = ("code", "field", "hidden", "steps")

    def __init__(self, field: FlowField, hidden: Tensor, code: ActionTokens, steps: int = 10) -> None:
        self.field, self.hidden, self.code, self.steps = field, hidden, code, steps

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """An action: `steps` Euler steps from normal noise."""
        shape = (*self.hidden.shape[:-1], self.code.count)
        return self._moved(torch.randn(shape, generator=generator, device=self.hidden.device))

    def mode(self) -> Tensor:
        """The action that the mean of the noise becomes."""
        return self._moved(self.hidden.new_zeros(*self.hidden.shape[:-1], self.code.count))

    def loss(self, target: Tensor, noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        """The squared error of the velocity, `[...]`, at a uniform time."""
        half = (self.code.high - self.code.low) / 2
        action = ((self.code.flat(target) - self.code.low) / half - 1).clamp(-1, 1)
        noise = torch.randn_like(action) if noise is None else noise
        time = torch.rand_like(action[..., :1]) if time is None else time
        velocity = self.field((1 - time) * noise + time * action, time, self.hidden)
        return (velocity - (action - noise)).square().mean(-1)

    def _moved(self, x: Tensor) -> Tensor:
        for i in range(self.steps):
            time = torch.full_like(x[..., :1], i / self.steps)
            x = x + self.field(x, time, self.hidden) / self.steps
        return self.code.shaped(self.code.low + (x.clamp(-1, 1) + 1) / 2 * (self.code.high - self.code.low))


class FlowField(nn.Module):
    """The velocity `[..., K]` at the point x `[..., K]`, the time `[..., 1]` and features `[..., D]`."""

    def __init__(self, actions: int, dim: int, hidden: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(actions + 1 + dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
            nn.Linear(hidden, actions),
        )  # fmt: skip

    def forward(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        """The velocity."""
        y: Tensor = self.layers(torch.cat([x, time, features], -1))
        return y
