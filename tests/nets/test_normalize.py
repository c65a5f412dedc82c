"""Running normalizers against numpy over everything that was seen."""

from __future__ import annotations

import copy
from types import ModuleType
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.policy import a2c, ppg, ppo, trpo
from foresight.envs.base import Spaces
from foresight.nets.normalize import Moments, ObsNormalizer, RewardScaler
from tests.sabotage import change, drop, sabotaged_by


@sabotaged_by("foresight.nets.normalize.Moments.update", change("rows", lambda x: x[:-1]))
def test_moments_are_numpys():
    generator = np.random.default_rng(0)
    parts = [generator.normal(5, 3, (n, 2)) for n in (1, 10, 100)]
    moments = Moments((2,))
    for part in [parts[0], np.zeros((0, 2)), *parts[1:]]:
        moments.update(torch.from_numpy(part))
    seen = np.concatenate(parts)
    np.testing.assert_allclose(moments.mean, seen.mean(0))
    np.testing.assert_allclose(moments.variance, seen.var(0))
    assert moments.count == 111


def test_observations_are_centered_scaled_and_clipped_without_changing_the_input():
    normalizer = ObsNormalizer((3,))
    x = torch.randn(1000, 3) * 4 + 7
    assert torch.equal(normalizer(x), x.clamp(-10, 10))  # nothing seen yet
    normalizer.update(x)
    before = copy.deepcopy(normalizer.state_dict())
    y = normalizer(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(y.std(0, correction=0), torch.ones(3), atol=1e-4, rtol=0)
    assert normalizer(torch.full((1, 3), 1e6)).tolist() == [[10.0] * 3]
    assert all(torch.equal(before[k], v) for k, v in normalizer.state_dict().items())  # looking is not learning
    fresh = ObsNormalizer((3,))
    fresh.load_state_dict(before)
    assert torch.equal(fresh(x), y)


def _slow(rewards: np.ndarray, cuts: np.ndarray, gamma: float) -> list[float]:
    """Gymnasium's NormalizeReward: G ← gamma·G + r, forgotten after a cut."""
    returns = []
    for b in range(len(rewards)):
        total = 0.0
        for reward, cut in zip(rewards[b], cuts[b], strict=True):
            total = gamma * total + reward
            returns.append(total)
            total *= 1 - cut
    return returns


@sabotaged_by(
    "foresight.nets.normalize.RewardScaler.update", change("cut", torch.zeros_like), change("cut", torch.ones_like)
)
def test_rewards_are_divided_by_the_spread_of_the_running_return():
    generator = np.random.default_rng(1)
    rewards, cuts = generator.normal(1, 2, (4, 60)), (generator.random((4, 60)) < 0.2).astype(float)
    scaler = RewardScaler(4, gamma=0.9)
    for start, stop in ((0, 1), (1, 25), (25, 60)):  # segments are seams, not ends
        scaler.update(torch.from_numpy(rewards[:, start:stop]).float(), torch.from_numpy(cuts[:, start:stop]).float())
    scale = np.std(_slow(rewards, cuts, 0.9))
    x = torch.tensor([[0.5, -0.5]])
    torch.testing.assert_close(scaler(x), x / float(scale), rtol=1e-5, atol=1e-6)
    assert scaler(torch.tensor([1e9])).item() == 10


@sabotaged_by("foresight.nets.normalize.RewardScaler.update", drop("mask"))
def test_rows_that_are_no_experience_are_not_counted():
    scaler = RewardScaler(1, gamma=0.9)
    reward, cut = torch.tensor([[1.0, 3.0, 0.0, 2.0]]), torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    scaler.update(reward, cut, torch.tensor([[1.0, 1.0, 0.0, 1.0]]))
    assert scaler.moments.count == 3
    np.testing.assert_allclose(scaler.moments.variance, np.var([1.0, 3.9, 2.0]))
    scaler.restart()
    assert scaler.running.tolist() == [0] and scaler.moments.count == 3


@sabotaged_by("foresight.nets.normalize.reward_scaler", change("device", lambda device: "cpu"))
@pytest.mark.parametrize("module", [a2c, ppg, ppo, trpo], ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_scaler_is_on_the_device_of_its_run(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Generator", "optim.Adam", "optim.RMSprop"):
        monkeypatch.setattr(f"torch.{name}", Mock())  # there are none on the device "meta"
    config = module.Config(normalize_reward=True, num_envs=2, hidden=(4,))
    scaler = module.build(config, Spaces(gs.Box(0, 1, (2,), np.float32), gs.Discrete(2)), "meta").reward_scaler
    assert {buffer.device.type for buffer in scaler.buffers()} == {"meta"}
