"""The Trajectory Transformer: bins, what tokens see, plans with and without a cache, probabilities, and mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.sequence import trajectory_transformer as tt
from foresight.data.episodes import Episodes
from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.nets.sequence.trajectory import Bins
from foresight.training import offline
from tests.algorithms.sequence.chain import ENV, SPACES, chain
from tests.algorithms.small_runs import last
from tests.algorithms.states import forgets, restored, stopped_and_whole, weights
from tests.sabotage import change, sabotaged_by

CONFIG = tt.Config(
    steps=60, data=("d",), gamma=1.0, bins=4, window=2, context=1, horizon=1, beam_width=4, batch_size=16, dim=8,
    layers=1, heads=1, dropout=0, lr_warmup=10, top_p=0.99,
)  # fmt: skip
BOX = Spaces(gs.Box(-1, 1, (2,), np.float32), gs.Box(-1, 1, (2,), np.float32))


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain as the data."""
    monkeypatch.setattr(offline, "read", lambda *_: chain())


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in ("net", "optimizer", "sampler")])
def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    stopped, whole = stopped_and_whole(tt, CONFIG, _env)
    resumed = last(tt, CONFIG, ENV, restored(tt, stopped, ENV))
    assert stopped.step == 50 and resumed.step == 60 and torch.equal(weights(resumed), weights(whole))


def _env() -> Any:
    return ENV


@sabotaged_by("foresight.nets.sequence.trajectory.Bins.encode", change("values", lambda x: x + 1))
def test_bins_have_equally_many_data_or_equal_widths() -> None:
    numbers = torch.tensor([[0.0, 7, 2], [1, 7, 0], [2, 7, 1], [100, 7, 2]])
    for quantiles, first in ((True, [0, 1, 2, 3]), (False, [0, 0, 0, 3])):
        bins = Bins(3, 4)
        bins.fit(numbers, quantiles, {2: 3})
        tokens = bins.encode(numbers)
        assert tokens[:, 0].tolist() == first and tokens[:, 2].tolist() == [2, 0, 1, 2]
        assert bins.decode(tokens)[:, 1].tolist() == [7] * 4 and bins.decode(tokens)[:, 2].tolist() == [2, 0, 1, 2]
    assert bins.decode(torch.tensor([[0, 0, 0], [3, 1, 3]])).tolist() == [[1, 7, 0], [100, 7, 2]]
    assert bins.encode(torch.tensor([[-9.0], [9e9]])).flatten().tolist() == [0, 3]  # beyond the data
    assert bins.expected(torch.tensor([[0.0, -99, -99, 0]]), 0).item() == pytest.approx(50.5)


def test_a_rare_number_above_a_frequent_one_has_a_token_of_its_own() -> None:
    bins, rewards = Bins(2, 4), torch.zeros(200, 2)
    rewards[:3, 0], rewards[:100, 1], rewards[:3, 1] = 1.0, 2.0, 5.0
    bins.fit(rewards, True, {})
    tokens = bins.encode(rewards)
    assert bins.decode(tokens)[:, 0].tolist() == rewards[:, 0].tolist()
    assert bins.decode(tokens)[3:, 1].tolist() == rewards[3:, 1].tolist()
    assert (bins.edges.diff(dim=1) >= 0).all() and (tokens[0] > tokens[3]).all() and (tokens[3] >= tokens[-1]).all()


@sabotaged_by("foresight.nets.sequence.trajectory._smooth", lambda real: lambda *shape: torch.randn(shape))
def test_tokens_of_near_numbers_begin_alike() -> None:
    """And of far ones they do not: the correlation of embeddings, over numbers that are so far from each other."""
    net = tt.build(dataclasses.replace(CONFIG, bins=100, dim=64), BOX).net
    for rows in (net.embed.weight.view(net.inputs, 100, 64)[0], net.heads[0].t()):
        alike = torch.corrcoef(rows.detach())
        assert alike.diagonal(1).mean() > 0.9 and alike.diagonal(30).mean() < 0.3
        assert 0.01 < rows.std() < 0.04


