"""Two actions, and a return that is their sum, or by luck 1: all conditional probabilities are known."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import torch
from gymnasium import spaces as gs

from foresight.data import episodes
from foresight.data.episodes import Episodes
from foresight.envs.base import Spaces

SPACES = Spaces(gs.Box(0, 1, (1,), np.float32), gs.Discrete(2))
ENV = SimpleNamespace(spaces=SPACES, num_envs=1)


def chain(copies: int = 1) -> Episodes:
    """Every pair of actions, three times with its sum at the end and once with the return 1."""
    found = []
    for pair in itertools.product((0, 1), repeat=2):
        for total in (sum(pair), sum(pair), sum(pair), 1):
            obs, action = torch.ones(3, 1), torch.tensor([*pair, 0])
            reward = torch.tensor([0.0, float(total), 0.0])
            found.append(Episodes(obs, action, reward, torch.tensor([2]), torch.tensor([True])))
    return episodes.join(found * copies)
