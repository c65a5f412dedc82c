"""AlphaZero learns tic-tac-toe in seconds: its bare policy, without any search, against random play."""

from __future__ import annotations

import pytest

from foresight.algorithms.search import alphazero
from foresight.envs.games import make as games
from foresight.planning.games import opponents
from foresight.runtime.evaluation import match
from tests.sabotage import sabotaged_by


@pytest.mark.learning
@sabotaged_by("foresight.algorithms.search.alphazero.update", lambda f: lambda state, batch: {})
def test_alphazero_learns_tic_tac_toe() -> None:
    game = games.make("tic_tac_toe")
    config = alphazero.Config(
        steps=5_000, num_games=64, simulations=12, channels=16, blocks=1, batch_size=128, learning_starts=500,
        reuse=4.0, learning_rate=5e-3, replay_size=4_000,
    )  # fmt: skip
    *_, (_, _, state) = alphazero.train(config, game)
    random = opponents.make("random", game, 0)
    baseline = match.play(game, opponents.make("random", game, 1), random, 200).score
    learned = match.play(game, match.chooser(alphazero, state, simulations=0), random, 200).score
    assert baseline < 0.6
    assert learned > 0.8
