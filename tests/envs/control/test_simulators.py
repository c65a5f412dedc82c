"""Simulators predict the rewards of the environments that they stand for, from any observation."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from foresight.envs import make
from tests.sabotage import change, sabotaged_by

STEPS = 5
CASES = [
    ("Pendulum-v1", {}, 1e-4),
    ("Pendulum-v1", {"action_repeat": 3}, 1e-4),
    ("MountainCarContinuous-v0", {}, 1e-5),
    ("CartpoleSwingup-v1", {}, 1e-5),
    ("CartpoleSwingup-v1", {"action_repeat": 8}, 1e-4),
    ("HalfCheetah-v5", {}, 1e-2),
    ("Hopper-v5", {}, 1e-2),
]


def _errors(name: str, options: dict[str, Any], rounds: int) -> torch.Tensor:
    """|predicted - actual| of rewards `[rounds, 4, STEPS]`, from observations along episodes; 0 after an end."""
    env = make.make(name, num_envs=4, **options)
    simulator, space, obs = env.spaces.simulator(), env.spaces.action, env.reset(0)
    generator = torch.Generator().manual_seed(0)
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    found = []
    for _ in range(rounds):
        actions = low + (high - low) * torch.rand(4, STEPS, *space.shape, generator=generator)
        predicted, alive = simulator.rewards(simulator.root(obs), actions), torch.ones(4)
        rewards = []
        for t in range(STEPS):
            feedback = env.step(actions[:, t])
            rewards.append(feedback.reward * alive)
            alive = alive * (1 - feedback.cut)
        found.append((predicted - torch.stack(rewards, 1)).abs())
        obs = feedback.obs
    env.close()
    return torch.stack(found)


@pytest.mark.parametrize("name,options,bound", CASES)
def test_rewards_are_those_of_the_environment(name: str, options: dict[str, Any], bound: float) -> None:
    assert _errors(name, options, 12).max() < bound


@sabotaged_by("foresight.envs.control.simulators._tolerance", change("margin", lambda margin: 1.1 * margin))
@sabotaged_by("foresight.envs.control.simulators.Bodies.rewards", change("actions", torch.neg))
def test_cartpole_is_that_of_envpool() -> None:
    assert _errors("CartpoleSwingup-v1", {"action_repeat": 8}, 4).max() < 1e-4


@sabotaged_by("foresight.envs.control.simulators.Bodies.rewards", change("state", lambda s: s.roll(1, -1)))
def test_the_ball_is_caught_where_envpool_reports_it() -> None:
    env = make.make("BallInCupCatch-v1", num_envs=2)
    simulator, obs = env.spaces.simulator(), env.reset(61)  # a start with the ball in the cup
    actions = torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(0)) - 0.5
    predicted = simulator.rewards(simulator.root(obs), actions)
    rewards = torch.stack([env.step(actions[:, t]).reward for t in range(4)], 1)
    assert torch.equal(predicted, rewards) and 0 < rewards.mean() < 1
    env.close()


def test_only_environments_whose_state_is_seen_have_one() -> None:
    assert make.make("Pendulum-v1", num_envs=1, clip_reward=True).spaces.simulator is not None
    for name, options in [
        ("CartPole-v1", {}), ("LunarLanderContinuous-v3", {}), ("Reacher-v5", {}), ("Pendulum-v1", {"visible": [0, 1]}),
        ("Pendulum-v1", {"rescale_action": True}), ("Pendulum-v1", {"g": 9.0}), ("HalfCheetah-v5", {"frame_stack": 2}),
    ]:  # fmt: skip
        assert make.make(name, num_envs=1, **options).spaces.simulator is None, name


def test_spaces_with_a_simulator_can_be_sent_to_another_process() -> None:
    spaces = pickle.loads(pickle.dumps(make.make("CartpoleSwingup-v1", num_envs=1, action_repeat=2).spaces))
    assert spaces.simulator()._repeat == 2
