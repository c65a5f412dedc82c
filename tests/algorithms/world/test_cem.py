"""CEM in the true simulator: settings, mistakes, resuming, random shooting, Pendulum in seconds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.world import cem
from foresight.envs import make
from foresight.errors import UserError
from foresight.runtime.evaluation import returns
from tests.algorithms.small_runs import last
from tests.algorithms.states import restored
from tests.algorithms.world.integrator import Integrator, gain, regret
from tests.sabotage import begins_anew, change, flip_sign, sabotaged_by

SMALL = cem.Config(steps=64, num_envs=4, horizon=6, candidates=50, elites=5, iterations=3)


def _policy(state: cem.State):
    def act(obs: torch.Tensor, carry):
        action, _, carry = cem.act(state, obs, carry)
        return action, carry

    return act


@pytest.mark.parametrize("bound", [1.0, 3.0])
@sabotaged_by("foresight.planning.continuous.cem.best", change("returns", torch.neg))
def test_the_first_action_is_that_of_the_riccati_equation(bound: float) -> None:
    env = Integrator(bound=bound)
    config = dataclasses.replace(SMALL, candidates=400, elites=20, iterations=12)
    state, obs = cem.build(config, env.spaces), torch.tensor([[0.5], [-0.3], [0.1], [0.0]])
    state.simulator = _Scaled(bound)
    action, _, _ = cem.act(state, obs)
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
    state = cem.build(dataclasses.replace(SMALL, candidates=200, elites=20, iterations=5), env.spaces)
    assert regret(env, _policy(state)) < 0.02


@sabotaged_by("foresight.algorithms.world.cem.train", begins_anew)
def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    env = Integrator()
    whole = last(cem, SMALL, env)
    half = last(cem, dataclasses.replace(SMALL, steps=32), env)
    resumed = last(cem, SMALL, env, restored(cem, dataclasses.replace(half, config=SMALL), env))
    assert whole.episodes == resumed.episodes and len(whole.episodes.returns) == 8
    assert torch.equal(whole.generator.get_state(), resumed.generator.get_state())


@sabotaged_by("foresight.planning.continuous.cem.best", change("returns", torch.neg))
def test_random_shooting_takes_the_best_candidate() -> None:
    env = Integrator()
    config = dataclasses.replace(SMALL, iterations=1, elites=1, candidates=400, horizon=1)
    action, _, _ = cem.act(cem.build(config, env.spaces), torch.tensor([[0.5]]))
    torch.testing.assert_close(action, torch.tensor([[-gain(1) * 0.5]]), atol=0.02, rtol=0)


def test_a_plan_is_continued_unless_an_episode_is_cut() -> None:
    env = Integrator()
    state = cem.build(SMALL, env.spaces)
    _, _, carry = cem.act(state, env.reset(0))
    assert carry["mean"].shape == (4, 6, 1) and (carry["mean"][:, -1] == 0).all()
    kept = cem.reset_carry(carry, torch.tensor([1.0, 0, 0, 0]))["mean"]
    assert (kept[0] == 0).all() and torch.equal(kept[1:], carry["mean"][1:])


def test_pendulum_is_swung_up() -> None:
    env = make.make("Pendulum-v1", num_envs=4)
    config = cem.Config(num_envs=4, horizon=15, candidates=64, elites=8, iterations=3)
    state = cem.build(config, env.spaces)
    found = returns.evaluate(env, _policy(state), 4, 0, cem.reset_carry)
    random = returns.evaluate(env, returns.random_policy(env, 0), 4, 0, None)
    assert found.mean > -300 and random.mean < -700


def test_mistakes_are_named() -> None:
    env = Integrator()
    for field, value in {"horizon": 0, "elites": 51, "initial_std": 0.0, "iterations": 0}.items():
        with pytest.raises(UserError, match=field):
            cem.build(dataclasses.replace(SMALL, **{field: value}), env.spaces)
    with pytest.raises(UserError, match="bounded Box"):
        cem.build(SMALL, Integrator(space=gs.Discrete(2)).spaces)
    with pytest.raises(UserError, match="no simulator"):
        cem.build(SMALL, env.spaces._replace(simulator=None))
    with pytest.raises(UserError, match="num_envs"):
        next(cem.train(dataclasses.replace(SMALL, num_envs=2), env))
