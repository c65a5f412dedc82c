"""PlaNet as a program: settings, resuming, what it learns, its planner, and mistakes."""

from __future__ import annotations

import dataclasses

import gymnasium.spaces as gs
import numpy as np
import pytest
import torch

from foresight.algorithms.world import planet
from foresight.envs.base import Spaces
from foresight.errors import UserError
from tests.algorithms.policy.small_envs import Bandit
from tests.algorithms.small_runs import last
from tests.algorithms.states import continued, forgets, halfway_and_end, restored, weights
from tests.algorithms.world.integrator import Integrator
from tests.algorithms.world.world_runs import near, reward_of
from tests.sabotage import change, sabotaged_by

SMALL = planet.Config(
    steps=192, num_envs=4, seed_episodes=2, updates=3, batch_size=16, sequence_length=8, replay_size=4_000,
    learning_rate=1e-2, reconstruction_coef=30.0, free_nats=1.0, horizon=3, candidates=40, elites=8, iterations=2,
    deter=16, stoch=4, hidden=16, units=32, layers=1, depth=2,
)  # fmt: skip


def test_it_collects_an_episode_and_updates_in_turn() -> None:
    env = Integrator()
    seen = [(step, set(metrics), state.gradient_steps) for step, metrics, state in planet.train(SMALL, env)]
    assert [step for step, _, _ in seen] == [32 * (i + 1) for i in range(6)]
    assert [updates for _, _, updates in seen] == [0, 0, 3, 6, 9, 12]  # after two rounds of random episodes
    assert set(planet.METRICS) <= seen[-1][1] and not set(planet.METRICS[2:]) & seen[1][1]


@sabotaged_by("foresight.planning.continuous.cem.best", change("returns", torch.neg))
def test_it_acts_by_the_last_mean_or_by_the_best_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """One iteration, in which all are elites: the mean is near 0, and the best action is at the bound."""
    env = Integrator()
    state = planet.build(dataclasses.replace(SMALL, horizon=1, elites=40, iterations=1), env.spaces)
    monkeypatch.setattr(state.model, "rewards", lambda starts, sequences: sequences.sum(-1))
    mean = planet.act(state, env.reset(0))[2]["action"]
    state.config = dataclasses.replace(state.config, act_best=True)
    best = planet.act(state, env.reset(0))[2]["action"]
    assert mean.abs().max() < 0.5 and best.mean() > 0.8


FIELDS = ("model", "optimizer", "replay", "generator", "sampler", "rounds")


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in FIELDS])
def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    env = Integrator()
    halfway, end = halfway_and_end(planet, SMALL, Integrator, 288)
    resumed = continued(planet, restored(planet, halfway, env), env, 288)
    assert end.step == resumed.step == 288
    assert torch.equal(weights(end), weights(resumed))
    assert end.episodes == resumed.episodes
    whole = last(planet, dataclasses.replace(SMALL, steps=288), env)
    assert torch.equal(weights(whole), weights(end))


@sabotaged_by("foresight.planning.continuous.cem.best", change("returns", torch.neg))
def test_it_learns_in_units_of_the_environment() -> None:
    env = near(8)
    config = dataclasses.replace(
        SMALL, steps=400, num_envs=8, horizon=1, updates=8, sequence_length=6, seed_episodes=25, candidates=100
    )
    state = planet.build(config, env.spaces)
    random = planet.act(state, env.reset(0).expand(8, -1), explore=True)[0]
    assert (random[:, 1] >= 0).all() and (random[:, 1] <= 4).all()
    state = last(planet, config, env, state)
    assert reward_of(planet, state, env).mean() > 0.85  # of random ones: -1.3


def test_noise_is_added_to_collected_actions_only() -> None:
    env = Integrator()
    state = last(planet, SMALL, env)
    obs = torch.zeros(512, 1)
    greedy = planet.act(state, obs)[0]
    noisy, extras, carry = planet.act(state, obs, explore=True)
    assert noisy.std() > greedy.std() + 0.1 and torch.equal(extras["action"], carry["action"])
    assert noisy.abs().max() <= 1


@sabotaged_by("foresight.nets.models.world_model.Images.forward", lambda f: lambda self, obs: 0 * f(self, obs))
def test_images_are_trained_on() -> None:
    """The model tells images that are bright on the left from others: each is decoded to what is more like itself."""
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    images[0, :, :, :4], images[1, :, :, 4:] = 255, 255
    spaces = Spaces(gs.Box(0, 255, (1, 8, 8), np.uint8), near().spaces.action)
    env = Bandit(spaces, 2, lambda c: images[c], lambda c, a: a[:, 0], num_envs=4)
    config = dataclasses.replace(SMALL, steps=60, sequence_length=4, reconstruction_coef=1.0)
    state = last(planet, config, env)
    assert state.gradient_steps > 0 and planet.act(state, env.reset(0))[0].shape == (4, 2)
    model, none = state.model, torch.zeros(2, 1)
    with torch.no_grad():
        seen = model.observe(model.initial(2), images.unsqueeze(1), torch.zeros(2, 1, 2), none, state.generator)
        decoded = model.decode({name: x[:, 0] for name, x in seen.items()})
    far = (decoded.unsqueeze(1).float() - images).square().mean((2, 3, 4))
    assert far[0, 0] < 0.5 * far[0, 1] and far[1, 1] < 0.5 * far[1, 0]


def test_mistakes_are_named() -> None:
    env = Integrator()
    for field, value in {
        "horizon": 0,
        "replay_size": 31,
        "elites": 41,
        "updates": 0,
        "action_noise": -1.0,
        "sequence_length": 1,
    }.items():
        with pytest.raises(UserError, match=field):
            planet.build(dataclasses.replace(SMALL, **{field: value}), env.spaces)
    flat = gs.Box(np.array([-1, 0], np.float32), np.array([1, 0], np.float32))
    with pytest.raises(UserError, match="equal bounds"):
        planet.build(SMALL, Integrator(space=flat).spaces)
    with pytest.raises(UserError, match="bounded Box"):
        planet.build(SMALL, Integrator(space=gs.Discrete(2)).spaces)
    with pytest.raises(UserError, match="num_envs"):
        next(planet.train(dataclasses.replace(SMALL, num_envs=2), env))
