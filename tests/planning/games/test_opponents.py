"""Playing without learning: playouts, tree search, alpha-beta, the solver, exhaustive play; the sign of a backup."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from foresight.envs.games import boards
from foresight.envs.games import make as games
from foresight.envs.games.game import replay
from foresight.errors import UserError
from foresight.planning.games import connect_four, exhaustive, minimax, opponents
from foresight.planning.search import playouts
from foresight.planning.search.mcts import search
from foresight.planning.search.rules import Rules
from foresight.planning.search.selection import PUCT
from tests.sabotage import sabotaged_by

TTT, C4 = games.make("tic_tac_toe"), games.make("connect_four")


def negamax(game: Any, position: torch.Tensor) -> float:
    """The definition: what the player to move gets if both play perfectly."""
    values = []
    for action in game.legal(position)[0].nonzero().flatten():
        moved = game.step(position, action.view(1))
        values.append(float(moved.reward) if bool(moved.over) else -negamax(game, moved.position))
    return max(values)


@functools.cache
def scattered(game: Any, plies: int, count: int, seed: int) -> torch.Tensor:
    """Positions after `plies` random moves whose games are not over."""
    chooser, found = opponents.make("random", game, seed), []
    while sum(map(len, found)) < count:
        position = game.start(500)
        for _ in range(plies):
            position = game.step(position, chooser(position)).position
            position = position[~game.over(position)]
        found.append(position)
    return torch.cat(found)[:count]


@sabotaged_by("foresight.planning.games.connect_four.Solver.moves", lambda f: lambda s, p: -f(s, p))
def test_the_solver_is_brute_force_on_endgames() -> None:
    positions = torch.cat([scattered(C4, plies, 8, plies) for plies in (36, 38, 39)])
    values = connect_four.solver().moves(positions)
    assert torch.equal(values == -2, ~C4.legal(positions))
    expected = [negamax(C4, position[None]) for position in positions]
    assert len(set(expected)) == 3  # wins, draws and losses are among them
    assert values.amax(-1).tolist() == expected


def test_the_solver_knows_what_is_known() -> None:
    """A forced block is the only move that does not lose at once, and an open three wins."""
    block = replay(C4, [[0, 2, 5, 4, 1, 4, 3, 6, 0, 1, 0]])  # X has a1, a2 and a3: O must play a4
    values = connect_four.solver().moves(block)[0]
    assert int(values.argmax()) == 0 and (values == values.max()).sum() == 1
    open_three = replay(C4, [[1, 1, 2, 2, 3]])  # a1 and e1 both win: O cannot stop both
    assert connect_four.solver().moves(open_three).max() == -1
    bad, lost = connect_four.mistakes(block, torch.tensor([3]))
    assert bool(bad) and int(lost) >= 1


@sabotaged_by("foresight.envs.games.boards.draw", lambda f: lambda random, count: 0)
def test_random_play_is_uniform() -> None:
    chooser = opponents.make("random", TTT, 0)
    counts = torch.bincount(torch.cat([chooser(TTT.start(100)) for _ in range(20)]), minlength=9) / 2000
    assert (counts - 1 / 9).abs().max() < 0.03


def known_playouts(game: Any, position: torch.Tensor) -> float:
    """The exact mean of uniformly random games, for the player to move."""
    values = []
    for action in game.legal(position)[0].nonzero().flatten():
        moved = game.step(position, action.view(1))
        values.append(float(moved.reward) if bool(moved.over) else -known_playouts(game, moved.position))
    return float(np.mean(values))


@sabotaged_by("foresight.planning.search.playouts.playouts", lambda f: lambda *a: -f(*a))
@pytest.mark.parametrize("rules", ["native", "openspiel"])
def test_playouts_have_the_mean_of_random_games(rules: str) -> None:
    history = [[0, 1, 4, 8], [4, 0, 8, 2]]
    exact = [known_playouts(TTT, replay(TTT, [h])) for h in history]
    assert abs(exact[0] - exact[1]) > 0.3
    game = games.make("tic_tac_toe", rules=rules)
    found = playouts.playouts(game, replay(game, history), 1500, playouts.stream(0))
    assert found.tolist() == pytest.approx(exact, abs=0.08)


@pytest.mark.parametrize("name", ["tic_tac_toe", "connect_four", "hex", "go"])
def test_tree_search_takes_a_win_and_stops_a_loss(name: str) -> None:
    histories = {
        "tic_tac_toe": ([0, 3, 1, 4], 2, [0, 4, 1], 2), "connect_four": ([0, 6, 0, 6, 0, 5], 0, [0, 6, 0, 6, 0], 0),
        "hex": ([0, 8, 3], None, [0, 8, 3], None), "go": ([0], None, [0], None),
    }[name]  # fmt: skip
    game = games.make(name, **({"size": 3} if name in ("hex", "go") else {}))
    visits, values = playouts.uct(game, replay(game, [histories[0]]), 400, playouts.stream(0))
    assert int(visits.sum()) == 400 and not (visits[~game.legal(replay(game, [histories[0]]))] > 0).any()
    if histories[1] is not None:
        assert int(visits.argmax()) == histories[1] and float(values[0, histories[1]]) == 1.0
        assert (
            int(playouts.uct(game, replay(game, [histories[2]]), 400, playouts.stream(0))[0].argmax()) == (histories[3])
        )


@pytest.mark.parametrize("rules", ["native", "openspiel"])
def test_tree_search_plays_what_is_proven(rules: str) -> None:
    """A win in one is taken however few visits it needed, and what loses by force is not, however many it got."""
    game = games.make("tic_tac_toe", rules=rules)
    wins = replay(game, [[6, 0, 7, 1]]).repeat(20, *[1] * (game.start(1).ndim - 1))
    assert (opponents.make("mcts:300", game, 0)(wins) == 8).all()
    visits, values = playouts.uct(game, wins, 300, playouts.stream(1))
    assert (visits.argmax(-1) == 8).all() and (values[:, 8] == 1).all() and (visits.sum(-1) == 300).all()
    held = replay(game, [[0, 3, 1]]).repeat(20, *[1] * (game.start(1).ndim - 1))
    assert (opponents.make("mcts:300", game, 2)(held) == 2).all()


def test_values_of_games_for_more_than_a_point_are_scaled() -> None:
    game = games.make("dots_and_boxes", utility_margin=True)
    assert game.limit > 1
    position = replay(game, [[0, 1, 2]])
    assert playouts.playouts(game, position, 50, playouts.stream(0)).abs().max() <= 1
    assert playouts.uct(game, position, 50, playouts.stream(0))[1].abs().max() <= 1


@sabotaged_by("foresight.planning.games.minimax.minimax", lambda f: lambda game, p, *_: game.legal(p).int().argmax(-1))
def test_alpha_beta_to_the_end_is_perfect() -> None:
    positions = scattered(TTT, 4, 24, 0)
    actions = minimax.minimax(TTT, positions, 9, playouts.stream(0))
    moved = TTT.step(positions, actions)
    for b in range(len(positions)):
        reached = float(moved.reward[b]) if moved.over[b] else -negamax(TTT, moved.position[b : b + 1])
        assert reached == negamax(TTT, positions[b : b + 1])


def unpruned(position: torch.Tensor, depth: int) -> float:
    """The value of a position of Connect Four to `depth`, every line looked at."""
    if depth == 0:
        return float(minimax._evaluate(*C4.rules, position[0].numpy()))
    values = []
    for action in C4.legal(position)[0].nonzero().flatten():
        moved = C4.step(position, action.view(1))
        values.append(1e6 * float(moved.reward) if bool(moved.over) else -unpruned(moved.position, depth - 1))
    return max(values)


@sabotaged_by("foresight.planning.games.minimax.minimax", lambda f: lambda game, p, depth, r: f(game, p, depth - 1, r))
def test_pruning_changes_nothing() -> None:
    for position in scattered(C4, 8, 8, 2).split(1):
        legal = C4.legal(position)[0].nonzero().flatten().tolist()
        moved = [C4.step(position, torch.tensor([action])) for action in legal]
        values = [1e6 * float(m.reward) if bool(m.over) else -unpruned(m.position, 2) for m in moved]
        best = [action for action, value in zip(legal, values, strict=True) if value > max(values) - 10]
        seen = {int(minimax.minimax(C4, position, 3, playouts.stream(seed))) for seed in range(5)}
        assert seen <= set(best)


def test_alpha_beta_agrees_with_openspiels_rules() -> None:
    spiel = games.make("tic_tac_toe", rules="openspiel")
    history = [[0, 3, 1, 4], [0, 4, 1]]
    assert minimax.minimax(spiel, replay(spiel, history), 4, playouts.stream(0)).tolist() == [2, 2]


@sabotaged_by("foresight.planning.games.opponents.make", lambda f: lambda name, game, seed=0: f("random", game, seed))
def test_exhaustive_play_proves_perfection_and_finds_mistakes() -> None:
    perfect = opponents.make("minimax:9", TTT)
    for first in (True, False):
        found = exhaustive.play_all_replies(TTT, perfect, first)
        assert found.lost == 0 and found.line is None and found.won > 0 and found.positions > 20
    careless = exhaustive.play_all_replies(TTT, lambda p: TTT.legal(p).int().argmax(-1), first=False)
    assert careless.lost > 0 and careless.line is not None
    assert float(TTT.first_score(replay(TTT, [careless.line]))) == 1.0


@sabotaged_by("foresight.planning.search.rules.Rules.step", lambda f: lambda s, p, a: _with(f(s, p, a), 2, torch.abs))
@sabotaged_by("foresight.planning.search.rules.Rules.step", lambda f: lambda s, p, a: _with(f(s, p, a), 1, torch.neg))
def test_values_change_their_sign_with_the_mover() -> None:
    """By hand: X has a1 and b1 and takes c1; one move before, O cannot stop both of X's lines and has lost."""
    level = Rules(TTT, lambda p: (torch.zeros(len(p), 9), torch.zeros(len(p))))
    rule = PUCT(1.25, normalize="none", first_play="zero")
    won = search(level, replay(TTT, [[0, 3, 1, 4]]), 60, rule)
    assert int(won.action) == 2 and float(won.value) > 0.5
    # X on a1, c3, c1 and O on b2, a3... X threatens b1 and c2: whatever O does, X wins.
    lost = search(level, replay(TTT, [[0, 4, 8, 6, 2]]), 300, rule)
    assert float(lost.value) < -0.2
    _, reward, discount, logits, _ = level.step(replay(TTT, [[0, 3, 1, 4], [0]]), torch.tensor([2, 4]))
    assert reward.tolist() == [1, 0] and discount.tolist() == [0, -1]
    assert (logits[0] == -torch.inf).all() and (logits[1] == -torch.inf).sum() == 2


