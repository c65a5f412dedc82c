"""A time limit is no termination: policy gradients bootstrap from the final observation."""

from __future__ import annotations

import pytest
import torch

from foresight.algorithms.policy import a2c, off_policy_ac, ppg, qac, trpo
from tests.algorithms.policy.small_envs import Clock
from tests.sabotage import sabotaged_by


def _time_limit_ends(original):
    return lambda reward, discount, cut, *rest, **more: original(reward, discount * (1 - cut), cut, *rest, **more)


@sabotaged_by("foresight.ops.returns.gae", _time_limit_ends)
@sabotaged_by("foresight.ops.returns.lambda_return", _time_limit_ends)
@sabotaged_by("foresight.ops.returns.vtrace", _time_limit_ends)
def test_a_time_limit_is_no_termination():
    """Reward 1 for ever is worth 1 / (1 - 0.9) = 10, though every episode is cut after 8 steps."""
    settings = {
        a2c: {"learning_rate": 0.15, "max_grad_norm": 1e9},
        qac: {"value_learning_rate": 0.3, "max_grad_norm": 1e9},
        off_policy_ac: {"value_learning_rate": 0.1, "max_grad_norm": 1e9},
        trpo: {"value_learning_rate": 0.1, "value_batch": 64, "value_epochs": 2, "cg_iterations": 1},
        ppg: {
            "learning_rate": 0.15, "max_grad_norm": 1e9, "minibatches": 2, "normalize_reward": False,
            "policy_iterations": 16, "auxiliary_epochs": 1, "auxiliary_minibatches": 4,
        },
    }  # fmt: skip
    for module, options in settings.items():
        config = module.Config(steps=6_000, num_envs=8, rollout_steps=16, gamma=0.9, hidden=(), **options)
        *_, (_, _, state) = module.train(config, Clock())
        found = state.network.value(torch.ones(1, 1))
        value = found.max().item() if module is qac else found.value.item()
        assert value == pytest.approx(10, abs=0.5), module.__name__
