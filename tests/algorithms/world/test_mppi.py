"""MPPI in the true simulator: settings, mistakes, resuming, the weights of the elites."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.world import mppi
from foresight.errors import UserError
from tests.algorithms.small_runs import last
from tests.algorithms.states import restored
from tests.algorithms.world.integrator import Integrator, gain, regret
from tests.sabotage import begins_anew, change, flip_sign, sabotaged_by

SMALL = mppi.Config(steps=64, num_envs=4, horizon=6, candidates=50, elites=5, iterations=3, temperature=20.0)


def _policy(state: mppi.State):
    def act(obs: torch.Tensor, carry):
        action, _, carry = mppi.act(state, obs, carry)
        return action, carry

    return act


@pytest.mark.parametrize("bound", [1.0, 3.0])
@sabotaged_by("foresight.planning.continuous.cem.best", change("returns", torch.neg))
def test_the_first_action_is_that_of_the_riccati_equation(bound: float) -> None:
    env = Integrator(bound=bound)
    config = dataclasses.replace(SMALL, candidates=400, elites=20, iterations=12, min_std=0.0, temperature=2.0)
    state, obs = mppi.build(config, env.spaces), torch.tensor([[0.5], [-0.3], [0.1], [0.0]])
    state.simulator = _Scaled(bound)
    action, _, _ = mppi.act(state, obs)
    torch.testing.assert_close(action, -gain(6) * bound * obs, atol=0.02 * bound, rtol=0)


class _Scaled:
    """The simulator of actions in ±`bound`."""

    def __init__(self, bound: float) -> None:
        self.simulator, self.bound = Integrator().spaces.simulator(), bound

    def root(self, obs):
        return self.simulator.root(obs)

    def rewards(self, state, actions):
        return self.simulator.rewards(state, actions / self.bound)


@sabotaged_by("tests.algorithms.world.integrator.Simulator.rewards", flip_sign)
def test_whole_episodes_are_nearly_optimal() -> None:
    env = Integrator()
    state = mppi.build(dataclasses.replace(SMALL, candidates=200, elites=20, iterations=5), env.spaces)
    assert regret(env, _policy(state)) < 0.02


@sabotaged_by("foresight.algorithms.world.mppi.train", begins_anew)
def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    env = Integrator()
    whole = last(mppi, SMALL, env)
    half = last(mppi, dataclasses.replace(SMALL, steps=32), env)
    resumed = last(mppi, SMALL, env, restored(mppi, dataclasses.replace(half, config=SMALL), env))
    assert whole.episodes == resumed.episodes and len(whole.episodes.returns) == 8
    assert torch.equal(whole.generator.get_state(), resumed.generator.get_state())


def test_mistakes_are_named() -> None:
    env = Integrator()
    for field, value in {"horizon": 0, "elites": 51, "initial_std": 0.0, "iterations": 0, "temperature": -1.0}.items():
        with pytest.raises(UserError, match=field):
            mppi.build(dataclasses.replace(SMALL, **{field: value}), env.spaces)
    with pytest.raises(UserError, match="temperature must be finite"):
        mppi.build(dataclasses.replace(SMALL, temperature=float("inf")), env.spaces)
    with pytest.raises(UserError, match="bounded Box"):
        mppi.build(SMALL, Integrator(space=gs.Discrete(2)).spaces)
    with pytest.raises(UserError, match="no simulator"):
        mppi.build(SMALL, env.spaces._replace(simulator=None))
    with pytest.raises(UserError, match="num_envs"):
        next(mppi.train(dataclasses.replace(SMALL, num_envs=2), env))


def test_a_low_temperature_weights_all_elites_alike() -> None:
    env = Integrator()
    config = dataclasses.replace(SMALL, temperature=0.0, iterations=1, elites=50)
    action, _, _ = mppi.act(mppi.build(config, env.spaces), torch.zeros(1, 1))
    sequences = torch.randn(1, 50, 6, 1, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    torch.testing.assert_close(action, sequences.mean(1)[:, 0])
