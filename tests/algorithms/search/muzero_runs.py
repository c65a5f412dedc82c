"""Short runs and two sequences by hand for tests of MuZero and its variants."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from gymnasium import spaces as gs

from foresight.algorithms.search import efficientzero, gumbel_muzero, muzero, sampled_muzero, stochastic_muzero
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Feedback, Spaces
from foresight.envs.make import make
from foresight.training.options import build_config

DISCRETE = [muzero, gumbel_muzero, efficientzero, stochastic_muzero]


ALL = [*DISCRETE, sampled_muzero]


SMALL: dict[str, Any] = {
    "steps": 400, "num_envs": 4, "simulations": 4, "unroll_steps": 3, "n_steps": 3, "batch_size": 8, "train_every": 40,
    "collect_steps": 10, "learning_starts": 80, "latent_size": 8, "hidden": (16,), "target_every": 2,
}  # fmt: skip


def small(module: ModuleType, **fields: Any) -> tuple[Any, Any, Any]:
    config = build_config(module.Config, **{**SMALL, **fields})
    env = make("Pendulum-v1" if module is sampled_muzero else "CartPole-v1", num_envs=config.num_envs)
    return config, env, module.build(config, env.spaces)


def name(module: ModuleType) -> str:
    return module.__name__.rsplit(".", 1)[-1]


def sequences(module: ModuleType, state: Any, steps: int = 6) -> Trajectory:
    """Two sequences by hand: the first terminates after step 2, the second is truncated after step 1."""
    actions, g = 2, torch.Generator().manual_seed(0)
    zeros = torch.zeros(2, steps)
    reward = torch.tensor([[1.0, 2.0, 3.0, 50.0, 60.0, 70.0], [4.0, 5.0, 80.0, 90.0, 10.0, 20.0]])
    discount, cut = torch.ones(2, steps), zeros.clone()
    discount[0, 2], cut[0, 2], cut[1, 1] = 0.0, 1.0, 1.0
    obs = torch.randn(2, steps, 4, generator=g)
    extras = {
        "weights": torch.softmax(torch.randn(2, steps, actions, generator=g), -1),
        "next_obs": torch.randn(2, steps, 4, generator=g), "born": torch.zeros(2, steps, dtype=torch.int64),
    }  # fmt: skip
    return Trajectory(obs, zeros.long(), reward, discount, cut, torch.ones(2, steps), extras=extras)


class Bandit:
    """Fifty choices, of which every third is legal; the higher, the better."""

    name = "bandit"
    spaces = Spaces(gs.Dict({"x": gs.Box(0, 1, (1,)), "action_mask": gs.MultiBinary(50)}), gs.Discrete(50))

    def __init__(self, num_envs: int = 4) -> None:
        self.num_envs = num_envs

    def reset(self, seed: int) -> Any:
        mask = (torch.arange(50) % 3 == 1).to(torch.int8).expand(self.num_envs, 50)
        return {"x": torch.zeros(self.num_envs, 1), "action_mask": mask}

    def step(self, action: torch.Tensor) -> Feedback:
        assert (action % 3 == 1).all(), "not legal"
        obs, zero, one = self.reset(0), torch.zeros(self.num_envs), torch.ones(self.num_envs)
        return Feedback(obs, action / 49, zero, one, one, obs, {"episode_return": [], "episode_length": []})


def unmasked(seen: Any) -> Any:
    return lambda state, obs: (seen(state, obs)[0], None)
