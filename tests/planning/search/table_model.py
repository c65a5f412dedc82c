"""Tabular MDPs as search models: states are integers, and all values can be computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TableModel:
    """`next`, `reward`, `discount` `[S, A]`, `logits` `[S, A]`, `value` `[S]`; observations are states."""

    def __init__(self, env: dict[str, Any]) -> None:
        self.next = torch.as_tensor(env["next"])
        self.reward, self.discount, self.logits, self.value = (
            torch.as_tensor(env[key], dtype=torch.float32) for key in ("reward", "discount", "logits", "value")
        )

    def root(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.logits[obs], self.value[obs], obs

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        after = self.next[state, action]
        reward, discount = self.reward[state, action], self.discount[state, action]
        return after, reward, discount, self.logits[after], self.value[after]


def random_tables(seed: int, states: int = 12, actions: int = 4, gamma: float = 0.9) -> dict[str, Tensor]:
    """A deterministic MDP with random rewards, with random logits and values."""
    g = torch.Generator().manual_seed(seed)
    return {
        "next": torch.randint(states, (states, actions), generator=g),
        "reward": torch.rand(states, actions, generator=g) * 2 - 1,
        "discount": torch.full((states, actions), gamma),
        "logits": torch.randn(states, actions, generator=g),
        "value": torch.randn(states, generator=g) * 0.5,
    }


def action_values(env: dict[str, Tensor], policy: Tensor | None = None, sweeps: int = 400) -> Tensor:
    """Q `[S, A]` of `policy` `[S, A]` (the best one if None), by sweeps."""
    q = torch.zeros_like(env["reward"], dtype=torch.float64)
    for _ in range(sweeps):
        value = q.amax(1) if policy is None else (policy * q).sum(1)
        q = env["reward"].double() + env["discount"].double() * value[env["next"]]
    return q
