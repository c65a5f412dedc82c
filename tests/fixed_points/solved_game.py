"""Tic-tac-toe solved by exhaustion, for tests that hand the true values to a search."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foresight.envs.games.game import Game


class Solved(nn.Module):
    """Tic-tac-toe by exhaustion, as a network: flat logits, and V of the best play, or of a fixed `policy`.

    `positions` `[N, ...]` and `best` `[N, A]` (bool: the actions that are as good as any), `value` `[N]`.
    """

    def __init__(self, game: Game, gamma: float = 1.0, seed: int | None = None) -> None:
        super().__init__()
        self.device = nn.Parameter(torch.zeros(()))
        self.game, layers = game, [game.start(1)]
        while len(layers[-1]):
            row, action = game.legal(layers[-1]).masked_fill(game.over(layers[-1]).unsqueeze(1), False).nonzero().T
            after = game.step(layers[-1][row], action)
            layers.append(torch.unique(after.position, dim=0)[:])
        self.known: dict[int, float] = {}
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        g = torch.Generator().manual_seed(seed or 0)
        for layer in reversed(layers):
            if not len(layer):
                continue
            legal = game.legal(layer).masked_fill(game.over(layer).unsqueeze(1), False)
            row, action = legal.nonzero().T
            q = torch.full(legal.shape, -torch.inf)
            if len(row):
                moved = game.step(layer[row], action)
                q[row, action] = moved.reward - gamma * torch.where(moved.over, 0.0, self.of(moved.position))
            if seed is None:
                value = q.amax(1)
            else:
                choice = torch.rand(q.shape, generator=g).masked_fill(~legal, -1.0).argmax(1)
                value = q.gather(1, choice.unsqueeze(1)).squeeze(1)
            value = value.masked_fill(game.over(layer), 0.0)
            best = legal & (q == value.unsqueeze(1)) if seed is None else torch.eye(q.shape[1])[choice].bool() & legal
            self.known.update(zip(self._keys(game.planes(layer)), value.tolist(), strict=True))
            kept.append((layer, best, value))
        self.positions, self.best, self.value = (torch.cat([x[i] for x in kept]) for i in range(3))
        open_ = ~game.over(self.positions)
        self.positions, self.best, self.value = self.positions[open_], self.best[open_], self.value[open_]

    def of(self, positions: Tensor) -> Tensor:
        """V `[B]`."""
        return self.seen(self.game.planes(positions))

    def seen(self, planes: Tensor) -> Tensor:
        """V `[B]` of what a network is shown."""
        return torch.tensor([self.known[key] for key in self._keys(planes)])

    def forward(self, planes: Tensor) -> tuple[Tensor, Tensor]:
        """Flat logits, and V."""
        return torch.zeros(len(planes), self.game.actions), self.seen(planes)

    def root(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor, None]:
        """As a `Model` is asked by the targets."""
        return (*self(obs["planes"]), None)

    @staticmethod
    def _keys(planes: Tensor) -> list[bytes]:
        return [x.tobytes() for x in planes.float().numpy()]


def some(solved: Solved, count: int) -> Tensor:
    """Numbers of positions of every kind of value, the first one among them."""
    chosen = torch.randperm(len(solved.value), generator=torch.Generator().manual_seed(0))[:count]
    chosen[0] = len(solved.value) - 1
    assert set(solved.value[chosen].tolist()) == {-1.0, 0.0, 1.0}
    return chosen
