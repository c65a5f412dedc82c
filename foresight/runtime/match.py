"""Matches: two players, both colours, and what their score says about their strength."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from foresight.envs.games import Chooser, Game
from foresight.planning import opponents

Z = 1.959964  # of a 95% interval
LONGEST_LINE = 12  # moves of a principal variation that are worth showing


@dataclasses.dataclass(frozen=True)
class Result:
    """How a match ended for its first player. `scores`: 1, ½ or 0 for each game, first half with the first move."""

    scores: tuple[float, ...]
    moves: tuple[int, ...]  # how long each game was

    @property
    def score(self) -> float:
        """Points a game, 0 to 1."""
        return math.fsum(self.scores) / len(self.scores)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Games won, drawn and lost."""
        won, lost = sum(s == 1 for s in self.scores), sum(s == 0 for s in self.scores)
        return won, len(self.scores) - won - lost, lost

    def interval(self) -> tuple[float, float]:
        """95% of the score: Wilson's interval, narrower by the part of the variance that draws take away."""
        n, p = len(self.scores), self.score
        centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        variance = math.fsum((s - p) ** 2 for s in self.scores) / n
        variance = min(variance, p * (1 - p))
        half = Z / (1 + Z * Z / n) * math.sqrt(variance / n + Z * Z / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)

    def elo(self) -> tuple[float, float, float]:
        """Elo difference and its 95% interval: 400 log10(p / (1 - p)); infinite where no point was given."""
        low, high = self.interval()
        return elo(self.score), elo(low), elo(high)

    def document(self) -> dict[str, Any]:
        """For JSON; an infinite Elo is null."""
        won, drawn, lost = self.counts
        whole = {name: round(x) if math.isfinite(x) else None
                 for name, x in zip(("elo", "elo_low", "elo_high"), self.elo(), strict=True)}  # fmt: skip
        half = (len(self.scores) + 1) // 2
        return {
            "games": len(self.scores), "won": won, "drawn": drawn, "lost": lost, "score": self.score,
            "interval_95": list(self.interval()), **whole,
            "score_first": math.fsum(self.scores[:half]) / half,
            "score_second": math.fsum(self.scores[half:]) / max(1, len(self.scores) - half),
        }  # fmt: skip


def elo(score: float) -> float:
    """The difference in Elo that gives this expected score (Elo 1978; 400 points are ten to one)."""
    if score <= 0 or score >= 1:
        return math.copysign(math.inf, score - 0.5)
    return 400 * math.log10(score / (1 - score))


def play(
    game: Game, one: Chooser, other: Chooser, games: int, openings: int = 0, seed: int = 0, together: int = 64
) -> Result:
    """`games` games, `one` with the first move in the first half of them.

    `openings`: random moves before each game, the same in both halves, so that players who are never in doubt do not
    play one game over and over.
    """
    half = (games + 1) // 2
    scores: list[float] = []
    moves: list[int] = []
    chooser = opponents.make("random", game, seed + 1)
    for first, count in ((True, half), (False, games - half)):
        openers = opponents.make("random", game, seed) if openings else chooser
        for start in range(0, count, together):
            position = game.start(min(together, count - start))
            for _ in range(openings):
                position = _safe(game, position, openers)
            ours = game.mover(position) == (0 if first else 1)
            while not bool((over := game.over(position)).all()):
                live = (~over).nonzero().flatten()
                for mine, player in ((True, one), (False, other)):
                    turn = live[ours[live] == mine]
                    if len(turn):
                        position[turn] = game.step(position[turn], player(position[turn])).position
                game.forget(position)
                ours = game.mover(position) == (0 if first else 1)
            found = game.first_score(position)
            scores += (found if first else 1 - found).tolist()
            moves += game.moves(position).tolist()
    return Result(tuple(scores), tuple(moves))


def _safe(game: Game, position: Tensor, chooser: Chooser) -> Tensor:
    """One random move in every game that it does not end."""
    moved = game.step(position, chooser(position))
    return torch.where(moved.over.view(-1, *[1] * (position.ndim - 1)), position, moved.position)


def chooser(module: Any, state: Any, **options: Any) -> Chooser:
    """A trained State as a player: no randomness, no memory."""

    def choose(position: Tensor) -> Tensor:
        action, _, _ = module.act(state, position, None, explore=False, **options)
        return action.cpu()

    return choose


def line(tree: Any, longest: int = LONGEST_LINE) -> list[int]:
    """The principal variation of a search of one position: the most visited action, again and again."""
    actions: list[int] = []
    node = 0
    while len(actions) < longest:
        counts = tree.child_visits(node)[0]
        if int(counts.max()) < 1:
            break
        actions.append(int(counts.argmax()))
        node = int(tree.children[0, node, actions[-1]])
    return actions
