"""AlphaGo: the stages and what goes from one to the next."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from foresight.algorithms.search import alphago as ag
from foresight.envs.games import make as games
from foresight.envs.games.game import replay
from foresight.errors import LostError, UserError
from foresight.runtime.checkpoints import checkpoint
from tests.sabotage import sabotaged_by

TTT = games.make("tic_tac_toe")
SMALL = ag.Config(
    steps=24, supervised=8, reinforce=8, regress=8, expert_games=20, expert_simulations=20, channels=8, blocks=1,
    batch_size=32, rl_games=16, pool_every=4, value_games=40, play_simulations=20,
)  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> ag.State:
    *_, (step, _, state) = ag.train(SMALL, TTT)
    assert step == 24
    return state


def test_the_pipeline_runs_through_its_stages(trained: ag.State) -> None:
    assert trained.expert is not None and len(trained.expert) == 20
    assert len(trained.pool) == 3  # σ, and ρ after 4 and 8 steps
    assert not torch.equal(trained.pool[0]["head.linear.weight"], trained.pool[-1]["head.linear.weight"])
    assert torch.equal(trained.pool[0]["head.linear.weight"], trained.sl.state_dict()["head.linear.weight"])


def test_expert_games_are_games(trained: ag.State) -> None:
    assert trained.expert is not None
    histories = [[a for a in row.tolist() if a >= 0] for row in trained.expert]
    assert TTT.over(replay(TTT, histories)).all()
    assert len({tuple(h) for h in histories}) > 10


@sabotaged_by(
    "foresight.algorithms.search.alphago.value_positions",
    lambda f: lambda state, games, per_game: f(state, games, 0),
)
def test_a_game_gives_one_position_for_the_value(trained: ag.State) -> None:
    planes, outcome, owner = ag.value_positions(trained, 60, 1)
    assert len(owner.unique()) == len(owner) and 40 < len(owner) <= 60
    assert set(outcome.tolist()) <= {-1.0, 0.0, 1.0} and len(planes) == len(outcome)
    stones = planes[:, :2].sum((1, 2, 3))
    assert (stones >= 1).all() and stones.max() > stones.min()
    assert len(ag.value_positions(trained, 60, 0)[2]) > 100


def test_a_game_that_ends_before_its_random_move_is_played_again(
    trained: ag.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(len(ag.value_positions(trained, 1, 1)[0]) >= 1 for _ in range(30))
    monkeypatch.setattr(ag, "_typical", lambda state: 10**9)  # a random time that no game lasts until
    with pytest.raises(LostError, match="All 1,024 games ended before their random move"):
        ag.value_positions(trained, 4, 1)


def imitation(state: ag.State) -> float:
    for _ in range(120):
        metrics = ag.update(state)
        state.step += 1
        if "accuracy" in metrics:
            last = metrics["accuracy"]
    return last


@sabotaged_by("foresight.algorithms.search.alphago.imitate", lambda f: lambda state: _backwards(f, state, "sl"))
def test_imitation_learns_what_the_expert_plays(tmp_path: Path) -> None:
    """The expert, a file, always plays the first free cell; a random guess is right one time in five."""
    lines = [
        "(;" + "".join(f";{'BW'[t % 2]}[{'abc'[c % 3]}{c // 3 + 1}]" for t, c in enumerate(h)) + ")" for h in FIRSTS
    ]
    for i, line in enumerate(lines):
        (tmp_path / f"{i:02d}.sgf").write_text(line)
    config = dataclasses.replace(SMALL, steps=120, supervised=120, reinforce=0, regress=0, games=str(tmp_path))
    # Symmetries would turn "the first free cell" into another rule.
    game = games.make("tic_tac_toe")
    game.symmetries = game.symmetries[:1]
    accuracy = imitation(ag.build(config, game))
    assert accuracy > 0.45  # two of the six moves of a game follow no rule


def _firsts() -> list[list[int]]:
    found = []
    for opening in range(9):
        for reply in range(9):
            if reply != opening:
                history = [opening, reply]
                while not bool(TTT.over(replay(TTT, [history]))):
                    history.append(next(c for c in range(9) if c not in history))
                found.append(history)
    return found


FIRSTS = _firsts()


@sabotaged_by(
    "foresight.algorithms.search.alphago.reinforce",
    lambda f: lambda state: _backwards(f, state),
)
def test_self_play_makes_the_policy_stronger() -> None:
    """From a uniform policy, 60 steps of REINFORCE beat the policy that they began from."""
    config = dataclasses.replace(SMALL, rl_games=64, rl_learning_rate=5e-3, steps=17, supervised=1, pool_every=20)
    state = ag.build(config, TTT)
    state.step = 1
    for _ in range(60):
        ag.reinforce(state)
        state.step += 1
    from foresight.runtime.evaluation import match

    result = match.play(
        TTT, lambda p: ag.sampled(state, state.rl, p), lambda p: ag.sampled(state, state.sl, p), 200, seed=0
    )
    assert result.score > 0.62


def _backwards(step: Any, state: ag.State, which: str = "rl") -> Any:
    for group in getattr(state, f"{which}_optimizer").param_groups:
        group["lr"] = -abs(group["lr"])
    return step(state)


@pytest.mark.parametrize("stop", [4, 12, 20])
def test_a_run_stopped_in_any_stage_resumes_exactly(tmp_path: Path, trained: ag.State, stop: int) -> None:
    *_, (step, _, state) = ag.train(dataclasses.replace(SMALL, steps=stop), TTT)
    assert step == stop
    path = checkpoint.save(tmp_path, state, stop)
    again = ag.build(SMALL, TTT)
    checkpoint.restore(path, again)
    *_, (_, _, end) = ag.train(SMALL, TTT, again)
    for name in ("sl", "rl", "value"):
        mine, other = getattr(end, name).state_dict(), getattr(trained, name).state_dict()
        assert all(torch.equal(mine[key], other[key]) for key in other)


def test_the_search_mixes_value_and_rollout(trained: ag.State) -> None:
    position = replay(TTT, [[0, 3, 1, 4]])
    for mix in (0.0, 0.5, 1.0):
        trained.config = dataclasses.replace(SMALL, mix=mix)
        action, extras, _ = ag.act(trained, position, simulations=200)
        assert int(action) == 2 and float(extras["value"]) > 0
    trained.config = SMALL
    assert int(ag.act(trained, position, simulations=0)[1]["visits"].sum()) == 0


def test_another_game_and_senseless_stages_are_refused(trained: ag.State) -> None:
    with pytest.raises(UserError, match=r"plays tic_tac_toe\(\), not hex"):
        next(ag.train(dataclasses.replace(SMALL, steps=30, regress=20), games.make("hex", size=3), trained))
    with pytest.raises(UserError, match="steps is 99, but the stages together have"):
        ag.build(dataclasses.replace(SMALL, steps=99), TTT)
    with pytest.raises(UserError, match="mix must be between"):
        ag.build(dataclasses.replace(SMALL, mix=2.0), TTT)
    for name in ("reinforce", "regress", "random_moves"):
        with pytest.raises(UserError, match=f"{name} must be at least 0, not -1"):
            ag.build(dataclasses.replace(SMALL, steps=1, **{name: -1}), TTT)
    with pytest.raises(UserError, match="rl_games must be at least 4, not 2"):  # the policy would not move
        ag.build(dataclasses.replace(SMALL, rl_games=2), TTT)


def test_a_loss_of_nan_reaches_no_weight() -> None:
    """In the second stage: the policy that plays gives finite numbers, and the outcome does not."""
    *_, (_, _, state) = ag.train(dataclasses.replace(SMALL, steps=12), TTT)
    state.game = copy.copy(TTT)
    state.game.first_score = lambda position: torch.full((len(position),), math.nan)
    before = copy.deepcopy(state.rl.state_dict())
    with pytest.raises(LostError, match="loss became nan"):
        ag.reinforce(state)
    assert all(torch.equal(before[key], value) for key, value in state.rl.state_dict().items())


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.4, 0.5])
def test_the_share_of_games_that_was_asked_for_is_held_out(share: float) -> None:
    games = torch.arange(1000).repeat(2)  # two positions of each
    assert (~ag._training(games, share)).sum() == pytest.approx(2 * 1000 * share, abs=2)
    assert ag._training(torch.tensor([0]), share).all()  # nothing else to train on
