"""What people meet with games for two: measured on the way, misnamed, with other rules, with too few of everything."""

from __future__ import annotations

import contextlib
import io
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foresight.algorithms.search import alphazero, mcts
from foresight.cli.games import view
from foresight.cli.main import main
from foresight.envs.games import make as games
from foresight.errors import NotFinite, UserError
from foresight.runtime import run
from foresight.runtime.config import resolve
from foresight.runtime.evaluation import match
from foresight.runtime.kinds import game as kind
from tests.sabotage import sabotaged_by

SMALL: dict[str, Any] = {
    "steps": 300, "num_games": 4, "simulations": 2, "play_simulations": 1, "channels": 4, "blocks": 1,
    "learning_starts": 50, "batch_size": 16, "show": False, "evaluation_episodes": 2,
}  # fmt: skip
BREAKTHROUGH = {"opponent": "random", "rows": 5, "columns": 3}


@sabotaged_by("foresight.runtime.environments.evaluation", lambda f: lambda resolved, env: env)
def test_self_play_continues_after_an_evaluation(tmp_path: Path) -> None:
    """A game of OpenSpiel's holds the positions that are played, and an evaluation forgets its own."""
    try:
        made = run.train(
            "alphazero", env="breakthrough", env_options=BREAKTHROUGH, out=tmp_path / "a", evaluate_every=400,
            **{**SMALL, "steps": 900},
        )  # fmt: skip
    except KeyError as lost:
        raise AssertionError(f"position {lost} is forgotten") from lost
    rows = [json.loads(line) for line in (made.path / "metrics.jsonl").read_text().splitlines()]
    assert sum("evaluation/score against random" in row for row in rows) >= 2
    made = run.train(
        "muzero", env="breakthrough", env_options=BREAKTHROUGH, out=tmp_path / "b", num_envs=2, steps=240,
        learning_starts=80, simulations=2, collect_steps=8, latent_size=8, hidden=(8,), evaluation_episodes=2,
        evaluate_every=80, show=False,
    )  # fmt: skip
    assert made.summary["steps"] >= 240


def test_games_are_found_by_their_names() -> None:
    assert resolve.resolve("muzero", env="othello").kind == "game"
    assert resolve.resolve("gumbel_muzero", env="connect_four").kind == "game"
    assert resolve.resolve("muzero", env="CartPole-v1").kind == "control"
    for name in ("efficientzero", "sampled_muzero"):
        with pytest.raises(UserError, match=f"a two-player game, which {name} does not play: .*alphazero.*muzero.* do"):
            resolve.resolve(name, env="tic_tac_toe")


def test_a_text_task_is_not_taken_for_a_misspelled_environment() -> None:
    for name in ("dreamer", "storm"):
        with pytest.raises(UserError, match=f"addition is a text task, which {name} does not read: .*grpo.* do"):
            resolve.resolve(name, env="addition")
        with pytest.raises(UserError, match="calculator is a text task, which"):
            resolve.resolve(name, task="calculator")


@sabotaged_by("foresight.runtime.config.resolve.fold", lambda f: lambda name: name)
def test_a_preset_is_found_in_any_case() -> None:
    for name in ("Othello", "othello", "OTHELLO"):
        found = resolve.resolve("alphazero", env=name)
        assert (found.preset, found.env, found.config["blocks"]) == ("othello", "othello", 4)
    for name in ("tic-tac-toe", "Tic Tac Toe"):
        found = resolve.resolve("muzero", env=name)
        assert (found.preset, found.env, found.kind) == ("tic_tac_toe", "tic_tac_toe", "game")
    assert resolve.resolve("ppo", env="cartpole-v1").env == "CartPole-v1"
    try:
        assert resolve.resolve("ppo", preset="cartpole-V1").preset == "CartPole-v1"
    except UserError as error:
        raise AssertionError(str(error)) from error


