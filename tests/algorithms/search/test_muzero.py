"""MuZero: values as categoricals, values of games, and what is masked or refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from foresight.algorithms.search import muzero
from foresight.envs.games import make as games
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.nets.models.muzero import CategoricalScalar
from foresight.ops import transforms
from foresight.runtime.checkpoints import checkpoint
from foresight.training import muzero_targets
from foresight.training.options import ModelTraining, build_config
from tests.algorithms.search.muzero_runs import SMALL, sequences, small
from tests.algorithms.states import refusal
from tests.sabotage import drop, flip_sign, sabotaged_by, scaled


@sabotaged_by("foresight.ops.transforms.signed_hyperbolic", scaled(0.5))
@sabotaged_by("foresight.nets.models.muzero.CategoricalScalar.forward", flip_sign)
def test_a_number_is_learned_through_its_categorical() -> None:
    torch.manual_seed(0)
    number, x = CategoricalScalar(3, 20), torch.eye(3)
    assert number(x).abs().max() < 1e-4
    target = torch.tensor([-3.0, 0.5, 250.0])
    optimizer = torch.optim.Adam(number.parameters(), 0.1)
    for _ in range(1000):
        optimizer.zero_grad()
        number.loss(x, target).sum().backward()
        optimizer.step()
    torch.testing.assert_close(number(x), target, rtol=0.05, atol=0.1)
    assert transforms.signed_hyperbolic(torch.tensor(250.0)) < 20


@sabotaged_by("foresight.nets.models.muzero.CategoricalScalar.forward", scaled(0.9))
def test_small_returns_have_bins_of_their_own() -> None:
    """Bins of 0.025 tell 0.9 from 1; a uniform output has the mean 0 at every width."""
    number, x = CategoricalScalar(1, 20, bin_width=0.025), torch.ones(1, 1)
    for target in (0.9, 1.0):
        transformed = float(transforms.signed_hyperbolic(torch.tensor(target)))
        below = math.floor(transformed / 0.025)
        share = transformed / 0.025 - below
        number.layer.bias.data = torch.full((41,), -100.0)
        number.layer.bias.data[20 + below], number.layer.bias.data[21 + below] = math.log(1 - share), math.log(share)
        assert number(x).item() == pytest.approx(target, abs=1e-4)
        entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
        assert number.loss(x, torch.tensor([target])).item() == pytest.approx(entropy, abs=1e-3)
    config = muzero.Config(training=ModelTraining(bin_width=0.0))
    with pytest.raises(UserError, match=r"bin_width must be above 0, not 0\.0"):
        muzero_targets.check(config)


@sabotaged_by("foresight.algorithms.search.muzero._rule", lambda f: lambda state: muzero.RULE)
def test_in_games_muzero_takes_a_slight_edge_for_slight(monkeypatch: pytest.MonkeyPatch) -> None:
    """With known bounds, game values near 0 change nothing. Otherwise the tree's own bounds apply."""
    game, control = games.make("tic_tac_toe"), make("CartPole-v1", num_envs=1).spaces
    envs = {"game": (game, 1.0, True), "tree": (game, 1.0, False), "control": (control, 0.997, False)}
    forward, visits = CategoricalScalar.forward, {}
    for kind, (env, gamma, known) in envs.items():
        fields = {**SMALL, "simulations": 40, "gamma": gamma, "known_bounds": known}
        state = muzero.build(build_config(muzero.Config, **fields), env)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in state.network.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        seen = torch.zeros(1, 4) if kind == "control" else env.start(1)
        for scale in (0.0, 1e-6):
            monkeypatch.setattr(CategoricalScalar, "forward", lambda self, x, scale=scale: scale * forward(self, x))
            visits[kind, scale] = muzero.act(state, seen)[1]["visits"]
    assert torch.equal(visits["game", 0.0], visits["game", 1e-6])
    assert not torch.equal(visits["tree", 0.0], visits["tree", 1e-6])
    assert not torch.equal(visits["control", 0.0], visits["control", 1e-6])


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    config, env, state = small(muzero)
    next(muzero.train(config, env, state))
    with torch.no_grad():
        state.network.policy.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="is not finite for row"):
        for _ in muzero.train(config, env, state):
            pass


@sabotaged_by("foresight.ops.returns.n_step_return", drop("mask"))
def test_an_interrupted_replay_learns_nothing_of_the_gap() -> None:
    _, _, state = small(muzero, gamma=0.1, n_steps=2, unroll_steps=4, reanalyze=0.0)
    batch = sequences(muzero, state)
    mask = torch.ones(2, 6)
    mask[0, 1] = 0  # step 1 was the newest when the run stopped
    alive, known, value, _ = muzero.targets(state, batch.replace(mask=mask))
    assert alive[0].tolist() == [1, 0, 0, 0, 0] and known[0].tolist() == [1, 0, 0, 0, 0]
    assert value[0, 0].item() == pytest.approx(1.0, abs=1e-5)  # the reward, and a value that is still 0


@sabotaged_by("foresight.envs.games.game.GameId.load_state_dict", lambda f: lambda self, state: None)
def test_a_checkpoint_of_another_game_is_refused(tmp_path: Path) -> None:
    config = build_config(muzero.Config, **{**SMALL, "gamma": 1.0})
    mine, other = muzero.build(config, games.make("tic_tac_toe")), muzero.build(config, games.make("hex", size=3))
    path = checkpoint.save(tmp_path, mine, 1)
    assert "plays tic_tac_toe(), not hex(board_size=3)" in refusal(path, other)
