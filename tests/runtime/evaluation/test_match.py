"""Matches: who gets which point, what a score is worth in Elo, and games between players of one game only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import foresight
from foresight.cli.main import main
from foresight.envs.games import make as games
from foresight.envs.games.game import Chooser
from foresight.errors import UserError
from foresight.planning.games import opponents
from foresight.runtime.config import resolve
from foresight.runtime.evaluation import match, model_error, players
from foresight.runtime.evaluation.evaluate import Evaluation
from foresight.runtime.monitoring.health import no_learning
from foresight.runtime.results.suites import suites
from foresight.runtime.run import train
from tests.sabotage import change, sabotaged_by

TTT = games.make("tic_tac_toe")


def first_free(p: torch.Tensor) -> torch.Tensor:
    return TTT.legal(p).int().argmax(-1)


def along(*cells: int) -> Chooser:
    """Always the first free one of these cells."""
    return lambda p: torch.tensor([next(c for c in cells if row[c]) for row in TTT.legal(p)])


@sabotaged_by("foresight.envs.games.native.Native.mover", lambda f: lambda self, p: 1 - f(self, p))
def test_points_go_to_the_player_who_won() -> None:
    """By hand: b2, c1 and a3 are a line, and a1, b1 go no further than that."""
    diagonal = along(4, 2, 6, 8, 0, 1, 3, 5, 7)
    result = match.play(TTT, diagonal, first_free, 5)
    # Moving first: b2, a1; c1, b1; a3 wins. Moving second: a1, b2; b1, c1; a2, a3 wins.
    assert result.scores == (1.0,) * 5 and result.moves == (5, 5, 5, 6, 6)
    assert match.play(TTT, first_free, diagonal, 4).counts == (0, 0, 4)


@sabotaged_by("foresight.runtime.evaluation.match.elo", lambda f: lambda score: f(1 - score))
def test_elo_of_a_score() -> None:
    assert (
        match.elo(0.5) == 0
        and match.elo(10 / 11) == pytest.approx(400)
        and match.elo(0.75) == pytest.approx(190.85, abs=0.01)
    )
    assert match.elo(1.0) == math.inf and match.elo(0.0) == -math.inf
    even = match.Result((1.0, 0.0) * 50, (5,) * 100)
    assert even.elo()[0] == 0 and even.interval() == pytest.approx((0.404, 0.596), abs=0.002)  # Wilson, n = 100
    drawn = match.Result((0.5,) * 100, (9,) * 100)
    assert drawn.interval()[0] > even.interval()[0]
    won = match.Result((1.0,) * 20, (5,) * 20)
    assert won.document()["elo"] is None and won.document()["elo_low"] > 200


@sabotaged_by(
    "foresight.runtime.evaluation.match.Result.interval", lambda f: lambda self: tuple(x * (1 - 1e-16) for x in f(self))
)
def test_a_clean_sweep_has_no_bound_on_its_side_however_many_games() -> None:
    """Wilson's upper limit is then 1, which rounding met for some numbers of games and missed for others."""
    for n in range(1, 200):
        won, lost = match.Result((1.0,) * n, (5,) * n), match.Result((0.0,) * n, (5,) * n)
        assert won.elo()[::2] == (math.inf, math.inf) and math.isfinite(won.elo()[1])
        assert lost.elo()[:2] == (-math.inf, -math.inf) and math.isfinite(lost.elo()[2])
        assert won.document()["elo_high"] is None and lost.document()["elo_low"] is None


@sabotaged_by(
    "foresight.runtime.evaluation.match.ratings", change("scores", lambda x: x.T), change("games", lambda x: 2 * x)
)
def test_ratings_of_players_who_all_met() -> None:
    """By hand: with the drawn game 10 of 11 points are 400 Elo; and of three the middle one stands between."""
    elo, half = match.ratings(np.array([[0, 0.5], [9.5, 0]]), np.array([[0, 10], [10, 0]]))
    assert elo == pytest.approx([0, 400])
    assert half == pytest.approx([0, 400 / math.log(10) * match.Z / math.sqrt(11 * 10 / 11 * 1 / 11)])
    chance = np.array([[1 / (1 + 10 ** ((b - a) / 400)) for b in (0, 100, 300)] for a in (0, 100, 300)])
    played = 1000.0 * (1 - np.eye(3))
    elo, half = match.ratings(chance * (played + 1) - 0.5, played)
    assert elo == pytest.approx([0, 100, 300], abs=1e-6)
    assert half[0] == 0 and 0 < half[1] < half[2] < 40
    elo, _ = match.ratings(np.array([[0, 0], [10.0, 0]]), np.array([[0, 10], [10, 0]]))
    assert 400 < elo[1] < 600  # not infinite


