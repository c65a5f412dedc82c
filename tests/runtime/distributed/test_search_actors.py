"""Self-play and search apart from learning: the same rows and weights as in one process, games whole, lag bounded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from foresight.algorithms.search import (
    alphazero,
    efficientzero,
    gumbel_muzero,
    muzero,
    sampled_muzero,
    stochastic_muzero,
)
from foresight.envs.games import make as games
from foresight.envs.games import selfplay
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.runtime.config import resolve
from foresight.runtime.distributed import actors, learner
from foresight.training.options import build_config, flatten
from tests.algorithms.states import weights
from tests.runtime.distributed.test_actors import Mortal, _late, alone, same
from tests.sabotage import change, flip_sign, sabotaged_by

FIELDS: dict[str, Any] = {
    "steps": 320, "num_envs": 4, "simulations": 4, "unroll_steps": 3, "n_steps": 3, "batch_size": 8, "train_every": 40,
    "collect_steps": 10, "learning_starts": 80, "latent_size": 8, "hidden": (16,), "target_every": 2, "reanalyze": 0.0,
    "max_lag": 0, "learning_rate": 0.03,
}  # fmt: skip
FAMILY = [
    (muzero, "CartPole-v1"), (muzero, "tic_tac_toe"), (gumbel_muzero, "CartPole-v1"), (efficientzero, "CartPole-v1"),
    (stochastic_muzero, "CartPole-v1"), (sampled_muzero, "Pendulum-v1"),
]  # fmt: skip
ZERO = alphazero.Config(
    steps=1_024,
    num_games=64,
    simulations=4,
    channels=4,
    blocks=1,
    learning_starts=64,
    batch_size=64,
    reuse=1.0,
    max_lag=0,
)


def env(task: str, count: int = 4) -> Any:
    """As a run would make it for an actor."""
    known = task == "tic_tac_toe"
    return selfplay.env(games.make(task) if known else make(task, num_envs=count), count)


def fleet(module: Any, config: Any, task: str, count: int = 1) -> actors.Inline:
    name, share = module.__name__.rpartition(".")[2], getattr(config, "num_envs", 0) or config.num_games
    return actors.Inline(
        [actors.Collector(name, flatten(config), lambda: env(task, share), i, 0) for i in range(count)]
    )


def built(module: Any, config: Any, task: str) -> Any:
    return module.build(config, games.make(task) if task == "tic_tac_toe" else make(task, num_envs=1).spaces)


@sabotaged_by("foresight.runtime.distributed.actors.get_weights", _late)
@pytest.mark.parametrize(
    ("module", "task"), FAMILY, ids=lambda x: x if isinstance(x, str) else x.__name__.rpartition(".")[2]
)
def test_lockstep_is_the_run_of_one_process(module: Any, task: str) -> None:
    """One actor that waits: the same searches, rows, draws and gradient steps, bit for bit."""
    config = build_config(module.Config, **{**FIELDS, **({"gamma": 1.0} if task == "tic_tac_toe" else {})})
    here = games.make(task) if task == "tic_tac_toe" else make(task, num_envs=4)
    together, state = alone(module, config, task, here), built(module, config, task)
    apart = learner.train(module, config, state, fleet(module, config, task))
    same(((step, m, weights(s)) for step, m, s in apart), together)
    assert state.updates == 6


@sabotaged_by("foresight.runtime.distributed.actors.load_weights", lambda f: lambda state, weights: None)
def test_actors_may_search_ahead_of_the_learner_with_its_newest_weights() -> None:
    """With a lag of 2 the policy of an actor is that of two rounds ago, not the one that it was built with."""
    config = build_config(muzero.Config, **{**FIELDS, "max_lag": 2})
    state, searchers = built(muzero, config, "CartPole-v1"), fleet(muzero, config, "CartPole-v1")
    held, lags = [vector(state)], []
    for _, metrics, _ in learner.train(muzero, config, state, searchers):
        held.append(vector(state))
        lags.append(metrics["lag"])
    assert lags == [0, 1, 2, 2, 2, 2, 2, 2]
    assert torch.equal(vector(searchers._collectors[0]._state), held[-4])


def vector(state: Any) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(state.network.parameters()).detach().clone()


@sabotaged_by("foresight.ops.returns.lambda_return", flip_sign)
def test_finished_games_reach_the_learner_whole() -> None:
    """Before anything is learned: the same positions with the same targets as in one process."""
    config = dataclasses.replace(ZERO, learning_starts=10**6)
    *_, (step, expected, alone) = alphazero.train(config, games.make("tic_tac_toe"))
    state = built(alphazero, config, "tic_tac_toe")
    *_, (came, metrics, _) = learner.train(alphazero, config, state, fleet(alphazero, config, "tic_tac_toe"))
    assert came == step == 1_024 and state.finished == alone.finished > 64
    assert {key: metrics[key] for key in expected} == expected
    assert len(state.replay) == len(alone.replay) == sum(_lengths(state))
    ours, theirs = state.replay.storage, alone.replay.storage
    for name in ("policy", "legal"):
        assert torch.equal(ours.extras[name], theirs.extras[name])
    assert torch.equal(ours.obs, theirs.obs)
    held = len(state.replay)
    target, stones = ours.extras["target"][0, :held], ours.obs[0, :held, :2].sum((1, 2, 3))
    assert ((stones[1:] == 0) | (stones[1:] == stones[:-1] + 1)).all()  # a game's positions follow each other
    won = torch.tensor(_wins(ours, held))
    assert torch.equal(target[won].abs(), torch.ones(len(won))) and (target[won] == 1).all()


def _lengths(state: Any) -> list[int]:
    rows, held = state.replay.storage, len(state.replay)
    ends = rows.cut[0, :held].nonzero().flatten().tolist()
    return [b - a for a, b in zip([-1, *ends[:-1]], ends, strict=True)]


def _wins(rows: Any, held: int) -> list[int]:
    """Rows at which the mover completed a line."""
    return (rows.reward[0, :held] == 1).nonzero().flatten().tolist()


@sabotaged_by("foresight.algorithms.search.alphazero._train_due", change("positions", lambda n: 3 * n))
def test_positions_of_actors_are_trained_on_as_often_as_configured() -> None:
    """`reuse` 1: as many gradient steps as batches fit into what came after learning began; two actors, one dies."""
    state, taken = built(alphazero, ZERO, "tic_tac_toe"), 0
    inner = fleet(alphazero, dataclasses.replace(ZERO, num_games=32), "tic_tac_toe", 2)
    plain = alphazero.update

    def counted(*args: Any) -> Any:
        nonlocal taken
        taken += 1
        return plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alphazero, "update", counted)
        *_, (step, metrics, _) = learner.train(
            alphazero, dataclasses.replace(ZERO, steps=2_048), state, Mortal(inner, {3})
        )
    assert step == 2_048 and metrics["dropped_unrolls"] == metrics["actor_restarts"] == 1
    assert taken == len(state.replay) // ZERO.batch_size and metrics["policy_loss"] > 0


@pytest.mark.parametrize(
    ("name", "preset", "field"),
    [("alphazero", "tic_tac_toe", "num_games"), ("muzero", "tic_tac_toe", "num_envs"),
     ("muzero", "CartPole-v1", "num_envs"), ("gumbel_muzero", "CartPole-v1", "num_envs"),
     ("sampled_muzero", "Pendulum-v1", "num_envs"), ("efficientzero", "CartPole-v1", "num_envs")],
)  # fmt: skip
def test_a_preset_can_be_shared(name: str, preset: str, field: str) -> None:
    whole = resolve.resolve(name, preset=preset, actors=2)
    fields, make_world = actors.plan(whole, 2)
    assert 2 * fields[field] == whole.config[field] and make_world().num_envs == fields[field]
    with pytest.raises(UserError, match=f"not a multiple of .* change {field}"):
        actors.plan(whole, whole.config[field] + 1)


def test_what_plays_without_learning_is_refused() -> None:
    with pytest.raises(UserError, match=r"alphago does not support actors; .*alphazero, .*muzero"):
        actors.plan(resolve.resolve("alphago", env="tic_tac_toe", actors=2), 2)
