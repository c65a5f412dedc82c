"""Running normalizers: modules whose buffers are updated explicitly and saved with the policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foresight.data.trajectory import Trajectory
from foresight.ops import returns, transforms


class Moments(nn.Module):
    """Mean and variance of all rows seen so far, in float64 (Chan et al. 1979, parallel update)."""

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
        """Take in `rows` `[N, *shape]`. No rows change nothing."""
        if rows.shape[0]:
            seen = transforms.Moments(self.count, self.mean, self.variance)
            for mine, merged in zip(seen, transforms.merge_moments(seen, transforms.moments(rows)), strict=True):
                mine.copy_(merged)


class ObsNormalizer(nn.Module):
    """(obs - mean) / std, clipped to ±`clip` (PPO details 28 and 29).

    `forward` never changes the statistics: call `update` with training observations, and only with them.
    """

    def __init__(self, shape: Sequence[int], clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.moments, self.clip, self.epsilon = Moments(shape), clip, epsilon

    def update(self, obs: Tensor) -> None:
        """Take in observations `[N, *shape]`."""
        self.moments.update(obs)

    def forward(self, obs: Tensor) -> Tensor:
        """Normalized observations, float32 `[..., *shape]`."""
        scale = (self.moments.variance + self.epsilon).rsqrt().float()
        return ((obs - self.moments.mean.float()) * scale).clamp_(-self.clip, self.clip)


class RewardScaler(nn.Module):
    """Reward divided by the running standard deviation of the discounted return (PPO details 30 and 31).

    Not centered: a shifted reward would be another task wherever episodes end. Kept for `num_envs` worlds that are
    stepped together, because each has its own running return G ← gamma·G + reward, forgotten where it is cut.
    """

    running: Tensor

    def __init__(self, num_envs: int, gamma: float, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.moments, self.gamma, self.clip, self.epsilon = Moments(), gamma, clip, epsilon
        self.register_buffer("running", torch.zeros(num_envs, dtype=torch.float64))

    def restart(self) -> None:
        """Forget the running returns (the worlds were reset), keep the statistics."""
        self.running.zero_()

    @torch.no_grad()
    def update(self, reward: Tensor, cut: Tensor, mask: Tensor | None = None) -> None:
        """Take in rewards `[B, T]` in the order of time; rows with `mask` 0 are no experience."""
        keep = self.gamma * (1 - cut.double())
        decay = torch.cat([torch.full_like(keep[:, :1], self.gamma), keep[:, :-1]], 1)
        running = returns.forward(reward.double(), decay, self.running)
        self.moments.update(running.flatten() if mask is None else running[mask > 0])
        self.running.copy_(running[:, -1] * (1 - cut[:, -1]))

    def forward(self, reward: Tensor) -> Tensor:
        """Scaled rewards, the shape and dtype of `reward`."""
        scale = (self.moments.variance + self.epsilon).rsqrt()
        return (reward * scale).clamp_(-self.clip, self.clip).to(reward.dtype)


def scaled(scaler: RewardScaler | None, batch: Trajectory) -> Tensor:
    """The rewards `[B, T]` of `batch`, scaled by statistics that take them in first; as they are without a scaler."""
    if scaler is None:
        return batch.reward
    scaler.update(batch.reward, batch.cut, batch.mask)
    return scaler(batch.reward)  # type: ignore[no-any-return]