@sabotaged_by("foresight.runtime.monitoring.progress.Progress.header", lambda f: lambda self, text: None)
def test_a_default_preset_is_printed_in_the_first_line(tmp_path: Path, capsys: Any) -> None:
    given = {key: value for key, value in SMALL.items() if key != "show"} | {"steps": 64, "learning_starts": 50}
    run.train("alphazero", env="Tic-Tac-Toe", out=tmp_path / "a", **{**given, "env_options": {"opponent": "random"}})
    first = capsys.readouterr().err.splitlines()[0]
    assert first == (
        "using preset 'tic_tac_toe' because of --env; it sets replay_size=20000, learning_rate=0.003"
    )  # simulations, play_simulations, channels, blocks, batch, steps and opponent were given
    one = resolve.resolve("alphazero", env="hex", env_options={"board_size": 7})
    assert one.env_options == {"opponent": "mcts:1000", "board_size": 7}  # and not the preset's size beside it
    assert one.note.startswith("using preset 'hex5'") and "size=" not in one.note
    assert not resolve.resolve("alphazero", preset="hex5").note  # who names it knows it


def test_what_is_shown_first_is_what_is_played() -> None:
    """Gumbel's last two candidates have equal visits: the first of them is not always the one that is played."""
    state = alphazero.build(alphazero.Config(channels=4, blocks=1), games.make("connect_four"))
    agent = type("Agent", (), {"env": state.game, "module": alphazero, "state": state})()
    position, differs = state.game.start(1), 0
    for _ in range(8):
        action, extras, _ = alphazero.act(state, position, simulations=16)
        played = state.game.move_name(position, int(action))
        table = view(agent, position, {"simulations": 16}).splitlines()
        assert table[2].split()[0] == played and table[-1].split()[1] == played
        assert match.principal_variation(extras["tree"], int(action))[0] == int(action)
        differs += match.principal_variation(extras["tree"])[0] != int(action)
        position = state.game.step(position, action).position
    assert differs


def test_actions_are_read_from_the_device_of_the_network() -> None:
    elsewhere = types.SimpleNamespace(cpu=lambda: torch.tensor([4]))  # unreadable on its device
    module = types.SimpleNamespace(act=lambda *_, explore: (elsewhere, {}, None))
    agent: Any = types.SimpleNamespace(module=module, state=None)
    assert kind.KIND.act(agent, games.make("tic_tac_toe").start(1), False).tolist() == [4]


def test_one_simulation_is_one_legal_move_tried() -> None:
    """OpenSpiel's own search spends its first simulation on the root."""
    for name in ("breakthrough", "tic_tac_toe"):
        game = games.make(name)
        state = mcts.build(mcts.Config(simulations=1), game)
        for explore in (False, True):
            action, extras, _ = mcts.act(state, game.start(2), explore=explore)
            assert game.legal(game.start(2)).gather(1, action[:, None]).all()
            assert extras["visits"].sum(-1).tolist() == [1, 1] and extras["value"].isfinite().all()


def test_the_tree_of_a_search_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run.train("mcts", env="tic_tac_toe", out=tmp_path / "a", steps=2, simulations=4, show=False, evaluation_episodes=2)
    file = tmp_path / "tree.json"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"tree {file}\nquit\n"))
    assert main(["play", str(tmp_path / "a")]) == 0
    assert "Search tree written to" in capsys.readouterr().out
    root = json.loads(file.read_text())
    assert root["visits"] == 4 and sorted(child["action"] for child in root["children"])[0][0] in "abc"


def test_what_cannot_be_done_is_reported_before_any_work(tmp_path: Path, capsys: Any) -> None:
    assert main(["play", "connect_four", "--simulations", "-1"]) == 2
    assert "--simulations must be 0 (the raw policy) or more, not -1." in capsys.readouterr().err
    with pytest.raises(UserError, match="alphago does not support actors"):
        run.train("alphago", preset="hex5", actors=2, out=tmp_path / "a", show=False)
    assert not (tmp_path / "a").exists()


