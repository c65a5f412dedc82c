"""A game in the terminal, and matches on the command line."""

from __future__ import annotations

import io
import json
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foresight.algorithms.search import alphazero
from foresight.cli.games import _names, against, board, view
from foresight.cli.main import main
from foresight.envs.games import make as games
from foresight.envs.games.game import replay
from foresight.envs.games.notation import colors
from foresight.runtime.evaluation import match
from foresight.runtime.run import train
from tests.sabotage import drop, sabotaged_by


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("games") / "ttt"
    train(
        "alphazero", env="tic_tac_toe", out=out, steps=600, num_games=16, simulations=8, play_simulations=60,
        channels=8, blocks=1, learning_starts=100, show=False, evaluation_episodes=2, env_options={"opponent":
        "random"}, checkpoint_every=0.001, keep=9,
    )  # fmt: skip
    return out


def play(
    run: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["play", str(run), *words]) == 0
    return capsys.readouterr().out


def test_a_game_in_the_terminal(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = play(run, ["a1", "z9", "a1", "?", "moves", "undo", "", "quit"], monkeypatch, capsys)
    assert "tic-tac-toe: you move first (X)" in out
    assert "The agent plays" in out and "your expected score: " in out
    assert "'z9' is not legal here. Legal: " in out and "'a1' is not legal here." in out
    assert "move     visits   prior   value" in out and "line     " in out
    assert " 1(X)" in out and out.rstrip().endswith("1 . . .\n  2 . . .\n  3 . . .")  # taken back


def test_a_move_is_drawn_before_the_reply_and_the_last_move_is_marked(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = play(run, ["b2", "x", "help", "quit"], monkeypatch, capsys, "--simulations", "20")
    mine, reply, answer = out.index("\n  2 .(X).\n"), out.index("The agent plays"), out.index("(O)")
    assert mine < reply < answer and out.count("(X)") == 2  # the color in the first line, and the move
    assert "\n\n'x' is not legal here" in out  # not glued to the board
    assert "undo       take back your last move" in out and out.count("   a b c") == 3  # no board where nothing moved


@sabotaged_by("foresight.cli.games._value", lambda f: lambda extras, played: float(extras["value"][0]))
@sabotaged_by("foresight.cli.games._value", lambda f: lambda extras, played: -f(extras, played))
def test_percentages_are_for_the_human_player() -> None:
    """X has two in a row and is to move: it wins everything; whatever the mean of the search is."""
    state = alphazero.build(alphazero.Config(channels=4, blocks=1), games.make("tic_tac_toe"))
    agent = type("Agent", (), {"env": state.game, "module": alphazero, "state": state})()
    position = replay(state.game, [[0, 3, 1, 4]])
    shown = view(agent, position, {"simulations": 100}).splitlines()
    assert shown[0] == "Your expected score: 100%, with c1."
    assert shown[2].split()[0] == "c1" and shown[2].split()[-1] == "100%"


@sabotaged_by(
    "foresight.envs.games.native.Native.picture", lambda f: lambda self, position: f(self, position).replace(".", "-")
)
def test_what_is_marked_on_a_board_is_what_was_placed() -> None:
    """Othello turns stones around, chess takes one where another stood: the placed one and the taker are marked."""
    for name, moves, marked in (("othello", 1, "(x)"), ("chess", 1, "("), ("connect_four", 1, "(X)"), ("go", 1, "(X)")):
        game, history = games.make(name), []
        history = [game.start(1)]
        for _ in range(moves):
            action = game.legal(history[-1])[0].int().argmax()[None]
            history.append(game.step(history[-1], action).position)
        shown = board(game, history)
        assert shown.count("(") - ("(o) to play" in shown) == 1 and marked in shown
        if name == "connect_four":
            assert shown.splitlines()[-2] == "(X). . . . . ."
    assert colors(games.make("chess")) == ("White, capitals", "Black, small letters")


def test_a_move_is_read_from_the_device_of_the_network(capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = types.SimpleNamespace(cpu=lambda: torch.tensor([4]))  # unreadable on its device
    module = types.SimpleNamespace(act=lambda *_, explore: (elsewhere, {}, None))
    agent = types.SimpleNamespace(env=games.make("tic_tac_toe"), module=module, state=None)
    against(agent, False, None, iter(()))  # type: ignore[arg-type]
    assert "The agent plays b2" in capsys.readouterr().out


def test_a_game_keeps_its_own_positions_alone() -> None:
    """A game of OpenSpiel's holds every position that a search makes until others are freed."""
    game, held = games.make("breakthrough", rows=5, columns=3), []
    config = alphazero.Config(channels=4, blocks=1, play_simulations=4)
    agent = type("Agent", (), {"env": game, "module": alphazero, "state": alphazero.build(config, game)})()

    def lines() -> Iterator[str]:
        for _ in range(3):
            held.append(len(game._states))
            yield f"#{game.state(max(game._states)).legal_actions()[0]}"

    against(agent, True, None, lines())
    assert held == [1, 3, 5]


def test_ctrl_c_leaves_a_clean_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", stop)
    assert main(["play", str(run)]) == 130
    assert capsys.readouterr().out.endswith("\n\n\n")  # the board, a blank line, and the line that ^C stands on


def test_a_match_shows_how_far_it_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["match", str(run), "random", "--games", "6", "--simulations", "2"]) == 0
    reported = capsys.readouterr().err.splitlines()
    assert reported[0] == f"{run} vs. random: 6 games"
    assert reported[-1].startswith("6 games") and int(reported[-1].split("moves ")[1]) >= 30


@sabotaged_by("foresight.runtime.evaluation.match.play", drop("watch"))
def test_a_match_counts_its_games_and_moves() -> None:
    game, watched = games.make("tic_tac_toe"), []
    first = lambda p: game.legal(p).int().argmax(-1)  # noqa: E731
    result = match.play(game, first, first, 3, watch=lambda ended, moves: watched.append((ended, moves)))
    assert [sum(x) for x in zip(*watched, strict=True)] == [3, sum(result.moves)]


def test_an_agent_that_learned_the_rules_shows_its_thoughts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mu"
    train(
        "muzero", preset="tic_tac_toe", out=out, steps=32, num_envs=16, collect_steps=1, simulations=4, n_steps=1,
        unroll_steps=1, learning_starts=32, show=False, evaluation_episodes=2, env_options={"opponent": "random"},
    )  # fmt: skip
    capsys.readouterr()
    shown = play(out, ["b2", "?", "quit"], monkeypatch, capsys, "--simulations", "30")
    table = shown[shown.index("move     visits   prior   value") :].splitlines()
    assert sum(int(row.split()[1]) for row in table[1:7]) in range(24, 31)  # six of seven moves are shown
    assert any(row.startswith("line     ") and len(row.split()) > 1 for row in table)


def test_a_search_is_printed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["tree a.json", "tree a.dot", "tree a.png", "tree", "tree nowhere/a.json", "quit"]
    out = play(run, lines, monkeypatch, capsys, "--simulations", "30")
    found = json.loads(Path("a.json").read_text())
    assert found["visits"] in (30, 31) and {"a1", "b2"} & {child["action"] for child in found["children"]}
    assert Path("a.dot").read_text().startswith("digraph search {") and Path("a.png").stat().st_size > 1000
    assert (
        "Search tree written to a.png" in out
        and "ends in .json, .dot, .png" in out
        and "Cannot write to nowhere" in out
    )
    play(run, ["tree a.json", "quit"], monkeypatch, capsys, "--simulations", "0")
    assert json.loads(Path("a.json").read_text())["children"] == []  # the network alone


@sabotaged_by(
    "foresight.envs.games.native.Native.legal", lambda f: lambda self, position: torch.ones_like(f(self, position))
)
def test_a_line_ends_where_it_leaves_the_rules() -> None:
    """Both players at the middle: the second move is not one, whatever a learned model thinks of it."""
    game = games.make("tic_tac_toe")
    assert _names(game, game.start(1), [4, 0, 4, 8]) == ["b2", "a1"]


def test_the_other_side_and_a_whole_game(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [f"{c}{r}" for r in (1, 2, 3) for c in "abc"] * 2
    out = play(run, cells, monkeypatch, capsys, "--side", "second", "--simulations", "0")
    assert "you move second (O)" in out
    assert out.rstrip().splitlines()[-1] in ("You won.", "A draw.", "The agent won.")


def test_a_match_with_elo(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["match", str(run), "random", "--games", "20", "--simulations", "30", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["games"] == 20 == found["won"] + found["drawn"] + found["lost"]
    assert found["score"] > 0.6 and found["elo_low"] < (found["elo"] or 10_000)
    assert main(["match", "random", str(run), "--games", "20", "--simulations", "30"]) == 0
    out = capsys.readouterr().out
    assert "random vs. " in out and "Elo -" in out


def test_the_checkpoints_of_a_run_play_each_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["match", str(run), "--checkpoints", "4", "--games", "6", "--simulations", "4"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [512, 1024] and found["openings"] == 2  # as many as there are
    assert found["elo"][0]["elo"] == 0 and found["elo"][1]["elo_low"] < found["elo"][1]["elo_high"]
    (pair,) = found["pairs"]
    assert pair["players"] == [1, 0] and pair["games"] == 6
    assert main(words) == 0
    assert "2 checkpoints of" in (out := capsys.readouterr().out) and "1,024" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["match", "RUN"], "Name a second player"),
        (["match", "RUN", "random", "--checkpoints", "2"], "Name a second player"),
        (["match", "RUN", "--checkpoints", "1"], "at least two must play"),
        (["match", "random", "minimax:2"], "Name a run first"),
        (["match", "RUN", "minimax:0"], "Unknown opponent"),
        (["match", "RUN", "random", "--games", "0"], "--games must be at least 1"),
        (["match", "RUN", "random", "--seed", "-3"], "--seed must be at least 0, not -3."),
        (["eval", "RUN", "--seed", "-3"], "--seed must be at least 0, not -3."),
        (["match", "RUN", "nowhere"], "is not a run directory"),
        (["play", "ppo/LunarLander-v2"], "Did you mean the bundled 'ppo/LunarLander-v3'?"),
        (["play", "RUN", "--prompt", "x"], "--prompt is for language runs"),
        (["play", "RUN", "--gif", "x.gif"], "--gif is for"),
    ],
)
def test_mistakes_are_reported_with_what_to_do(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run) if word == "RUN" else word for word in words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
