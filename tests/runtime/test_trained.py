"""The bundled agent: small, complete, and better than random."""

from __future__ import annotations

from foresight.planning.games import opponents
from foresight.runtime import catalog, run
from foresight.runtime.evaluation import match, players

FOLDER = catalog.ROOT / "trained" / "connect_four"


def test_the_connect_four_agent_is_small_and_plays() -> None:
    assert run.find("connect_four") == FOLDER
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 2_000_000
    player, game = players.player("connect_four", None, simulations=32)
    result = match.play(game, player, opponents.make("random", game, 3), 40, seed=3)
    assert result.score > 0.9
