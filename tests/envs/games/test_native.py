"""Games: native rules equal OpenSpiel's on random games; symmetries; names; bad input."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from foresight.envs.games import make as games
from foresight.envs.games.game import Symmetry, replay
from foresight.envs.games.native import Native
from foresight.envs.games.notation import named
from foresight.envs.games.openspiel import Spiel
from foresight.errors import UserError
from tests.sabotage import sabotaged_by

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
    assert isinstance(mine, Native) and isinstance(theirs, Spiel)
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


@sabotaged_by("foresight.envs.games.native.Native.legal", lambda f: lambda self, p: f(self, p).roll(1, 1))
@sabotaged_by("foresight.envs.games.native.Native.first_score", lambda f: lambda self, p: 1 - f(self, p))
@pytest.mark.parametrize(("name", "options"), NATIVE, ids=lambda x: str(x))
def test_native_rules_are_openspiels(name: str, options: dict[str, Any]) -> None:
    play_both(name, options, count=100, seed=0)


def turned_game(game: Any, way: Symmetry, count: int, moves: int, seed: int) -> None:
    """The same games, once as they are and once with every move turned: positions must be turned too."""
    rng = np.random.default_rng(seed)
    back = way.actions.argsort()
    here, there = game.start(count), game.start(count)
    for _ in range(moves):
        legal = game.legal(here)
        torch.testing.assert_close(game.legal(there), legal[:, way.actions])
        planes = game.planes(here).flatten(2)[:, :, way.cells].view(game.planes(here).shape)
        torch.testing.assert_close(game.planes(there), planes)
        torch.testing.assert_close(game.over(there), game.over(here))
        action = random_moves(game, here, rng)
        here, there = game.step(here, action).position, game.step(there, back[action]).position
    torch.testing.assert_close(game.first_score(there), game.first_score(here), equal_nan=True)


SYMMETRIC = [
    ("tic_tac_toe", {}, 8), ("connect_four", {}, 2), ("hex", {"size": 5}, 2), ("go", {"size": 5}, 8),
    ("othello", {}, 4), ("breakthrough", {}, 2), ("hex", {"size": 5, "rules": "openspiel"}, 1),
    ("go", {"size": 5, "rules": "openspiel"}, 8),
]  # fmt: skip


@sabotaged_by(
    "foresight.envs.games.symmetries.board_symmetry",
    lambda f: lambda h, w, a, k: f(h, w, a, k)._replace(actions=f(h, w, a, k ^ 1)[1]),
)
@pytest.mark.parametrize(("name", "options", "ways"), SYMMETRIC[:4], ids=lambda x: str(x))
def test_a_rotated_game_is_the_same_game(name: str, options: dict[str, Any], ways: int) -> None:
    game = games.make(name, **options)
    assert len(game.symmetries) == ways
    for way in game.symmetries:
        turned_game(game, way, count=8, moves=12, seed=1)


@pytest.mark.parametrize(("name", "options", "ways"), SYMMETRIC[4:], ids=lambda x: str(x))
def test_a_rotated_game_of_openspiel_is_the_same_game(name: str, options: dict[str, Any], ways: int) -> None:
    game = games.make(name, **options)
    assert len(game.symmetries) == ways
    for way in game.symmetries:
        turned_game(game, way, count=2, moves=20, seed=1)


@pytest.mark.parametrize("name", SPIEL)
def test_openspiels_games_are_played_in_batches(name: str) -> None:
    game = games.make(name)
    rng = np.random.default_rng(0)
    position = game.start(3)
    for t in range(12):
        assert game.planes(position).shape == (3, *game.shape)
        assert torch.equal(game.mover(position), torch.full((3,), t % 2))
        assert game.planes(position)[0, -1].mean() == 1 - t % 2
        action = random_moves(game, position, rng)
        name_ = game.move_name(position[:1], int(action[0]))
        assert named(game, position[:1], name_) == int(action[0])
        moved = game.step(position, action)
        assert not moved.over.any() and (moved.reward == 0).all()
        position = moved.position
        game.free_except(position)
    assert len(game._states) == 3 and game.picture(position[:1])


@sabotaged_by("foresight.envs.games.game.replay", lambda f: lambda game, h: f(game, [x[:-1] for x in h]))
def test_replay_gives_the_position_of_a_history() -> None:
    game = games.make("connect_four")
    position = replay(game, [[3, 3, 4], []])
    assert game.picture(position[:1]).splitlines()[-3:] == [". . . O . . .", ". . . X X . .", "1 2 3 4 5 6 7"]
    assert torch.equal(position[1:], game.start(1))


def test_nothing_happens_after_the_end_or_by_an_illegal_action() -> None:
    game = games.make("tic_tac_toe")
    won = replay(game, [[0, 3, 1, 4, 2]])
    assert bool(game.over(won)) and not game.legal(won).any() and float(game.first_score(won)) == 1.0
    for position, action in ((won, 8), (replay(game, [[4]]), 4)):
        moved = game.step(position, torch.tensor([action]))
        assert torch.equal(moved.position, position) and float(moved.reward) == 0.0


def test_an_illegal_move_lists_the_legal_ones() -> None:
    game = games.make("connect_four")
    full = replay(game, [[0] * 6])
    with pytest.raises(UserError, match=re.escape("'1' is not legal here. Legal: 2, 3, 4, 5, 6, 7.")):
        named(game, full, "1")
    with pytest.raises(UserError, match="'#²' is not legal here"):
        named(game, full, "#²")
    go = games.make("go", size=5)
    assert named(go, go.start(1), " C3 ") == 12 and named(go, go.start(1), "PASS") == 25
    with pytest.raises(UserError, match="Game 1, move 2: action 12 is not legal in Go"):
        replay(go, [[12, 12]])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("kuhn_poker", {}, "two-player zero-sum games with perfect information"),
        ("backgammon", {}, "is not a game of no chance"),
        ("chess", {"chess960": True}, "is not a game of no chance"),
        ("go", {"handicap": 2, "rules": "openspiel", "size": 9}, "OpenSpiel cannot make go"),
        ("connect_fuor", {}, "Did you mean 'connect_four'"),
        ("go", {"size": 1}, "size must be a whole number from 2 to 19"),
        ("chess", {"size": 9}, "chess has no option 'size'"),
        ("othello", {"rules": "native"}, "There are no native rules for othello"),
        ("othello", {"sugar": 2}, "OpenSpiel cannot make othello"),
    ],
)
def test_games_that_do_not_exist_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        games.make(name, **options)


@sabotaged_by(
    "foresight.envs.games.make.make",
    lambda f: lambda name, *words, board_size=None, **options: f(name, *words, **options),
)
def test_a_board_has_the_size_that_openspiel_calls_board_size() -> None:
    for name, actions in (("hex", 16), ("go", 17)):
        mine, same = games.make(name, board_size=4), games.make(name, size=4)
        assert mine.actions == actions and mine.shape == same.shape and mine.options == same.options
    assert games.make("hex", board_size=4, rules="openspiel").actions == 16


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("hex", {"size": 5, "board_size": 7}, "size is 5 and board_size 7: give one of them"),
        ("go", {"board_size": 20}, "size must be a whole number from 2 to 19, not 20"),
        ("go", {"komi": float("nan")}, "komi must be a finite number of points, not nan"),
        ("tic_tac_toe", {"komi": 3.0}, "OpenSpiel cannot make tic_tac_toe with {'komi': 3.0}"),
        ("connect_four", {"board_size": 9, "rules": "native"}, "have no option board_size; they take none"),
    ],
)
def test_options_that_a_game_would_ignore_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        games.make(name, **options)
