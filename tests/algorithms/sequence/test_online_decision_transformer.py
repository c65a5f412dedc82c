"""The Online Decision Transformer: the entropy constraint, its replay, resuming, learning, and mistakes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.sequence import online_decision_transformer as odt
from foresight.data import episodes
from foresight.data.episodes import Episodes
from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.training import offline
from tests.algorithms.sequence.chain import SPACES, chain
from tests.algorithms.small_runs import bandit, last
from tests.algorithms.states import forgets, restored, stopped_and_whole, weights
from tests.sabotage import change, sabotaged_by

CONFIG = odt.Config(
    steps=60, data=("d",), num_envs=8, pretrain_steps=20, gradient_steps=10, replay_size=20, context=2, batch_size=16,
    dim=8, layers=1, lr_warmup=10, dropout=0,
)  # fmt: skip


def _env():
    """The chain's spaces: each action ends the episode and is its reward."""
    return bandit(SPACES.action, lambda _, action: action.float())


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain as the data."""
    monkeypatch.setattr(offline, "read", lambda *_: chain())


@sabotaged_by("tests.algorithms.states.restored",
              *[forgets(x) for x in ("net", "optimizer", "log_alpha", "replay", "generator", "sampler")])  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    config = dataclasses.replace(CONFIG, alpha_learning_rate=0.1)
    stopped, whole = stopped_and_whole(odt, config, _env)
    resumed = last(odt, config, _env(), restored(odt, stopped, _env()))
    assert stopped.step == 50 and resumed.step == 60 and torch.equal(weights(resumed), weights(whole))
    assert resumed.env_steps == whole.env_steps == 32 and torch.equal(resumed.replay.reward, whole.replay.reward)


def test_integers_that_do_not_start_at_0_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "read", lambda *_: dataclasses.replace(chain(), obs=torch.full((48,), 2)))
    state = odt.build(CONFIG, SPACES._replace(obs=gs.Discrete(3, start=1)))
    odt.read_files(state)
    assert math.isfinite(odt.update(state, state.replay.windows(8, 2, state.sampler))["loss"])
    assert odt.act(state, torch.tensor([2, 3]), explore=True)[0].shape == (2,)


def test_the_replay_begins_with_the_best_and_drops_the_oldest() -> None:
    state = odt.build(CONFIG, SPACES)
    odt.read_files(state)
    assert len(state.replay) == 16 and state.replay.returns.tolist() == [0.0] * 3 + [1.0] * 10 + [2.0] * 3
    state.config = dataclasses.replace(CONFIG, replay_size=10)
    odt.read_files(state)
    assert state.replay.returns.tolist() == [1] * 7 + [2] * 3
    odt.rollout(state, _env())
    assert state.replay.returns[:2].tolist() == [2, 2] and state.replay.length.tolist() == [2, 2] + [1] * 8


@sabotaged_by("foresight.ops.policy.temperature_loss", change("entropy", lambda x: -x + 2))
@sabotaged_by("foresight.algorithms.sequence.online_decision_transformer.update",
              change("batch", lambda b: b._replace(action=b.action * 0)))  # fmt: skip
def test_the_entropy_is_kept_at_its_bound() -> None:
    """Episodes of return 2 have only actions 1: without the constraint their entropy would be 0, not 0.3 nats."""
    config = dataclasses.replace(CONFIG, target_entropy=0.3, alpha_learning_rate=0.05, learning_rate=1e-2,
                                 max_grad_norm=10, initial_alpha=0.01)  # fmt: skip
    state = odt.build(config, SPACES)
    odt.read_files(state)
    best = state.replay.highest(3)
    for _ in range(200):
        metrics = odt.update(state, best.windows(16, 2, state.sampler))
    assert metrics["entropy"] == pytest.approx(0.3, abs=0.05) and metrics["alpha"] > 0.05, metrics
    action = odt.act(state, torch.ones(1, 1))[0]
    assert action.tolist() == [1]


@sabotaged_by("foresight.nets.imitation.ActionDistribution.logp", change("action", lambda a: -a))
def test_actions_of_a_box_are_squashed_normals() -> None:
    """All recorded actions are 1.5 in [-1, 2]; half of all sampled ones are on each side of the mode."""
    spaces = Spaces(SPACES.obs, gs.Box(-1, 2, (1,), np.float32))
    found = episodes.join([Episodes(torch.ones(2, 1), torch.tensor([[1.5], [0]]), torch.tensor([1.0, 0]),
                                    torch.tensor([1]), torch.tensor([True]))] * 4)  # fmt: skip
    state = odt.build(dataclasses.replace(CONFIG, learning_rate=1e-2, max_grad_norm=10), spaces)
    assert odt.target_entropy(state) == -1
    state.net.fit(found)
    for _ in range(150):
        metrics = odt.update(state, found.windows(16, 2, state.sampler))
    action, _, carry = odt.act(state, torch.ones(200, 1))
    assert action.shape == (200, 1) and action[0].item() == pytest.approx(1.5, abs=0.1)
    sampled = odt.act(state, torch.ones(200, 1), explore=True)[0]
    assert sampled.min() > -1 and sampled.max() < 2 and sampled.std() > 0.005
    assert carry["action"][0, -1].item() == pytest.approx((action[0].item() - 0.5) / 1.5, abs=1e-5)
    edge = torch.tensor([[[-1.0], [2.0]]])
    assert bool(torch.isfinite(state.actions.logp(state.actions(torch.zeros(1, 2, 2)), edge)).all())
    assert math.isfinite(metrics["loss"])


def test_it_asks_for_more_to_explore() -> None:
    state = odt.build(dataclasses.replace(CONFIG, target_return=3.0, explore_return=6.0), SPACES)
    odt.read_files(state)
    for explore, asked in ((False, 3), (True, 6)):
        _, _, carry = odt.act(state, torch.ones(1, 1), explore=explore)
        assert carry["to_go"][0, -1] == asked
        carry = odt.reset_carry(odt.rewarded(carry, torch.ones(1)), torch.zeros(1))
        assert odt.act(state, torch.ones(1, 1), carry, explore)[2]["to_go"][0].tolist() == [asked, asked - 1]


@sabotaged_by("foresight.algorithms.sequence.online_decision_transformer.rollout", lambda f: lambda state, env: None)
def test_it_improves_on_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four arms that pay their number; the data have only arms 0 and 1. Exploration finds the others."""
    env = bandit(gs.Discrete(4), lambda _, action: action.float())
    found = [Episodes(torch.ones(2, 1), torch.tensor([arm, 0]), torch.tensor([float(arm), 0]), torch.tensor([1]),
                      torch.tensor([True])) for arm in (0, 1) * 8]  # fmt: skip
    monkeypatch.setattr(offline, "read", lambda *_: episodes.join(found))
    config = dataclasses.replace(CONFIG, steps=250, pretrain_steps=50, gradient_steps=5, replay_size=100, batch_size=32,
                                 target_return=3.0, target_entropy=0.7, alpha_learning_rate=0.05, learning_rate=1e-2,
                                 max_grad_norm=10)  # fmt: skip
    state = last(odt, config, env)
    assert odt.act(state, torch.ones(1, 1))[0].item() == 3 and state.replay.returns.max() == 3


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="initial_alpha must be above 0"):
        odt.build(dataclasses.replace(CONFIG, initial_alpha=0.0), SPACES)
    with pytest.raises(UserError, match="context must be at least 1"):
        odt.build(dataclasses.replace(CONFIG, context=0), SPACES)
    silent = chain()
    silent.reward.zero_()
    monkeypatch.setattr(offline, "read", lambda *_: silent)
    with pytest.raises(UserError, match="have no rewards"):
        last(odt, CONFIG, _env())
