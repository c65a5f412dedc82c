"""Matches between two players, with both colors, and the Elo ratings that follow from the scores."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresight.envs.games.game import Chooser, Game
from foresight.errors import UserError
from foresight.planning.games import opponents
from foresight.runtime.catalog import Algorithm, State

Watch = Callable[[int, int], None]
Z = 1.959964  # of a 95% interval
LONGEST_VARIATION = 12  # moves of a principal variation to show


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a match for its first player. `scores`: 1, ½ or 0 per game; it moves first in the first half."""

    scores: tuple[float, ...]
    moves: tuple[int, ...]  # the length of each game

    @property
    def score(self) -> float:
        """Points per game, 0 to 1."""
        return math.fsum(self.scores) / len(self.scores)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Games won, drawn and lost."""
        won, lost = sum(s == 1 for s in self.scores), sum(s == 0 for s in self.scores)
        return won, len(self.scores) - won - lost, lost

    def interval(self) -> tuple[float, float]:
        """The 95% interval of the score: Wilson's, narrower by the variance that draws remove.

        If every point was won the upper bound is exactly 1, and if none was the lower bound exactly 0: Elo is then
        unbounded on that side, however many games were played.
        """
        n, p = len(self.scores), self.score
        center = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        variance = math.fsum((s - p) ** 2 for s in self.scores) / n
        variance = min(variance, p * (1 - p))
        half = Z / (1 + Z * Z / n) * math.sqrt(variance / n + Z * Z / (4 * n * n))
        # Set exactly: rounding would miss 0 and 1 by a bit for some numbers of games.
        return 0.0 if p == 0 else max(0.0, center - half), 1.0 if p == 1 else min(1.0, center + half)

    def elo(self) -> tuple[float, float, float]:
        """Elo difference and its 95% interval: 400 log10(p / (1 - p)); infinite if no or every point was won."""
        low, high = self.interval()
        return elo(self.score), elo(low), elo(high)

    def document(self) -> dict[str, Any]:
        """For JSON; an infinite Elo is null."""
        won, drawn, lost = self.counts
        rounded = {name: round(x) if math.isfinite(x) else None
                 for name, x in zip(("elo", "elo_low", "elo_high"), self.elo(), strict=True)}  # fmt: skip
        half = (len(self.scores) + 1) // 2
        return {
            "games": len(self.scores), "won": won, "drawn": drawn, "lost": lost, "score": self.score,
            "interval_95": list(self.interval()), **rounded,
            "score_first": math.fsum(self.scores[:half]) / half,
            "score_second": math.fsum(self.scores[half:]) / (len(self.scores) - half) if self.scores[half:] else None,
        }  # fmt: skip


def elo(score: float) -> float:
    """The Elo difference with this expected score (Elo 1978; 400 points are odds of ten to one)."""
    if score <= 0 or score >= 1:
        return math.copysign(math.inf, score - 0.5)
    return 400 * math.log10(score / (1 - score))


def ratings(scores: np.ndarray, games: np.ndarray, sweeps: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Maximum-likelihood Elo of N players relative to the first, and the half widths of 95% intervals, both `[N]`.

    `scores[i, j]` are the points of i against j, `games[i, j]` the games they played. The model is
    p(i beats j) = 1 / (1 + 10^((e_j - e_i) / 400)); each pair that played gets one more drawn game, so that no rating
    is infinite. Widths are of the differences from the first player, by the observed information. Source: Bradley and
    Terry 1952; Coulom 2008 (Bayeselo) for the draw.
    """
    played = games > 0
    games, scores = games + played, scores + 0.5 * played
    strength = np.zeros(len(games))
    for _ in range(sweeps):  # Newton's method; the likelihood is concave
        p = 1 / (1 + np.exp(strength[None] - strength[:, None]))
        weight = games * p * (1 - p)
        information = (np.diag(weight.sum(1)) - weight)[1:, 1:]
        move = np.linalg.solve(information, (scores - games * p).sum(1)[1:])
        strength[1:] += np.clip(move, -1.0, 1.0)
        if np.abs(move).max() < 1e-9:
            break
    scale = 400 / math.log(10)
    return scale * strength, scale * Z * np.sqrt(np.append(0.0, np.diag(np.linalg.inv(information))))