def test_players_with_other_rules_do_not_meet(tmp_path: Path) -> None:
    for name, rules in (("a", "native"), ("b", "openspiel")):
        options = {"opponent": "random", "rules": rules}
        run.train("alphazero", env="tic_tac_toe", env_options=options, out=tmp_path / name, **{**SMALL, "steps": 64})
    assert main(["match", str(tmp_path / "a"), str(tmp_path / "b"), "--games", "2"]) == 2
    from foresight.runtime.evaluation import players

    _, game = players.player(str(tmp_path / "a"), None)
    with pytest.raises(UserError, match="were trained with different rules="):
        players.player(str(tmp_path / "b"), game)


def test_one_recorded_game_can_be_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "one.sgf"
    file.write_text("(;SZ[5];B[cc];W[cb];B[bb];W[];B[])")
    made = run.train(
        "alphago", env="go", env_options={"size": 5, "opponent": "random"}, games=str(file), out=tmp_path / "a",
        steps=4, supervised=4, reinforce=1, regress=1, channels=4, show=False, evaluation_episodes=2,
        play_simulations=2,
    )  # fmt: skip
    assert made.summary["steps"] == 4


def test_recorded_games_that_break_the_rules_leave_no_run(tmp_path: Path) -> None:
    file = tmp_path / "wrong.sgf"
    file.write_text("(;SZ[5];B[cc];W[cc])")
    with pytest.raises(UserError, match=r"wrong\.sgf.*2"):
        run.train(
            "alphago", env="go", env_options={"size": 5, "opponent": "random"}, games=str(file), out=tmp_path / "a",
            channels=4, show=False,
        )  # fmt: skip
    assert not (tmp_path / "a").exists()


def test_values_that_are_not_finite_name_the_run_and_how_to_resume(tmp_path: Path) -> None:
    def poison(step: int, metrics: dict[str, Any], state: Any) -> None:
        with torch.no_grad():
            next(state.network.parameters()).fill_(torch.nan)

    with pytest.raises(NotFinite, match=r"(?s)not finite for row.*there is no checkpoint yet: lower learning_rate in"):
        run.train(
            "alphazero", env="tic_tac_toe", env_options={"opponent": "random"}, out=tmp_path / "a", callbacks=(poison,),
            **{**SMALL, "steps": 2000},
        )  # fmt: skip


