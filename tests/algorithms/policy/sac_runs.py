"""Short runs of SAC and discrete SAC."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces as gs

from foresight.algorithms.policy import sac, sac_discrete
from foresight.envs.base import Spaces
from tests.algorithms.policy.small_envs import Bandit

COMMON = {"steps": 800, "num_envs": 8, "learning_starts": 64, "train_every": 8, "batch_size": 32, "replay_size": 4_000}
SAC = sac.Config(**COMMON, hidden=(16,), learning_rate=5e-3, entropy_temperature=0.1)
DISCRETE = sac_discrete.Config(**COMMON, hidden=(16,), learning_rate=5e-3, entropy_temperature=0.1)


def aim(contexts: int = 4) -> Bandit:
    """The context gives the right action, in units of the environment; a random policy earns about -1."""
    goals = torch.stack([torch.linspace(-1, 1, contexts), torch.linspace(1, 3, contexts)], -1)
    space = gs.Box(np.array([-2, 0], np.float32), np.array([2, 4], np.float32))
    spaces = Spaces(gs.Box(0, 1, (contexts,), np.float32), space)
    return Bandit(spaces, contexts, lambda c: torch.eye(contexts)[c], lambda c, a: -(a - goals[c]).square().sum(-1))
