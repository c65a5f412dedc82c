"""Short runs of DQN and Rainbow."""

from __future__ import annotations

import copy
import dataclasses

import torch

from foresight.algorithms.value import dqn, rainbow
from tests.algorithms.small_runs import last
from tests.algorithms.states import restored, weights
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
    config, copies = dataclasses.replace(config, steps=1_600), []
    wild = {"epsilon_end": 0.5} if module is dqn else {"sigma": 3.0}  # so that it shows what is drawn
    config = dataclasses.replace(config, **wild)
    halfway = last(module, dataclasses.replace(config, steps=800), Chain(8))
    for state in (copy.deepcopy(halfway), restored(module, halfway, Chain(8))):
        state.config = config
        copies.append(last(module, config, Chain(8), state))
    assert copies[0].step == copies[1].step == 1600
    assert torch.equal(weights(copies[0]), weights(copies[1]))
    assert copies[0].episodes == copies[1].episodes