TTT: dict[str, Any] = {"env": "tic_tac_toe", "env_options": {"opponent": "random"}}
NONSENSE = [
    ("alphazero", {"value_scale": float("nan")}, "value_scale must be a number, not nan"),
    ("alphazero", {"value_scale": -1.0}, "value_scale must be a number of at least 0, not -1.0"),
    ("alphazero", {"considered": 0}, "considered must be at least 1, not 0"),
    ("alphazero", {"rule": "puct", "dirichlet_fraction": 1.5}, "dirichlet_fraction must be between 0 and 1, not 1.5"),
    ("alphazero", {"rule": "puct", "dirichlet_alpha": 0.0}, "dirichlet_alpha must be a number above 0, not 0.0"),
    ("alphazero", {"rule": "puct", "temperature_moves": -3}, "temperature_moves must be at least 0, not -3"),
    ("alphazero", {"learning_starts": 5000}, "learning_starts is 5,000 positions, but the run ends after 300: no"),
    ("alphazero", {"simulations": 2.5}, "Field 'simulations' of alphazero must be int, not 2.5"),
    ("alphazero", {"simulations": float("inf")}, "Field 'simulations' of alphazero must be int, not inf"),
    ("alphazero", {"config": alphazero.Config(simulations=2.5)}, "must be int, not 2.5"),  # type: ignore[arg-type]
    ("alphazero", {"simulations": 10**10}, "simulations is 10,000,000,000: 4 trees of that size would take"),
    ("alphazero", {"play_simulations": 10**12}, "simulations is 1,000,000,000,000 in play: a tree"),
    ("mcts", {"simulations": 10**12}, "simulations is 1,000,000,000,000: a tree of that size would take"),
    ("muzero", {"simulations": 10**10}, "simulations is 10,000,000,000: 64 trees of that size would take"),
    ("muzero", {"dirichlet_fraction": 2.0}, "dirichlet_fraction must be between"),
    ("muzero", {"temperatures": (1.0, -1.0)}, "temperatures must be at least 0, not 1.0 -1.0"),
    ("muzero", {"temperatures": (float("nan"),)}, "temperatures must be a number, not nan"),
    ("muzero", {"temperatures": (float("inf"),)}, "temperatures must be one or more finite numbers of at least 0, not"),
    ("mcts", {"c": -1.0}, "c must be a number of at least 0, not -1.0"),
    ("mcts", {"c": float("inf")}, "c must be a number of at least 0, not inf"),
    ("gumbel_muzero", {"value_scale": float("inf")}, "value_scale must be a number of at least 0, not inf"),
    ("gumbel_muzero", {"considered": 0}, "considered must be at least 1, not 0"),
    ("gumbel_muzero", {"max_visit_init": -1.0}, "max_visit_init must be a number of at least 0, not -1.0"),
    ("gumbel_muzero", {"max_visit_init": float("inf")}, "max_visit_init must be a number of at least 0, not inf"),
    ("alphago", {"channels": 0}, "channels must be at least 1, not 0"),
    ("alphago", {"blocks": -1}, "blocks must be at least 0, not -1"),
    ("alphago", {"softmax_temperature": 0.0}, "softmax_temperature must be above 0, not 0.0"),
    ("alphazero", {"env_options": {"opponent": "mcts:lots"}}, "Unknown opponent 'mcts:lots'"),
    ("alphazero", {"env_options": {"opponent": "minimax:²"}}, "Unknown opponent 'minimax:²'"),
    ("alphazero", {"env_options": {"opponent": 7}}, "opponent must be a name"),
    ("alphazero", {"env_options": {"opponent": "mcts:999999999999"}}, "(mcts:999999999999): a tree of that size"),
    ("muzero", {"env_options": {"opponent": "solver"}}, "Connect Four"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "wrong", "words"), NONSENSE, ids=lambda x: str(x)[:40])
def test_settings_that_make_no_sense_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: dict[str, Any], words: str
) -> None:
    """Nothing is measured, trained or left behind."""

    def worked(*_: Any, **__: Any) -> None:
        raise AssertionError("it began to work")

    monkeypatch.setattr("foresight.runtime.evaluation.evaluate.baseline", worked)
    small = (
        {key: value for key, value in SMALL.items() if hasattr(alphazero.Config, key)} if name == "alphazero" else {}
    )
    given = {} if "config" in wrong else small
    with pytest.raises(UserError) as error:
        run.train(name, preset=None, out=tmp_path / "a", show=False, **{**TTT, **given, **wrong})
    assert words in str(error.value)
    assert not (tmp_path / "a").exists()


@sabotaged_by("foresight.runtime.evaluation.match.check_openings", lambda f: lambda game, openings: None)
def test_openings_that_no_game_has_are_refused() -> None:
    game = games.make("tic_tac_toe")
    for openings in (-1, 9, 100):
        with raises_user_error(f"openings must be between 0 and 8 random moves, not {openings}"):
            match.play(game, lambda p: game.legal(p).int().argmax(-1), lambda p: game.legal(p).int().argmax(-1), 2,
                       openings)  # fmt: skip
    with pytest.raises(UserError, match=r"whole number, not 2\.5"):
        alphazero.act(alphazero.build(alphazero.Config(channels=4, blocks=1), game), game.start(1), simulations=2.5)  # type: ignore[arg-type]


@contextlib.contextmanager
def raises_user_error(words: str) -> Iterator[None]:
    """As pytest.raises, but a mistake that passes is an AssertionError, which a sabotage twin counts."""
    try:
        yield
    except UserError as error:
        assert words in str(error)
    else:
        raise AssertionError("it passed")
