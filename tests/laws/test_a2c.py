"""What must hold of A2C: its compiled gradient step is the readable one."""

from __future__ import annotations

import copy

import pytest
import torch

from foresight.algorithms.policy import a2c
from foresight.ops import returns
from tests.algorithms.policy.small_envs import Gymnasium
from tests.algorithms.states import weights
from tests.sabotage import change, sabotaged_by

CARTPOLE = a2c.Config(steps=80, learning_rate=1e-2, entropy_coef=0.1, value_coef=0.7)


def _segment(state, env, lost):
    batch, *_ = a2c.rollout(state, env, env.reset(0))
    if lost:
        batch.mask[1, 2], batch.mask[5, 4] = 0, 0
    advantages, target = returns.gae(
        batch.reward, 0.99 * batch.discount, batch.cut, batch.value, batch.next_value, 0.95, batch.mask
    )
    return batch, advantages, target


@sabotaged_by(
    "foresight.ops.fused.weighted.weighted_step",
    change("weights", lambda w: w._replace(max_norm=1e9)),
    change("weights", lambda w: w._replace(entropy_coef=0.0)),
    change("weights", lambda w: w._replace(value_coef=1.0)),
    change("rmsprop", lambda r: r._replace(decay=0.9)),
    change("rmsprop", lambda r: r._replace(eps=0.1)),
)
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("options", [{}, {"activation": "relu", "hidden": (32,), "normalize_advantage": True}])
def test_the_compiled_step_is_the_readable_one(options, lost):
    """Weights, mean squares and losses after four steps, of which each is clipped; with and without lost rows."""
    env = Gymnasium("CartPole-v1")
    *_, (_, _, state) = a2c.train(a2c.Config(**{**vars(CARTPOLE), **options}), env)
    states = [state, copy.deepcopy(state)]
    for _ in range(4):
        batch, *rest = _segment(state, env, lost)
        batch = batch.replace(reward=10 * batch.reward)
        losses = [
            way(one, batch, *rest) for way, one in zip((a2c.descend, a2c.descend.__wrapped__), states, strict=True)
        ]
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)
    for a, b in zip(*([weights(x), *x.optimizer.state_dict()["state"][0].values()] for x in states), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5)


def test_what_has_no_compiled_step_takes_the_readable_one(monkeypatch):
    calls = []
    monkeypatch.setattr(a2c.optim, "descend", lambda *args: calls.append(args))
    for options in ({"normalize_obs": True}, {"hidden": (256, 256)}, {"activation": "elu"}, {"memory": "gru"}, {}):
        config, before = a2c.Config(**options), len(calls)
        env = Gymnasium("CartPole-v1")
        state = a2c.build(config, env.spaces)
        assert a2c.descend(state, *_segment(state, env, False)).shape == (3,)  # {}: RMSProp has no state yet
        assert len(calls) == before + 1
