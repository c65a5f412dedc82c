"""IMPALA balances a pole, and a policy that is many updates old teaches the right values only with V-trace."""

from __future__ import annotations

import dataclasses

import pytest

from foresight.algorithms.policy import impala
from foresight.envs.make import make
from foresight.runtime.distributed import actors, learner
from foresight.runtime.evaluation import evaluate
from tests.sabotage import sabotaged_by

CONFIG = impala.Config(
    steps=30_000,
    num_envs=8,
    rollouts_per_update=1,
    optimizer="adam",
    optimizer_epsilon=1e-5,
    learning_rate=2e-3,
    gamma=0.98,
    max_lag=None,
)


def _random() -> float:
    env = make("CartPole-v1", num_envs=16)
    return evaluate.baseline(impala, impala.build(CONFIG, env.spaces), env, 50).mean


@pytest.mark.learning
@sabotaged_by("foresight.ops.returns.vtrace", lambda f: lambda *a: tuple(-x for x in f(*a)))
def test_it_balances_a_pole_with_actors_that_lag() -> None:
    fields = dataclasses.asdict(CONFIG)
    envs = lambda: make("CartPole-v1", num_envs=CONFIG.num_envs)  # noqa: E731
    fleet = actors.Inline([actors.Collector("impala", fields, envs, i, 0) for i in range(2)])
    state = impala.build(CONFIG, make("CartPole-v1", num_envs=1).spaces)
    *_, (_, metrics, state) = learner.train(impala, CONFIG, state, fleet)
    assert metrics["lag"] == 3
    reached = evaluate.evaluate(impala, state, make("CartPole-v1", num_envs=16), 50).mean
    assert reached > 4 * _random(), f"reached {reached}"
