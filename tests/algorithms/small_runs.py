"""Short runs that tests of several algorithms share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs

from foresight.envs.base import Spaces
from tests.algorithms.policy.small_envs import Bandit

GAMMA = 0.8


def last(module: Any, config: Any, env: Any, state: Any = None) -> Any:
    """The state that a run ends with."""
    *_, (_, _, state) = module.train(config, env, state)
    return state


def time_limit_ends(original):
    """Take every cut for a termination."""
    return lambda self, row, final: original(self, {**row, "discount": row["discount"] * (1 - row["cut"])}, final)


def bandit(action: gs.Space, reward) -> Bandit:
    """One state, one-step episodes."""
    spaces = Spaces(gs.Box(0, 1, (1,), np.float32), action)
    return Bandit(spaces, 1, lambda c: torch.ones(len(c), 1), reward)
