"""Behavior cloning as a program: the data it takes, resuming, and mistakes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.sequence import behavior_cloning as bc
from foresight.data import trees
from foresight.errors import UserError
from foresight.training import offline
from tests.algorithms.sequence.chain import ENV, chain
from tests.algorithms.small_runs import last
from tests.algorithms.states import forgets, restored, weights
from tests.sabotage import change, sabotaged_by

CONFIG = bc.Config(steps=60, data=("d",), hidden=(16,), batch_size=64, learning_rate=0.02)


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain as the data."""
    monkeypatch.setattr(offline, "read", lambda *_: chain())


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in ("policy", "optimizer", "sampler")])
def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    whole = last(bc, CONFIG, ENV)
    stopped = next(state for _, _, state in bc.train(CONFIG, ENV))
    resumed = last(bc, CONFIG, ENV, restored(bc, stopped, ENV))
    assert stopped.step == 50 and resumed.step == 60 and torch.equal(weights(resumed), weights(whole))


@sabotaged_by("foresight.data.episodes.Episodes.best", change("share", lambda _: 1.0))
@sabotaged_by("foresight.nets.imitation.ActionCode.encode", change("action", lambda a: 1 - a))
def test_the_best_episodes_are_imitated() -> None:
    """The three episodes of the highest return have two actions 1 each; over all data both are equally frequent."""
    every = last(bc, dataclasses.replace(CONFIG, steps=150, batch_size=512), ENV)
    best = last(bc, dataclasses.replace(CONFIG, steps=150, share=3 / 16), ENV)
    probability = [state.policy(torch.ones(1, 1)).softmax(-1)[0, 1].item() for state in (every, best)]
    assert abs(probability[0] - 0.5) < 0.06 and probability[1] > 0.97, probability
    assert bc.act(best, torch.ones(2, 1))[0].tolist() == [1, 1]


def test_pictures_are_imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discrete actions from a dict of a picture, bytes and an integer: the parity of the step is the brightness."""
    space = gs.Dict({"eye": gs.Box(0, 255, (12, 12, 1), np.uint8), "room": gs.Discrete(3)})
    data = chain()
    bright = (200 * data.action).view(-1, 1, 1, 1).expand(-1, 12, 12, 1).byte()
    obs = {"eye": bright, "room": torch.full((len(bright),), 1)}
    monkeypatch.setattr(offline, "read", lambda *_: dataclasses.replace(data, obs=obs))
    env = SimpleNamespace(spaces=ENV.spaces._replace(obs=space))
    state = last(bc, dataclasses.replace(CONFIG, steps=10, images="vit:12"), env)
    assert torch.equal(bc.act(state, trees.pick(obs, data.rows))[0], data.action[data.rows])
    assert (state.policy.inputs.mean == 0).all() and (state.policy.inputs.std == 1).all()  # one-hot is not scaled


def test_masked_actions_are_not_taken_nor_trained_against() -> None:
    space = gs.Dict({"seen": gs.Box(0, 1, (1,), np.float32), "action_mask": gs.MultiBinary(2)})
    state = bc.build(CONFIG, ENV.spaces._replace(obs=space))
    with torch.no_grad():
        state.policy.head.bias[1] = 100.0
    masks = torch.tensor([[1, 1], [1, 0], [0, 1]], dtype=torch.int8)
    obs = {"seen": torch.ones(3, 1), "action_mask": masks}
    assert bc.act(state, obs)[0].tolist() == [1, 0, 1]
    only = {"seen": torch.ones(1, 1), "action_mask": masks[1:2]}
    assert bc.update(state, only, torch.tensor([0]))["loss"] == 0  # there was no other action


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="share must be between"):
        last(bc, dataclasses.replace(CONFIG, share=0), ENV)
    monkeypatch.setattr(offline, "read", lambda *_: dataclasses.replace(chain(), reward=torch.zeros(48)))
    with pytest.raises(UserError, match=r"The data have no rewards.*behavior_cloning --share 1"):
        last(bc, dataclasses.replace(CONFIG, share=0.1), ENV)
    assert last(bc, dataclasses.replace(CONFIG, steps=1), ENV).step == 1  # of all episodes rewards are not read
    monkeypatch.undo()
    with pytest.raises(UserError, match="No data given"):
        last(bc, dataclasses.replace(CONFIG, data=()), ENV)
    with pytest.raises(UserError, match="There are no episodes in nowhere"):
        last(bc, dataclasses.replace(CONFIG, data=("nowhere",)), ENV)
