"""Small batches and blank networks for tests of policy gradients: values that can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces as gs

from foresight.data.trajectory import Trajectory
from foresight.envs.base import Spaces
from foresight.ops import natural

TWO = Spaces(gs.Box(0, 1, (2,), np.float32), gs.Discrete(2))
LN2 = math.log(2)


def gradient(state, scalar: torch.Tensor) -> torch.Tensor:
    return natural.flatten(torch.autograd.grad(scalar, state.network.policy_parameters()))


def digits(**fields) -> Trajectory:
    """Three rows of state 0; γ is 0.1, so returns show their digits."""
    zeros, ones = torch.zeros(1, 3), torch.ones(1, 3)
    rows = Trajectory(
        torch.tensor([1.0, 0.0]).expand(1, 3, 2), torch.tensor([[0, 1, 1]]), torch.tensor([[1.0, 2.0, 3.0]]),
        discount=ones, cut=zeros, mask=ones, value=zeros, next_value=torch.tensor([[0.0, 0.0, 4.0]]),
    )  # fmt: skip
    return rows.replace(**fields)


def blank(module, spaces=TWO, **options):
    """A state whose networks are all zero: the policy is uniform, every value is 0."""
    config = module.Config(gamma=0.1, hidden=(), num_envs=1, **options)
    state = module.build(config, spaces)
    with torch.no_grad():
        for parameter in state.network.parameters():
            parameter.zero_()
    return state


def mean_divergence(before, after) -> float:
    """The mean KL, by torch's own distributions."""
    laws = [
        torch.distributions.Categorical(logits=o.logits)
        if hasattr(o, "logits")
        else torch.distributions.Independent(torch.distributions.Normal(o.location, o.std), 1)
        for o in (before, after)
    ]
    return torch.distributions.kl_divergence(*laws).mean().item()
