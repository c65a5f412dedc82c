"""MCTS with random playouts converges to the value of a solved game."""

from __future__ import annotations

from typing import Any

import pytest

from foresight.algorithms.search import mcts
from foresight.envs.games import make as games
from tests.fixed_points.solved_game import Solved, some
from tests.sabotage import flip_sign, sabotaged_by


@pytest.mark.parametrize("fields", [{"simulations": 10_000}, {"simulations": 10_000, "c": 1.0}], ids=["default", "c=1"])
@sabotaged_by("foresight.planning.search.playouts.uct", flip_sign)
def test_mcts_finds_the_value_of_the_game(fields: dict[str, Any]) -> None:
    game = games.make("tic_tac_toe")
    best_play = Solved(game)
    state, rows = mcts.build(mcts.Config(**fields), game), some(best_play, 40)
    action, extras, _ = mcts.act(state, best_play.positions[rows])
    assert best_play.best[rows].gather(1, action.unsqueeze(1)).all()
    assert float((extras["value"] - best_play.value[rows]).abs().mean()) < 0.05  # UCT never stops trying the others
