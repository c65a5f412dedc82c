"""A short T-maze: a memory solves it, a policy without one guesses at the junction."""

from __future__ import annotations

import pytest
import torch

from foresight.algorithms.policy import ppo
from foresight.envs.make import make
from tests.sabotage import sabotaged_by

CONFIG = ppo.Config(
    steps=32_000, num_envs=32, rollout_steps=16, minibatches=4, learning_rate=2e-3, anneal_lr=False, gae_lambda=0.9,
    entropy_coef=0.005, hidden=(16,), memory_size=16, memory_heads=2, memory_window=8,
)  # fmt: skip
STEPS = {"gru": 20_000, "gtrxl": 15_000, None: 40_000}


def success(kind: str | None) -> float:
    """Share of 200 greedy episodes that end in the right arm, after training."""
    config = ppo.Config(**{**vars(CONFIG), "memory": kind, "steps": STEPS[kind]})
    for step, metrics, state in ppo.train(config, make("TMazePassive-v0", num_envs=32, length=4)):  # noqa: B007
        if kind is not None and 4 * step >= 3 * config.steps:
            assert metrics["return"] > 0.75  # of the last 100 episodes, exploring; a guess earns 0.5
    env = make("TMazePassive-v0", num_envs=200, length=4)
    obs, carry = env.reset(1), None
    for _ in range(5):
        action, _, carry = ppo.act(state, obs, carry)
        feedback = env.step(action)
        obs = feedback.obs
    return feedback.reward.mean().item()


@pytest.mark.learning
@sabotaged_by("foresight.nets.sequence.memory.Trunk.forward", lambda f: lambda self, *a: f(self, *_forgetful(*a)))
@pytest.mark.parametrize("kind", ["gru", "gtrxl"])
def test_a_memory_solves_a_maze(kind: str):
    assert success(kind) > 0.95


@pytest.mark.learning
def test_without_a_memory_it_is_a_guess():
    assert 0.35 < success(None) < 0.65


def _forgetful(obs, carry, start):
    """A trunk's arguments as if every row began an episode."""
    return obs, None, None if start is None else torch.ones_like(start)
