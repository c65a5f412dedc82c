"""Running normalizers: their buffers are updated explicitly and saved with the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foresight.data.trajectory import Trajectory
from foresight.ops import returns, transforms


class Moments(nn.Module):
    """Running mean and variance, in float64 (Chan et al. 1979, parallel update)."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, shape: Sequence[int] = ()) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("variance", torch.ones(tuple(shape), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Update with `rows` `[N, *shape]`; N may be 0."""
        if rows.shape[0]:
            seen = transforms.Moments(self.count, self.mean, self.variance)
            for buffer, merged in zip(seen, transforms.merge_moments(seen, transforms.moments(rows)), strict=True):
                buffer.copy_(merged)


class ObsNormalizer(nn.Module):
    """(obs - mean) / std, clipped to ±`clip` (PPO details 28 and 29).

    `forward` never changes the statistics: call `update` with training observations, and only with them.
    """

    def __init__(self, shape: Sequence[int], clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.moments, self.clip, self.epsilon = Moments(shape), clip, epsilon

    def update(self, obs: Tensor) -> None:
        """Update with observations `[N, *shape]`."""
        self.moments.update(obs)

    def forward(self, obs: Tensor) -> Tensor:
        """Normalized observations, float32 `[..., *shape]`."""
        scale = (self.moments.variance + self.epsilon).rsqrt().float()
        return ((obs - self.moments.mean.float()) * scale).clamp_(-self.clip, self.clip)


class RewardScaler(nn.Module):
    """Reward divided by the running standard deviation of the discounted return (PPO details 30 and 31).

    Not centered: shifting the reward would change the task wherever episodes end. Each of the `num_envs` environments
    has its own running return G ← gamma·G + reward, reset at a cut.
    """

    running: Tensor

    def __init__(self, num_envs: int, gamma: float, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.moments, self.gamma, self.clip, self.epsilon = Moments(), gamma, clip, epsilon
        self.register_buffer("running", torch.zeros(num_envs, dtype=torch.float64))

    def restart(self) -> None:
        """Reset the running returns (the environments were reset), keep the statistics."""
        self.running.zero_()

    @torch.no_grad()
    def update(self, reward: Tensor, cut: Tensor, mask: Tensor | None = None) -> None:
        """Update with rewards `[B, T]` in time order; steps with `mask` 0 do not enter the statistics."""
        keep = self.gamma * (1 - cut.double())
        decay = torch.cat([torch.full_like(keep[:, :1], self.gamma), keep[:, :-1]], 1)
        running = returns.forward(reward.double(), decay, self.running)
        self.moments.update(running.flatten() if mask is None else running[mask > 0])
        self.running.copy_(running[:, -1] * (1 - cut[:, -1]))

    def forward(self, reward: Tensor) -> Tensor:
        """Scaled rewards, the shape and dtype of `reward`."""
        scale = (self.moments.variance + self.epsilon).rsqrt()
        return (reward * scale).clamp_(-self.clip, self.clip).to(reward.dtype)


def reward_scaler(config: Any, device: str | torch.device) -> RewardScaler | None:
    """The scaler that the `normalize_reward` of `config` asks for, on `device`; None without it."""
    return RewardScaler(config.num_envs, config.gamma).to(device) if config.normalize_reward else None


def scaled(scaler: RewardScaler | None, batch: Trajectory) -> Tensor:
    """The rewards `[B, T]` of `batch`, scaled after an update of the statistics; unchanged without a scaler."""
    if scaler is None:
        return batch.reward
    scaler.update(batch.reward, batch.cut, batch.mask)
    return scaler(batch.reward)


class Scaled(Protocol):
    """A State whose rewards may be scaled."""

    reward_scaler: RewardScaler | None


def restart(state: Scaled) -> None:
    """Call this when the environments were reset: the running returns of a scaler begin at 0."""
    if state.reward_scaler is not None:
        state.reward_scaler.restart()
