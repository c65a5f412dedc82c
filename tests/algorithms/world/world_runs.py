"""Short runs of agents with world models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pytest
import torch

from foresight.algorithms.world import dreamer, storm
from foresight.envs.base import Spaces
from tests.algorithms.policy.small_envs import Bandit
from tests.nets.models.test_storm import assert_earned_before

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


def taught(
    module: Any,
    config: Any,
    env: Bandit,
    monkeypatch: pytest.MonkeyPatch,
    state: Any = None,
    watch: Callable[[dict[str, float], Any], None] = lambda metrics, state: None,
    worst: float = -math.inf,
) -> Any:
    """The state in which sampled actions first earn 0.9 on average; an error if they do not within `config.steps`.

    Few actions are right by luck, but not with confidence. This is looked at every 32 steps, and `watch` is called.
    Actions that earn less than `worst` are wrong with confidence, and stay so: an error at once.
    """
    monkeypatch.setattr(module, "REPORT", 32)
    earned = 0.0
    for _, metrics, now in module.train(config, env, state):
        watch(metrics, now)
        earned = float(sampled_reward(module, now, env).mean())
        if earned > 0.9:
            return now
        assert earned > worst, f"The actions earn {earned:.2f} after {now.step} steps."
    raise AssertionError(f"The actions earn {earned:.2f} after {config.steps} steps.")


def watch_rows(metrics: dict[str, float], state: Any) -> None:
    """Shifted rows are seen early."""
    if "entropy" in metrics and state.gradient_steps <= 24:
        before = state.sampler.get_state()
        sampled = storm.sample(state, 16, 4) if isinstance(state, storm.State) else dreamer.sample(state)[1:]
        state.sampler.set_state(before)
        assert_earned_before(*sampled)


def sampled_reward(module: Any, state: Any, env: Bandit) -> torch.Tensor:
    """What actions that are sampled earn `[B]` in 256 environments like `env`, after which nothing has changed."""
    drawn = [state.generator.get_state(), state.step]
    wide = copy.copy(env)
    wide.num_envs, state.step = 256, state.config.learning_starts
    found = reward_of(module, state, wide, explore=True)
    state.generator.set_state(drawn[0])
    state.step = drawn[1]
    return found


def near(num_envs: int = 8) -> Bandit:
    """One state, actions in units of the environment; the best earns 1, the center of the bounds -0.6."""
    space = gs.Box(np.array([-2, 0], np.float32), np.array([2, 4], np.float32))
    spaces, goal = Spaces(gs.Box(0, 1, (1,), np.float32), space), torch.tensor([-1.8, 0.2])
    return Bandit(
        spaces, 1, lambda c: torch.ones(len(c), 1), lambda c, a: 1 - (a - goal).square().sum(-1) / 4, num_envs
    )
