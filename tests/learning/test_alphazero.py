"""AlphaZero learns tic-tac-toe in seconds: its bare policy, without any search, against random play."""

from __future__ import annotations

import pytest

from foresight.algorithms.search import alphazero
from foresight.envs import games
from foresight.planning import opponents
from foresight.runtime import match
from tests.sabotage import sabotaged_by


@pytest.mark.learning
@sabotaged_by("foresight.algorithms.search.alphazero.update", lambda f: lambda state, batch: {})
def test_alphazero_learns_tic_tac_toe() -> None:
    game = games.make("tic_tac_toe")
    config = alphazero.Config(
        steps=4_000, num_games=64, simulations=12, channels=16, blocks=1, batch=128, learn_from=500, reuse=4.0,
        learning_rate=5e-3, buffer=4_000,
    )  # fmt: skip
    *_, (_, _, state) = alphazero.train(config, game)
    random = opponents.make("random", game, 0)
    baseline = match.play(game, opponents.make("random", game, 1), random, 200).score
    learnt = match.play(game, match.chooser(alphazero, state, simulations=0), random, 200).score
    assert baseline < 0.6
    assert learnt > 0.8
