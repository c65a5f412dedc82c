"""AlphaZero: targets by hand, symmetric learning, exact resume, what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from foresight.algorithms.search import alphazero as az
from foresight.envs.games import make as games
from foresight.envs.games.game import replay
from foresight.errors import UserError
from foresight.runtime.checkpoints import checkpoint
from foresight.runtime.run import resume, train
from tests.algorithms.states import refusal
from tests.sabotage import change, returns, sabotaged_by

TTT = games.make("tic_tac_toe")
SMALL = az.Config(
    steps=1_024, num_games=16, simulations=4, play_simulations=8, channels=8, blocks=1, replay_size=600,
    learning_starts=64, batch_size=32, seed=3,
)  # fmt: skip


def rows_of(history: list[int], values: list[float]) -> tuple[list[dict[str, torch.Tensor]], float]:
    position, rows = TTT.start(1), []
    for action, value in zip(history, values, strict=True):
        moved = TTT.step(position, torch.tensor([action]))
        columns = {
            "obs": TTT.planes(position), "legal": TTT.legal(position), "policy": TTT.legal(position).float(),
            "value": torch.tensor([value]), "learned": torch.ones(1), "mover": TTT.mover(position),
            "action": torch.tensor([action]), "reward": moved.reward,
        }  # fmt: skip
        rows.append({name: column[0] for name, column in columns.items()})
        position = moved.position
    return rows, float(TTT.first_score(position))


@sabotaged_by("foresight.ops.returns.lambda_return", change("discount", torch.abs), returns(torch.neg))
@pytest.mark.parametrize(
    ("lam", "expected"),
    [
        (1.0, [1, -1, 1, -1, 1]),  # X, who moved first, won
        (0.0, [-0.2, -0.3, -0.4, -0.5, 1]),  # minus the next player's value; the last is the result
        (0.5, [-0.225, 0.15, -0.0, -0.75, 1]),  # by hand from the back: -(v + G) / 2
    ],
)
def test_targets_are_the_results_of_games_for_the_mover(lam: float, expected: list[float]) -> None:
    state = az.build(dataclasses.replace(SMALL, td_lambda=lam), TTT)
    rows, score = rows_of([0, 3, 1, 4, 2], [0.1, 0.2, 0.3, 0.4, 0.5])
    az.add(state, rows, score)
    assert state.replay.storage is not None and len(state.replay) == 5
    target = state.replay.storage.extras["target"][0, :5]
    if lam == 0.5:
        by_hand, following = [1.0], None
        for value in (0.5, 0.4, 0.3, 0.2):
            following = by_hand[0]
            by_hand.insert(0, -(0.5 * value + 0.5 * following))
        expected = by_hand
    assert target.tolist() == pytest.approx(expected)
    assert state.scores == [1.0] and state.lengths == [5]


@sabotaged_by(
    "foresight.algorithms.search.alphazero.transformed",
    lambda f: lambda state, planes, policy, legal: (f(state, planes, policy, legal)[0], policy, legal),
)
def test_a_rotated_row_is_a_position_of_the_game() -> None:
    """Legal actions are the empty cells, before and after, and the policy goes with its cells."""
    state = az.build(SMALL, TTT)
    position = replay(TTT, [[0, 4, 1], [2], [5, 6]] * 10)
    planes, legal = TTT.planes(position), TTT.legal(position)
    policy = legal * torch.arange(1.0, 10.0)
    new_planes, new_policy, new_legal = az.transformed(state, planes, policy, legal)
    assert not torch.equal(new_planes, planes)
    empty = (new_planes[:, :2].sum(1) == 0).flatten(1)
    assert torch.equal(new_legal, empty) and torch.equal(new_policy > 0, empty)
    torch.testing.assert_close(new_policy.sum(1), policy.sum(1))


RESUMED = dataclasses.replace(SMALL, steps=384, replay_size=200)  # few rows, so that the oldest are overwritten


def run(begun: az.State | None, stop: int) -> az.State:
    return next(state for step, _, state in az.train(RESUMED, TTT, begun) if step >= stop)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A yield after 12 moves of every game."""
    monkeypatch.setattr(az, "_moves_per_log", lambda config: 12)