def ladder(
    game: Game, players: Sequence[Chooser], games: int, openings: int, seed: int, watch: Watch | None = None
) -> dict[str, Any]:
    """A round-robin tournament with `games` per pair, as JSON. `watch` is called as by `play`.

    `pairs`: the players of each match (later, earlier) and its result for the later; `elo`: the rating of each player
    with its interval.
    """
    points, played = np.zeros((2, len(players), len(players)))
    pairs = []
    for early, late in itertools.combinations(range(len(players)), 2):
        result = play(game, players[late], players[early], games, openings, seed, watch=watch)
        points[late, early], points[early, late] = (total := math.fsum(result.scores)), games - total
        played[late, early] = played[early, late] = games
        pairs.append({"players": [late, early], **result.document()})
    middle, half = ratings(points, played)
    rows = [{"elo": round(m), "elo_low": round(m - h), "elo_high": round(m + h)}
            for m, h in zip(middle.tolist(), half.tolist(), strict=True)]  # fmt: skip
    return {"elo": rows, "pairs": pairs}


def play(
    game: Game,
    one: Chooser,
    other: Chooser,
    games: int,
    openings: int = 0,
    seed: int = 0,
    together: int = 64,
    watch: Watch | None = None,
) -> Result:
    """`games` games, `one` with the first move in the first half of them.

    `openings`: random moves before each game, the same in both halves, so that deterministic players do not repeat one
    game. `watch(ended, moves)` is called after every call of a player with the games that ended and the moves made.
    Raises UserError for negative `openings`, and for as many as the longest game has moves.
    """
    check_openings(game, openings)
    half = (games + 1) // 2
    scores: list[float] = []
    moves: list[int] = []
    chooser = opponents.make("random", game, seed + 1)
    for first, count in ((True, half), (False, games - half)):
        openers = opponents.make("random", game, seed) if openings else chooser
        for start in range(0, count, together):
            position = game.start(min(together, half - start))  # as many in both halves, for the same random moves
            for _ in range(openings):
                position = _safe(game, position, openers)
            position = position[: count - start]
            ours = game.mover(position) == (0 if first else 1)
            while not bool((over := game.over(position)).all()):
                live = (~over).nonzero().flatten()
                for mine, player in ((True, one), (False, other)):
                    turn = live[ours[live] == mine]
                    if len(turn):
                        moved = game.step(position[turn], player(position[turn]))
                        position[turn] = moved.position
                        if watch is not None:
                            watch(int(moved.over.sum()), len(turn))
                game.free_except(position)
                ours = game.mover(position) == (0 if first else 1)
            found = game.first_score(position)
            scores += (found if first else 1 - found).tolist()
            moves += game.moves(position).tolist()
    return Result(tuple(scores), tuple(moves))


def check_openings(game: Game, openings: int) -> None:
    """Raise UserError for a number of random opening moves that the game does not allow."""
    if not 0 <= openings < game.longest:
        raise UserError(
            f"openings must be between 0 and {game.longest - 1} random moves, not {openings}: the longest game of "
            f"{game.title} has {game.longest} moves."
        )


def _safe(game: Game, position: Tensor, chooser: Chooser) -> Tensor:
    """One random move in every game, except where it would end the game."""
    moved = game.step(position, chooser(position))
    return torch.where(moved.over.view(-1, *[1] * (position.ndim - 1)), position, moved.position)


def chooser(module: Algorithm, state: State, **options: Any) -> Chooser:
    """A trained State as a player, greedy and without memory."""

    def choose(position: Tensor) -> Tensor:
        action, _, _ = module.act(state, position, None, explore=False, **options)
        return action.cpu()

    return choose


def principal_variation(tree: Any, first: int | None = None, longest: int = LONGEST_VARIATION) -> list[int]:
    """The principal variation of a search of one position: `first` (the move played), then the most visited actions.

    Gumbel search gives its last two candidates equal visits, so that visits alone do not determine its move.
    """
    actions: list[int] = []
    node = 0
    while len(actions) < longest:
        counts = tree.child_visits(node)[0]
        if int(counts.max()) < 1:
            break
        actions.append(first if first is not None and not actions else int(counts.argmax()))
        if int(counts[actions[-1]]) < 1:
            break
        node = int(tree.children[0, node, actions[-1]])
    return actions