def _value_for_reward(tokens):
    return torch.cat([tokens[..., :-2], tokens[..., -1:], tokens[..., -1:]], -1)


@sabotaged_by("foresight.algorithms.sequence.trajectory_transformer.update", change("tokens", _value_for_reward))
def test_no_prediction_sees_returns_to_go() -> None:
    tokens, mask = torch.randint(0, 4, (8, 2, 4), generator=torch.Generator().manual_seed(0)), torch.ones(8, 2)
    first = tt.update(tt.build(CONFIG, SPACES), tokens, mask)
    other = torch.cat([tokens[..., :-1], 3 - tokens[..., -1:]], -1)
    second = tt.update(tt.build(CONFIG, SPACES), other, mask)
    assert (
        all(first[name] == second[name] for name in ("obs", "action", "reward")) and first["value"] != second["value"]
    )


@sabotaged_by("foresight.nets.sequence.trajectory.TrajectoryTransformer.forward",
              change("tokens", lambda x: x.flip(2)))  # fmt: skip
def test_a_token_is_predicted_before_it_is_seen() -> None:
    config = dataclasses.replace(CONFIG, window=3)
    net = tt.build(config, BOX).net.eval()
    tokens = torch.randint(0, 4, (1, 3, 5), generator=torch.Generator().manual_seed(1))
    base, value = net(tokens, torch.ones(1, 3))
    for column in range(5):
        moved = tokens.clone()
        moved[:, 1, column] = 3 - moved[:, 1, column]
        logits, later = net(moved, torch.ones(1, 3))
        flat, before = logits.flatten(1, 2), base.flatten(1, 2)
        place = 5 + column  # its own output is the first that depends on it
        assert torch.equal(flat[:, :place], before[:, :place])
        assert not torch.allclose(flat[:, place], before[:, place], atol=1e-6)
        assert torch.equal(later[:, 0], value[:, 0]) and not torch.allclose(later[:, 1], value[:, 1], atol=1e-7)


@sabotaged_by("foresight.nets.sequence.transformer.Cache.select", change("rows", lambda rows: rows * 0))
@sabotaged_by("foresight.nets.sequence.trajectory.TrajectoryTransformer.start",
              change("mask", lambda mask: torch.ones_like(mask)))  # fmt: skip
def test_a_cached_plan_is_the_uncached_one() -> None:
    config = dataclasses.replace(CONFIG, bins=6, window=6, context=3, horizon=3, gamma=0.9, dim=16, layers=2, heads=2)
    state = tt.build(config, BOX)
    state.net.eval()
    torch.manual_seed(0)
    state.net.bins.fit(torch.randn(200, 6), True, {})
    with torch.no_grad():
        for p in state.net.parameters():
            p.add_(0.2 * torch.randn_like(p))
    numbers, obs, mask = torch.randn(2, 3, 5), torch.randn(2, 2), torch.tensor([[0.0, 0, 1], [1, 1, 1]])

    def plan(mask, cached=True):
        state.generator.manual_seed(0)
        with torch.no_grad():
            return tt.plan(state, numbers, mask, obs, cached)

    for real in (mask, torch.ones(2, 3)):
        ours, slow = plan(real), plan(real, cached=False)
        torch.testing.assert_close(ours.reward, slow.reward)
        torch.testing.assert_close(ours.features, slow.features)
        assert torch.equal(ours.first, slow.first) and torch.equal(ours.prefix.tokens, slow.prefix.tokens)
    before = plan(mask).reward
    numbers[0, :2] = 5  # what padding holds changes nothing
    torch.testing.assert_close(plan(mask).reward, before)