def weights(state: az.State) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in state.network.parameters()])


@sabotaged_by(
    "foresight.algorithms.search.alphazero.UnfinishedGames.load_state_dict", lambda f: lambda self, state: None
)
@sabotaged_by("foresight.data.replay.Replay.load_state_dict", lambda f: lambda self, state: None)
@pytest.mark.usefixtures("often")
def test_interrupted_self_play_resumes_without_losing_a_game(tmp_path: Path) -> None:
    whole = run(None, 384)
    first = run(None, 192)
    assert first.step == 192 and any(first.running.actions) and first.finished > 10
    checkpoint.save(tmp_path, first, first.step)
    again = az.build(RESUMED, TTT)
    restored = checkpoint.latest(tmp_path)
    assert restored is not None
    checkpoint.restore(restored, again)
    second = run(again, 384)
    assert (second.step, second.finished, len(second.replay)) == (whole.step, whole.finished, len(whole.replay))
    assert torch.equal(weights(second), weights(whole))
    assert whole.replay.storage is not None and second.replay.storage is not None
    assert torch.equal(whole.replay.storage.obs, second.replay.storage.obs)


@sabotaged_by("foresight.envs.games.game.GameId.load_state_dict", lambda f: lambda self, state: None)
def test_a_checkpoint_of_another_game_is_refused(tmp_path: Path) -> None:
    """Tic-tac-toe and Hex 3x3 have networks of one shape: only the name tells them apart."""
    path = checkpoint.save(tmp_path, az.build(SMALL, TTT), 0)
    other = az.build(SMALL, games.make("hex", size=3))
    assert "plays tic_tac_toe(), not hex(board_size=3)" in refusal(path, other)


def test_without_simulations_it_is_the_raw_policy() -> None:
    state = az.build(SMALL, TTT)
    position = replay(TTT, [[], [4], [0, 4, 1]])
    for rule in ("gumbel", "puct"):
        state.config = dataclasses.replace(SMALL, rule=rule)
        action, extras, _ = az.act(state, position, simulations=0)
        logits, _ = state.network(TTT.planes(position))
        prior = torch.softmax(logits.masked_fill(~TTT.legal(position), -torch.inf), -1)
        assert torch.equal(action, prior.argmax(-1)) and int(extras["visits"].sum()) == 0


@pytest.mark.parametrize("rule", ["gumbel", "puct"])
def test_play_is_the_same_every_time_and_exploration_is_not(rule: str) -> None:
    state = az.build(dataclasses.replace(SMALL, rule=rule, simulations=8), TTT)
    position = replay(TTT, [[4]] * 32)
    still = [az.act(state, position)[0] for _ in range(2)]
    assert torch.equal(*still) and len(still[0].unique()) == 1
    assert len(az.act(state, position, explore=True)[0].unique()) > 1


def test_a_position_with_one_legal_move_is_played() -> None:
    state = az.build(SMALL, TTT)
    nearly = replay(TTT, [[0, 1, 2, 4, 3, 5, 7, 6]])
    assert int(az.act(state, nearly)[0]) == 8
    over = replay(TTT, [[0, 3, 1, 4, 2]])
    with pytest.raises(UserError, match="no legal action: its game is over"):
        az.act(state, over)


def test_a_number_that_is_not_finite_stops_the_search() -> None:
    state = az.build(SMALL, TTT)
    with torch.no_grad():
        state.network.value.linear.bias.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite for row 0"):
        az.act(state, TTT.start(1))


