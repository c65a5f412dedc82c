"""Actions that features describe: their order changes nothing, and what the mask leaves out is not read."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.policy import off_policy_ac, reinforce, trpo
from foresight.envs.base import Spaces
from foresight.nets import encoders, heads
from foresight.nets.actor_critic import ActorCritic
from foresight.nets.scored_actions import ScoredActions
from tests.algorithms.policy.small_envs import Bandit
from tests.sabotage import sabotaged_by

SPACE = gs.Dict({"action_features": gs.Box(-1, 1, (5, 3), np.float32), "action_mask": gs.MultiBinary(5)})


def network() -> ActorCritic:
    torch.manual_seed(0)
    body = encoders.actor_critic_body(SPACE, (5, 1), (1.0, 1.0), (16,))
    assert isinstance(body, ScoredActions)
    return ActorCritic(body, heads.CategoricalHead(5), heads.ScalarHead(), None, encoders.mask_key(SPACE))


def unmasked(original):
    return lambda self, obs: original(self, {**obs, "action_mask": torch.ones_like(obs["action_mask"])})


@sabotaged_by("foresight.nets.scored_actions.ScoredActions._read", unmasked)
def test_order_changes_nothing_and_masked_actions_are_not_read() -> None:
    net, draw = network(), torch.Generator().manual_seed(1)
    features = torch.randn(2, 5, 3, generator=draw)
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]])
    order = torch.tensor([3, 0, 4, 1, 2])
    policy, value = net({"action_features": features, "action_mask": mask})
    moved, same = net({"action_features": features[:, order], "action_mask": mask[:, order]})
    torch.testing.assert_close(moved.logps, policy.logps[:, order])
    torch.testing.assert_close(same.value, value.value)
    other = torch.where(mask.bool().unsqueeze(-1), features, 9.0)
    read, kept = net({"action_features": other, "action_mask": mask})
    torch.testing.assert_close(read.logps, policy.logps)
    torch.testing.assert_close(kept.value, value.value)
    assert policy.logps[0, 2] < -1e30
    torch.testing.assert_close(net.policy({"action_features": features, "action_mask": mask}).logps, policy.logps)


def test_a_row_without_actions_is_finite() -> None:
    policy, value = network()({"action_features": torch.zeros(1, 5, 3), "action_mask": torch.zeros(1, 5)})
    assert policy.logps.isfinite().all() and value.value.isfinite().all()


@pytest.mark.parametrize(
    "module", [off_policy_ac, reinforce, trpo], ids=lambda module: module.__name__.rpartition(".")[2]
)
def test_agents_with_a_network_for_the_value_alone_train(module: ModuleType) -> None:
    shown = {"action_features": torch.eye(5)[:, :3].expand(8, 5, 3), "action_mask": torch.ones(8, 5, dtype=torch.int8)}
    env = Bandit(Spaces(SPACE, gs.Discrete(5)), 1, lambda context: shown, lambda context, action: action == 0)
    options = {} if module is reinforce else {"rollout_steps": 4}
    config = module.Config(steps=32, num_envs=8, hidden=(4,), **options)
    *_, (step, metrics, state) = module.train(config, env)
    assert step >= 32 and all(map(math.isfinite, metrics.values()))
    assert state.network.value(shown).value.shape == (8,)
