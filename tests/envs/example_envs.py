"""Small environments and helpers for the tests of the environment contract."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.data.trajectory import Trajectory
from foresight.envs.base import Env
from foresight.ops import returns

COUNTER = "ForesightCounter-v0"
REUSING = "ForesightReusing-v0"


class Counter(gymnasium.Env[np.ndarray, Any]):
    """Deterministic: shows (episode, step, last action); action 2 ends it from step 3 on, worth 10."""

    def __init__(self) -> None:
        self.observation_space = gs.Box(-1.0, 1e6, (3,), np.float32)
        self.action_space = gs.Discrete(3)
        self._episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._episode = 0 if seed is not None else self._episode + 1
        self._at, self._last = 0, -1
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._at, self._last = self._at + 1, int(action)
        over = self._last == 2 and self._at >= 3
        return self._obs(), 10.0 if over else float(self._last), over, False, {}

    def _obs(self) -> np.ndarray:
        return np.array([self._episode, self._at, self._last], dtype=np.float32)


class Reusing(gymnasium.Env[Any, Any]):
    """Shows the step, in one array that it reuses for all observations."""

    def __init__(self, nested: bool = False) -> None:
        self._x, self._nested = np.zeros(1, np.float32), nested
        box = gs.Box(-1.0, 1e6, (1,), np.float32)
        self.observation_space = gs.Dict({"x": box}) if nested else box
        self.action_space = gs.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._x[:] = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._x += 1
        return self._obs(), 1.0, False, False, {}

    def _obs(self) -> Any:
        return {"x": self._x} if self._nested else self._x


class Odd(gymnasium.Env[Any, Any]):
    """Has spaces that are no tensors."""

    def __init__(self, obs: bool) -> None:
        good, bad = gs.Discrete(2), gs.Tuple((gs.Discrete(2), gs.Text(3)))
        self.observation_space, self.action_space = (bad, good) if obs else (good, bad)


for name, entry in ((COUNTER, Counter), (REUSING, Reusing), ("ForesightOdd-v0", Odd)):
    if name not in gymnasium.registry:
        gymnasium.register(name, entry)


def value(obs: Tensor) -> Tensor:
    """Some value of an observation, so that every wrong successor shows in the advantages."""
    return torch.sin(obs.float().reshape(len(obs), -1) * 0.7 + 0.3).sum(1)


def rollout(env: Env, actions: Tensor, seed: int = 0) -> Trajectory:
    """Real rows `[B, T]` under `actions` `[B, T, ...]`; `extras` hold the true successor and the advantages.

    Environment b takes actions[b, k] in its k-th real row, so that engines that spend rows on resets stay in step.
    """
    envs, steps = actions.shape[:2]
    obs = env.reset(seed)
    done = torch.zeros(envs, dtype=torch.long)
    every = torch.arange(envs)
    rows: list[dict[str, Tensor]] = []
    while (done < steps).any():
        action = actions[every, done.clamp(max=steps - 1)]
        f = env.step(action)
        mask = f.mask * (done < steps)
        row = dict(obs=obs, action=action, reward=f.reward, discount=f.discount, cut=f.cut, mask=mask)
        rows.append({**row, "after": f.final_obs, "value": value(obs), "next_value": value(f.final_obs)})
        done += (f.mask > 0).long()
        obs = f.obs
    out = {key: torch.stack([row[key] for row in rows], dim=1) for key in rows[0]}
    advantage, target = returns.gae(
        out["reward"], 0.9 * out["discount"], out["cut"], out["value"], out["next_value"], 0.8, out["mask"]
    )
    out.update(advantage=advantage, target=target)
    real = out["mask"].bool()
    kept = {key: torch.stack([x[b][real[b]] for b in range(envs)]) for key, x in out.items()}
    extras = {key: kept.pop(key) for key in ("after", "advantage", "target")}
    return Trajectory(**kept, extras=extras)


def same(a: Trajectory, b: Trajectory, atol: float = 1e-5) -> None:
    """Assert that two trajectories agree in every field."""
    for key in ("obs", "action", "reward", "discount", "cut", "value", "next_value"):
        _close(getattr(a, key), getattr(b, key), key, atol)
    for key in ("after", "advantage", "target"):
        _close(a.extras[key], b.extras[key], key, atol)


def _close(a: Tensor, b: Tensor, key: str, atol: float) -> None:
    assert a.shape == b.shape, f"{key}: {tuple(a.shape)} and {tuple(b.shape)}"
    torch.testing.assert_close(a.float(), b.float(), atol=atol, rtol=1e-5, msg=lambda m: f"{key}: {m}")