def test_a_run_that_becomes_nan_names_the_position_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    config = {field.name: getattr(SMALL, field.name) for field in dataclasses.fields(SMALL)}
    options = {"opponent": "random"}
    one = train("alphazero", env="tic_tac_toe", out=tmp_path / "a", show=False, evaluation_episodes=2,
                env_options=options, **{**config, "steps": 128})  # fmt: skip
    before = weights(one.load().state)

    def poison(step: int, metrics: dict[str, Any], state: az.State) -> None:
        with torch.no_grad():
            state.network.value.linear.bias.fill_(torch.nan)

    with pytest.raises(UserError, match=r"(?s)not finite for row \d.* is this position:.*1 [.XO] [.XO] [.XO]"):
        resume(one.path, 2_048, show=False, callbacks=(poison,))
    assert torch.equal(weights(one.load().state), before)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rule": "minimax"}, "Unknown search rule 'minimax'"),
        ({"simulations": 0}, "simulations must be at least 1"),
        ({"full_share": 0.0}, "full_share must be in"),
        ({"play_simulations": -1}, "must be at least 0"),
        ({"playout_steps": -1}, "playout_steps must be at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        az.build(dataclasses.replace(SMALL, **fields), TTT)


def test_games_of_openspiels_are_learned_too() -> None:
    config = dataclasses.replace(SMALL, steps=24, num_games=2, learning_starts=10_000, simulations=2)
    game = games.make("breakthrough")
    *_, (step, _, state) = az.train(config, game)
    assert step >= 24 and len(game._states) == 2  # what the search made is forgotten
    assert sum(len(actions) for actions in state.running.actions) + sum(state.lengths) == step


def test_cheap_searches_are_played_but_not_trained_on() -> None:
    config = dataclasses.replace(SMALL, steps=1_024, full_share=0.25, cheap_simulations=2)
    *_, (step, _, state) = az.train(config, TTT)
    assert 0.1 * step < len(state.replay) < 0.4 * step


@sabotaged_by("foresight.algorithms.search.alphazero._full_share", lambda f: lambda state: state.config.full_share)
def test_all_positions_of_playouts_are_trained_on() -> None:
    config = dataclasses.replace(SMALL, steps=512, full_share=0.25, playout_steps=512, playout_simulations=2)
    *_, (step, _, state) = az.train(config, TTT)
    assert len(state.replay) > 0.8 * step  # the other positions are of unfinished games


def test_cheap_searches_have_no_noise_at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of a full search has noise; that of a cheap one, which is not trained on, has the network's prior."""
    config = dataclasses.replace(SMALL, rule="puct", full_share=0.5, num_games=1)
    state, found, search = az.build(config, TTT), {}, az.search

    def noted(model: Any, position: torch.Tensor, simulations: int, *rest: Any, **options: Any) -> Any:
        result = search(model, position, simulations, *rest, **options)
        found[simulations] = result.tree.prior[0, 0]
        return result

    monkeypatch.setattr(az, "search", noted)
    for _ in range(20):
        state.running.actions, state.running.rows = [[]], [[]]
        az.self_play(state, TTT.start(1))
    prior = torch.softmax(state.network(TTT.planes(TTT.start(1)))[0][0], -1).detach()
    torch.testing.assert_close(found[config.cheap_simulations], prior)
    assert (found[config.simulations] - prior).abs().max() > 0.01


@sabotaged_by(
    "foresight.algorithms.search.alphazero.playouts",
    lambda f: lambda state, position: (lambda a, w, v: (a, w.roll(1, -1), v))(*f(state, position)),
)
def test_playouts_evaluate_the_first_positions_if_playout_steps_is_set() -> None:
    """X on a1, b1 can win on c1: that is what playouts choose and what is learned, by a network that knows nothing."""
    config = dataclasses.replace(SMALL, playout_steps=10_000, playout_simulations=300)
    state = az.build(config, TTT)
    state.running.actions, state.running.rows = [[0, 3, 1, 4]], [[]]
    az.self_play(state, replay(TTT, state.running.actions))
    assert state.replay.storage is not None and len(state.replay) == 1
    assert int(state.replay.storage.extras["policy"][0, 0].argmax()) == 2
    assert float(state.replay.storage.extras["target"][0, 0]) == 1.0