def _with(answer: tuple[Any, ...], index: int, change: Any) -> tuple[Any, ...]:
    return tuple(change(x) if i == index else x for i, x in enumerate(answer))


@pytest.mark.parametrize("name", ["minimax", "minimax:0", "mcts:many", "sover", "random:3"])
def test_opponents_that_do_not_exist_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"Unknown opponent .*Use random, minimax:DEPTH"):
        opponents.make(name, TTT)


@pytest.mark.parametrize("game", [TTT, games.make("tic_tac_toe", rules="openspiel")])
def test_a_depth_beyond_the_longest_game_is_the_whole_game(game: Any) -> None:
    won = replay(game, [[0, 3, 1, 4]])
    assert opponents.make("minimax:1000000000000", game)(won).tolist() == [2]


def test_numbers_that_no_search_can_count_are_refused() -> None:
    spiel = games.make("tic_tac_toe", rules="openspiel")
    with pytest.raises(UserError, match=r"simulations is 3,000,000,000 \(mcts:3000000000\), but must be below"):
        opponents.make("mcts:3000000000", spiel)
    with pytest.raises(UserError, match="seed must be at least 0, not -1"):
        opponents.make("random", TTT, -1)


def test_the_solver_knows_one_game() -> None:
    with pytest.raises(UserError, match="The solver plays only Connect Four, not tic-tac-toe"):
        opponents.make("solver", TTT)


def test_the_fields_of_a_row_are_at_their_indices() -> None:
    row = replay(C4, [[3]])[0, 42:]
    assert row[boards.TURN] == 1 and row[boards.MOVES] == 1 and row[boards.RESULT] == boards.PLAYING