@sabotaged_by("foresight.runtime.evaluation.match.ratings", change("scores", lambda x: x.T))
def test_a_ladder_ranks_its_players() -> None:
    """A player that takes a free cell at random loses to one that looks two moves ahead."""
    players = [opponents.make(name, TTT, 1) for name in ("random", "minimax:1", "minimax:4")]
    found = match.ladder(TTT, players, 20, 0, 0)
    assert [pair["players"] for pair in found["pairs"]] == [[1, 0], [2, 0], [2, 1]]
    first, second, third = found["elo"]
    assert first == {"elo": 0, "elo_low": 0, "elo_high": 0}
    assert second["elo"] > 0 and third["elo"] > second["elo"] and third["elo_low"] > 0


def test_openings_are_shared_by_both_colors() -> None:
    seen: list[list[int]] = []

    def note(p: torch.Tensor) -> torch.Tensor:
        if int(TTT.moves(p).min()) == 2 and len(p) == 3:
            seen.append(p[:, :9].flatten().tolist())
        return TTT.legal(p).int().argmax(-1)

    match.play(TTT, note, note, 6, openings=2, seed=5)
    assert len(seen) == 2 and seen[0] == seen[1]


def test_openings_are_shared_in_an_odd_number_of_games() -> None:
    seen: dict[int, list[list[int]]] = {}

    def note(p: torch.Tensor) -> torch.Tensor:
        if int(TTT.moves(p).min()) == 2:
            seen.setdefault(len(p), p[:, :9].tolist())
        return TTT.legal(p).int().argmax(-1)

    match.play(TTT, note, note, 7, openings=2, seed=5)
    assert len(seen[4]) == 4 and seen[3] == seen[4][:3]
    alone = match.play(TTT, first_free, first_free, 1).document()
    assert alone["score_first"] is not None and alone["score_second"] is None


def test_a_learned_model_plays_too(tmp_path: Path) -> None:
    """MuZero knows no rules, but its run is one of a game: evaluated, matched and measured as such."""
    run = train(
        "muzero", env="tic_tac_toe", out=tmp_path / "m", steps=640, num_envs=16, simulations=4, batch_size=8,
        learning_starts=320, train_every=80, latent_size=8, hidden=(16,), show=False, evaluation_episodes=4,
        env_options={"opponent": "random"},
    )  # fmt: skip
    assert run.settings.kind == "game" and run.evaluation.metric == "score against random"
    one, game = players.player(str(run.path), None, simulations=2)
    assert match.play(game, one, opponents.make("random", game, 1), 6).counts != (0, 0, 0)
    found = model_error.measure(run.path, depth=3, steps=20)
    assert found["value"][0] == 0 and all(x >= 0 for x in found["value"] + found["policy"])


