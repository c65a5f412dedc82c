"""Agents with world models on small random MDPs: what the model predicts and what the critic settles at."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foresight.algorithms.world import dreamer, storm
from foresight.nets.outputs import Categorical
from tests.fixed_points import mdps
from tests.sabotage import change, sabotaged_by

GAMMA = 0.8
# Free nats leave the prior, and with it what is imagined, imprecise: few of them.
DREAMER = dreamer.Config(
    steps=10**9, num_envs=256, rollout_steps=8, learning_starts=0, train_ratio=1e-9, batch_size=64, sequence_length=3,
    replay_size=40_960, horizon=2, learning_rate=1e-2, lr_warmup=10, gamma=GAMMA, slow_critic_rate=0.1,
    deter=32, hidden=32, groups=4, classes=4, blocks=1, units=32, layers=1, free_nats=0.1,
)  # fmt: skip

STORM = storm.Config(
    steps=10**9, num_envs=256, rollout_steps=8, learning_starts=0, train_every=10**9, batch_size=64, sequence_length=4,
    replay_size=40_960, imagined_batch=256, context=2, horizon=4, learning_rate=1e-2, agent_learning_rate=1e-2,
    gamma=GAMMA, slow_critic_rate=0.1, width=16, sequence_layers=1, heads=2, dropout=0.0, groups=4, classes=4, units=32,
    layers=1, free_nats=0.1,
)  # fmt: skip
UPDATES: dict[str, tuple[Any, Any, Callable[[Any], object]]] = {
    "dreamer": (dreamer, DREAMER, lambda state: dreamer.update(state, *dreamer.sample(state))),
    "storm": (storm, STORM, storm.update),
}


class Always:
    """The policy that takes one action."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __call__(self, features: Tensor) -> Categorical:
        return Categorical(self.logits.expand(len(features), -1))

    def action_features(self, action: Tensor) -> Tensor:
        return torch.eye(len(self.logits))[action]


@torch.no_grad()
def predictions(state: Any, mdp: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of every state, as the first of an episode: its value `[S]`, reward and discount of each action `[S, A]`."""
    model, one = state.model, torch.zeros(mdp.states * 64, 1)
    obs = mdps.observations(mdp).repeat_interleave(64, 0).unsqueeze(1)
    seen = model.observe(
        model.initial(len(one)), obs, one.unsqueeze(-1).expand(-1, -1, mdp.actions), one, state.generator
    )
    value = state.critic(model.features(seen)).mean()[:, 0]
    root = {name: x[:, 0] for name, x in seen.items()}
    rewards, discounts = [], []
    for a in range(mdp.actions):
        certain = Always(torch.full((mdp.actions,), -100.0).index_fill(0, torch.tensor(a), 0.0))
        steps, _ = model.imagine(root, certain, 1, state.generator)
        rewards.append(steps.reward.view(mdp.states, -1).mean(1))
        discounts.append(steps.discount.view(mdp.states, -1).mean(1))
    return value.view(mdp.states, -1).mean(1), torch.stack(rewards, 1), torch.stack(discounts, 1)


@functools.cache
def trained(name: str) -> tuple[Any, Any]:
    """The problem and an agent close to its solution. The policy is uniform, by a share of 1 of uniform probability."""
    algorithm, config, update = UPDATES[name]
    mdp = mdps.random_mdp(7, states=3, actions=2, ends=0.2)
    env = mdps.Tabled(mdp, config.num_envs)
    state = algorithm.build(config, env.spaces)
    state.actor.unimix = 1.0
    obs, carry = env.reset(0), None
    for _ in range(20):
        segment, obs, carry = algorithm.rollout(state, env, obs, carry)
        algorithm.learn(state, segment)
    fast, slow = (200, 60) if name == "dreamer" else (200, 40)
    for _ in range(fast):
        update(state)
    for optimizer in {id(x): x for x in (state.optimizer, getattr(state, "agent_optimizer", state.optimizer))}.values():
        optimizer.param_groups[0]["lr"] = 2e-3
    for _ in range(slow):
        update(state)
    return mdp, state


@pytest.mark.slow
@sabotaged_by("foresight.ops.returns.lambda_return", change("discount", lambda d: 0.8 * d))
@pytest.mark.parametrize("name", list(UPDATES))
def test_it_settles_at_the_values_of_its_policy(name: str) -> None:
    """The twin leaves the solution, at which the sound test arrived before it."""
    mdp, state = copy.deepcopy(trained(name))
    seen = []
    for i in range(80):
        UPDATES[name][2](state)
        if i >= 40 and i % 4 == 0:
            seen.append(predictions(state, mdp))
    value, reward, discount = (torch.stack(x).mean(0) for x in zip(*seen, strict=True))
    exact = mdps.policy_values(mdp, mdp.uniform(), GAMMA).float()
    ended = 1 - mdps.transition(mdp).sum(-1).float()
    assert exact.std() > 0.4 and ended.std() > 0.05
    torch.testing.assert_close(value, exact, atol=0.12, rtol=0)
    torch.testing.assert_close(reward, mdp.reward.float(), atol=0.12, rtol=0)
    torch.testing.assert_close(discount, GAMMA * (1 - ended), atol=0.05, rtol=0)
