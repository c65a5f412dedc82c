"""Short runs of DQN and Rainbow."""

from __future__ import annotations

import dataclasses

import torch

from foresight.algorithms.value import dqn, rainbow
from tests.algorithms.states import continued, halfway_and_end, restored, weights
from tests.algorithms.value.small_envs import Chain

DQN = dqn.Config(
    steps=800, num_envs=8, learning_starts=64, train_every=8, batch_size=32, replay_size=4_000, hidden=(16,),
    learning_rate=5e-3, target_every=40, epsilon_fraction=0.5,
)  # fmt: skip
RAINBOW = rainbow.Config(
    steps=800, num_envs=8, learning_starts=64, train_every=8, batch_size=32, replay_size=4_000, hidden=(16,),
    learning_rate=5e-3, target_every=40, n_steps=2, value_range=(-1.0, 2.0),
)  # fmt: skip


def resumes(module, config) -> None:
    wild = {"epsilon_end": 0.5} if module is dqn else {"sigma": 3.0}  # so that it shows what is drawn
    halfway, whole = halfway_and_end(module, dataclasses.replace(config, **wild), _chain, 920)
    resumed = continued(module, restored(module, halfway, Chain(8)), Chain(8), 920)
    assert whole.step == resumed.step == 920
    assert torch.equal(weights(whole), weights(resumed))
    assert whole.episodes == resumed.episodes


def _chain() -> Chain:
    return Chain(8)