@sabotaged_by(
    "foresight.training.muzero_targets.num_simulations", lambda f: lambda config, explore, given: f(config, True, given)
)
@pytest.mark.parametrize("name", ["muzero", "gumbel_muzero"])
def test_a_learned_model_plays_with_the_simulations_of_its_result(name: str, tmp_path: Path, capsys: Any) -> None:
    """As AlphaZero does: fewer in training than in play, evaluation and matches."""
    out = tmp_path / "m"
    fields = {"steps": 32, "num_envs": 16, "collect_steps": 1, "simulations": 2, "latent_size": 8, "hidden": (8,)}
    fields |= {"n_steps": 1, "unroll_steps": 1, "learning_starts": 32}
    options = {"env_options": {"opponent": "random"}, "evaluation_episodes": 2, "show": False}
    train(name, env="tic_tac_toe", out=out, play_simulations=7, **fields, **options)
    agent = foresight.load(out)
    for explore, given, count in ((False, None, 7), (True, None, 2), (False, 5, 5)):
        _, extras, _ = agent.module.act(agent.state, agent.env.start(1), None, explore, simulations=given)
        assert int(extras["visits"].sum()) == count
    assert main(["match", str(out), "random", "--games", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["simulations"] == [7, None]
    assert main(["match", str(out), "random", "--games", "2", "--simulations", "3"]) == 0
    assert "(3 simulations per move) vs. random at tic-tac-toe" in " ".join(capsys.readouterr().out.split())


@sabotaged_by(
    "foresight.runtime.monitoring.health.no_learning", lambda f: lambda r, step, updates, a, b: f(r, step, 1, b, a)
)
def test_a_run_that_learned_nothing_yet_is_reported(tmp_path: Path, capsys: Any) -> None:
    """Before the first gradient step, and where the agent is as good as chance; and what the presets take."""
    small = {"num_envs": 4, "simulations": 2, "latent_size": 4, "hidden": (8,), "evaluation_episodes": 4}
    train("muzero", env="CartPole-v1", out=tmp_path / "a", steps=128, learning_starts=128, **small)
    reported = capsys.readouterr().err
    assert "no learning yet after 128 env steps: no gradient step was due: learning_starts is 128 env steps" in reported
    assert "Its presets take 120,000 at CartPole-v1" in reported
    resolved = resolve.resolve("muzero", env="Acrobot-v1")
    chance, same, better = (Evaluation("return", mean, 20.0, 20) for mean in (-498.0, -495.0, -97.0))
    printed = no_learning(resolved, 50_000, 9_000, chance, same)
    assert (
        printed and "return -495 is no better than the -498 of random play. Its presets take 120,000 at Cart" in printed
    )
    assert no_learning(resolved, 100_000, 9_000, chance, better) is None
    assert no_learning(resolve.resolve("ppo", env="CartPole-v1"), 500, 0, chance, same) is None


def test_the_simulations_of_a_result_are_those_of_its_agent() -> None:
    """Of the bundled agent, and of MuZero's preset."""
    results = Path(__file__).resolve().parents[3] / "results"
    shown = json.loads((results / "alphazero-connect_four.json").read_text())
    assert players.simulations_of("connect_four") == shown["play_simulations"]
    for name in ("alphazero", "muzero"):
        shown = json.loads((results / f"{name}-tic_tac_toe.json").read_text())
        assert resolve.resolve(name, preset="tic_tac_toe").config["play_simulations"] == shown["simulations"]
        aims = [one for suite in suites().values() for e in suite.experiments for one in e.figures if one.key == "lost"
                and one.algorithm == name]  # fmt: skip
        assert aims and all(f"{shown['simulations']} simulations per move" in one.task for one in aims)


def test_a_run_of_a_game_is_evaluated_against_its_opponent(tmp_path: Path) -> None:
    run = train(
        "alphazero", env="tic_tac_toe", out=tmp_path / "a", steps=600, num_games=16, simulations=8, play_simulations=30,
        channels=8, blocks=1, learning_starts=100, show=False, evaluation_episodes=20, env_options={"opponent":
        "random"},
    )  # fmt: skip
    assert run.evaluation.metric == "score against random"
    assert run.evaluation.mean > 0.7 and 0.2 < run.baseline.mean < 0.8
    other = train("mcts", env="hex", out=tmp_path / "b", steps=2, simulations=20, show=False,
                  env_options={"size": 3, "opponent": "random"}, evaluation_episodes=2)  # fmt: skip
    _, game = players.player(str(run.path), None)
    with pytest.raises(UserError, match=r"plays Hex \(board_size=3\), but the other player plays tic-tac-toe"):
        players.player(str(other.path), game)
    with pytest.raises(UserError, match="Name a run first"):
        players.player("random", None)
    assert opponents.is_opponent("mcts:10") and not opponents.is_opponent(str(run.path))