@sabotaged_by("foresight.algorithms.sequence.trajectory_transformer.rewarded", lambda f: lambda carry, reward: carry)
@sabotaged_by("foresight.algorithms.sequence.trajectory_transformer.reset_carry", lambda f: lambda carry, cut: carry)
def test_a_plan_follows_the_last_steps() -> None:
    state = tt.build(dataclasses.replace(CONFIG, context=2, window=3), SPACES)
    tt.read_files(state)
    carry, actions = None, []
    for t in range(3):
        action, _, carry = tt.act(state, torch.full((2, 1), float(t)), carry)
        actions.append(action)
        carry = tt.reset_carry(tt.rewarded(carry, torch.tensor([t + 1.0, 9])), torch.tensor([0, t == 1]))
    a = [x.tolist() for x in actions]
    assert carry["numbers"][0].tolist() == [[1, a[1][0], 2], [2, a[2][0], 3]]
    assert carry["numbers"][1, 1].tolist() == [2, a[2][1], 9] and carry["mask"].tolist() == [[1, 1], [0, 1]]


@sabotaged_by("foresight.algorithms.sequence.trajectory_transformer.update",
              change("tokens", lambda x: torch.cat([x[..., :-1], x[..., -1:].roll(1, 0)], -1)))  # fmt: skip
@sabotaged_by("foresight.nets.sequence.trajectory.TrajectoryTransformer.next_logits",
              change("column", lambda c: max(1, c - 1)))  # fmt: skip
def test_probabilities_and_returns_are_those_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """After action 0 the chain returns 0.625 on average, after action 1 it returns 1.375; both are equally likely.

    So the best of the beam begins with 1, and its return is that of (1, 1): 1.75.
    """
    config = dataclasses.replace(CONFIG, steps=100, batch_size=32, dim=16, learning_rate=2e-2, weight_decay=0,
                                 max_grad_norm=10, horizon=2, context=1, window=3, binning="uniform")  # fmt: skip
    every = torch.arange(32)  # all sequences in each batch: no noise
    rows = Episodes.window_rows
    monkeypatch.setattr(Episodes, "window_rows", lambda self, start, steps: rows(self, every, steps))
    timed = dataclasses.replace(chain(), obs=torch.arange(3.0).repeat(16)[:, None])  # the observation is the step
    monkeypatch.setattr(offline, "read", lambda *_: timed)
    state = last(tt, config, ENV)
    net = state.net.eval()
    obs = net.bins.encode(torch.zeros(2, 1))
    with torch.no_grad():
        prefix, features = net.start(obs, None)
        assert net.next_logits(features, 1).softmax(-1)[0, :2].tolist() == pytest.approx([0.5, 0.5], abs=0.03)
        prefix, features = net.read(prefix, torch.tensor([0, 1]))
        reward = net.next_logits(features, 2)
        assert net.bins.expected(reward, 2).tolist() == pytest.approx([0, 0], abs=0.03)
        _, features = net.read(prefix, reward.argmax(-1))
        assert net.bins.expected(net.value_head(features), 3).tolist() == pytest.approx([0.625, 1.375], abs=0.06)
        found = tt.plan(state, torch.zeros(1, 1, 3), torch.zeros(1, 1), torch.zeros(1, 1))
    assert found.first.tolist() == [[1]] and found.reward.item() == pytest.approx(1.75, abs=0.1)


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for fields, message in (
        ({"horizon": 2}, r"context 1 and horizon 2 are more than the window of 2 .*--window 3"),
        ({"binning": "tiles"}, "Unknown binning 'tiles'"),
        ({"bins": 1}, "bins must be at least 2"),
        ({"top_p": 0.0}, "top_p must be more than 0"),
    ):
        with pytest.raises(UserError, match=message):
            tt.build(dataclasses.replace(CONFIG, **fields), SPACES)
    with pytest.raises(UserError, match="bins must be at least 9"):
        tt.build(CONFIG, Spaces(SPACES.obs, gs.Discrete(9)))
    with pytest.raises(UserError, match="Discrete or Box with one dim"):
        tt.build(CONFIG, Spaces(gs.Box(0, 1, (2, 2), np.float32), gs.Discrete(2)))
    silent = chain()
    silent.reward.zero_()
    monkeypatch.setattr(offline, "read", lambda *_: silent)
    with pytest.raises(UserError, match="have no rewards"):
        last(tt, CONFIG, ENV)
