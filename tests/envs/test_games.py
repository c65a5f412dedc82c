"""Games: native rules equal OpenSpiel's on random games; symmetries; names; bad input."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from foresight.envs import games
from foresight.errors import UserError
from tests.sabotage import change, flip_sign, sabotaged_by, swap

NATIVE = [
    ("tic_tac_toe", {}), ("connect_four", {}), ("hex", {"size": 5}), ("hex", {"size": 3}),
    ("go", {"size": 5}), ("go", {"size": 3, "komi": 0.0}),
]  # fmt: skip
SPIEL = ["othello", "breakthrough", "chess", "shogi"]


def random_moves(game: Any, position: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    legal = game.legal(position).numpy()
    noise = rng.random(legal.shape) * legal
    return torch.from_numpy(noise.argmax(1))


def play_both(name: str, options: dict[str, Any], count: int, seed: int) -> None:
    mine, theirs = games.make(name, **options), games.make(name, rules="openspiel", **options)
    assert isinstance(mine, games.Native) and isinstance(theirs, games.Spiel)
    assert (mine.actions, mine.longest) == (theirs.actions, theirs.longest)
    rng = np.random.default_rng(seed)
    here, there = mine.start(count), theirs.start(count)
    ends = 0
    for _ in range(mine.longest + 1):
        legal = mine.legal(here)
        torch.testing.assert_close(legal, theirs.legal(there))
        over = mine.over(here)
        torch.testing.assert_close(over, theirs.over(there))
        torch.testing.assert_close(mine.first_score(here), theirs.first_score(there), equal_nan=True)
        live = ~over
        torch.testing.assert_close(mine.mover(here)[live], theirs.mover(there)[live])
        torch.testing.assert_close(mine.moves(here), theirs.moves(there))
        if over.all():
            break
        action = random_moves(mine, here, rng)
        ours, other = mine.step(here, action), theirs.step(there, action)
        torch.testing.assert_close(ours.reward, other.reward)
        ends += int((ours.over & live).sum())
        here, there = ours.position, other.position
    assert ends == count  # every game was really played to its end


@sabotaged_by("foresight.envs.games.Native.legal", lambda f: lambda self, p: f(self, p).roll(1, 1))
@sabotaged_by("foresight.envs.games.Native.first_score", lambda f: lambda self, p: 1 - f(self, p))
@pytest.mark.parametrize(("name", "options"), NATIVE, ids=lambda x: str(x))
def test_native_rules_are_openspiels(name: str, options: dict[str, Any]) -> None:
    play_both(name, options, count=100, seed=0)
