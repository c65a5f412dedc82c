"""TD-MPC2 as a whole: its model, critics, policy and plans settle at the solution of a small known problem."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.algorithms.world import tdmpc2
from foresight.envs.base import Feedback, Spaces
from tests.sabotage import change, sabotaged_by

GAMMA, REWARDS, GOALS = 0.5, torch.tensor([1.0, -1.0, 2.0]), torch.tensor([0.5, -0.5, 0.0])


class Ring:
    """States 0, 1, 2, 0, ...; state s earns REWARDS[s] - (a - GOALS[s])².

    A step from 2 to 0 ends the episode with probability ½. Every episode is cut after 8 steps.
    """

    name, num_envs = "Ring", 16
    spaces = Spaces(gs.Box(0, 1, (3,), np.float32), gs.Box(-1, 1, (1,), np.float32))

    def reset(self, seed: int) -> Tensor:
        self._state, self._time = torch.arange(16) % 3, torch.arange(16) % 8
        self._generator = torch.Generator().manual_seed(seed)
        return torch.eye(3)[self._state]

    def step(self, action: Tensor) -> Feedback:
        state = self._state
        reward = REWARDS[state] - (action[:, 0] - GOALS[state]).square()
        ended = (state == 2) & (torch.rand(16, generator=self._generator) < 0.5)
        cut = ended | (self._time >= 7)
        self._state = (state + 1) % 3
        final = torch.eye(3)[self._state]
        self._state = torch.where(cut, torch.randint(3, (16,), generator=self._generator), self._state)
        self._time = torch.where(cut, 0, self._time + 1)
        return Feedback(torch.eye(3)[self._state], reward, 1 - ended.float(), cut.float(), torch.ones(16), final, {})


def _values() -> Tensor:
    """V = R + γ P V under the best actions, by a linear solve."""
    following = torch.eye(3).roll(1, 1)
    following[2] *= 0.5
    return torch.linalg.solve(torch.eye(3) - GAMMA * following, REWARDS)


CONFIG = tdmpc2.Config(
    steps=1_760, num_envs=16, learning_starts=640, train_every=4, gamma=GAMMA, batch_size=64, learning_rate=1e-2,
    tau=0.1, horizon=2, candidates=32, proposals=4, elites=6, iterations=2, latent_size=16, hidden=32,
    encoder_hidden=16,
)  # fmt: skip


@functools.cache
def trained(steps: int) -> Any:
    """The State after so many steps."""
    *_, (_, _, state) = tdmpc2.train(dataclasses.replace(CONFIG, steps=steps), Ring())
    return state


@sabotaged_by("foresight.algorithms.world.tdmpc2.q_target", change("discount", torch.ones_like))
def test_tdmpc2_settles_at_the_values_of_a_ring() -> None:
    """The twin begins where the sound test was at three quarters, and must leave the solution."""
    *_, (_, _, state) = tdmpc2.train(CONFIG, Ring(), copy.deepcopy(trained(1_440)))
    with torch.no_grad():
        latent, exact, goals = state.model.encoder(torch.eye(3)), _values(), GOALS.unsqueeze(1)
        value = torch.stack([q.mean() for q in state.critics(latent, goals)]).mean(0)
        torch.testing.assert_close(value, exact, atol=0.15, rtol=0)
        after, reward, discount = state.model.step(latent, goals)
        torch.testing.assert_close(reward, REWARDS, atol=0.1, rtol=0)
        torch.testing.assert_close(after, latent.roll(-1, 0), atol=0.1, rtol=0)
        torch.testing.assert_close(discount, torch.tensor([1.0, 1.0, 0.5]), atol=0.15, rtol=0)
        torch.testing.assert_close(state.policy(latent).mode(), goals, atol=0.2, rtol=0)
        mean = tdmpc2.act(state, torch.eye(3))[2][:, 0]
        torch.testing.assert_close(mean, goals, atol=0.2, rtol=0)
