"""Short runs of agents with world models."""

from __future__ import annotations

from typing import Any

import gymnasium.spaces as gs
import numpy as np
import torch

from foresight.algorithms.world import dreamer
from foresight.envs.base import Spaces
from tests.algorithms.policy.small_envs import Bandit

SMALL: dict[str, Any] = {
    "steps": 160, "num_envs": 8, "rollout_steps": 4, "learning_starts": 64, "train_ratio": 8.0, "batch_size": 16,
    "sequence_length": 4, "replay_size": 2_000, "horizon": 2, "learning_rate": 1e-2, "lr_warmup": 10,
}  # fmt: skip
SIZES: dict[str, Any] = {"deter": 32, "hidden": 16, "groups": 4, "classes": 4, "blocks": 2, "units": 16, "layers": 1}
DREAMER = dreamer.Config(**SMALL, **SIZES, depth=2, entropy_coef=3e-2)


@torch.no_grad()
def reward_of(module: Any, state: Any, env: Bandit, explore: bool = False) -> torch.Tensor:
    """What the agent's actions earn `[B]` in every context, in one-step episodes."""
    action, _, _ = module.act(state, env.reset(0), explore=explore)
    return env._reward(env._context, action).float()


def near(num_envs: int = 8) -> Bandit:
    """One state, actions in units of the environment; the best earns 1, the center of the bounds -0.6."""
    space = gs.Box(np.array([-2, 0], np.float32), np.array([2, 4], np.float32))
    spaces, goal = Spaces(gs.Box(0, 1, (1,), np.float32), space), torch.tensor([-1.8, 0.2])
    return Bandit(
        spaces, 1, lambda c: torch.ones(len(c), 1), lambda c, a: 1 - (a - goal).square().sum(-1) / 4, num_envs
    )
