"""IMPALA: its update against the definition, time limits and lost rows, resuming, spaces and mistakes."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.algorithms.policy import impala
from foresight.data import trees
from foresight.envs.base import Spaces
from foresight.errors import UserError
from tests.algorithms.policy.small_envs import Bandit, Clock, choice
from tests.algorithms.states import weights
from tests.sabotage import change, flip_sign, sabotaged_by

SMALL = impala.Config(
    steps=1024, num_envs=8, rollout_steps=8, rollouts_per_update=2, hidden=(16,), optimizer="adam", learning_rate=3e-3
)


def _last(config: impala.Config, env: Any, state: impala.State | None = None) -> impala.State:
    *_, (_, _, state) = impala.train(config, env, state)
    return state


def _definition(state: impala.State, unrolls: list[impala.Rollout]) -> Tensor:
    """The loss as in the paper, row by row and sum by sum: v_s = V(s) + Σ_t γ^{t-s} (Π c_i) δ_t."""
    config, network = state.config, state.network
    total = torch.zeros(())
    for unroll in unrolls:
        rows = unroll.trajectory
        limits = {(int(i), int(t)): k for k, (i, t) in enumerate(rows.extras["limit"].nonzero())}
        lasts, finals = network.value(unroll.last).value.detach(), network.value(unroll.final).value.detach()
        for i in range(rows.shape[0]):
            output, values = network(rows.obs[i])
            log_pi, v = output.logp(rows.action[i]), values.value.detach()
            steps = rows.shape[1]
            ratio = (log_pi.detach() - rows.logprob[i]).exp()
            rho, c = ratio.clamp(max=config.clip_rho), ratio.clamp(max=config.clip_c)
            following = [
                finals[limits[i, t]] if (i, t) in limits else v[t + 1] if t + 1 < steps else lasts[i]
                for t in range(steps)
            ]
            gamma = config.gamma * rows.discount[i]
            delta = [rho[t] * (rows.reward[i, t] + gamma[t] * following[t] - v[t]) for t in range(steps)]
            targets = []
            for s in range(steps):
                if not rows.mask[i, s]:
                    targets.append(torch.tensor(math.nan))
                    continue
                target, weight = v[s].clone(), torch.ones(())
                for t in range(s, steps):
                    if not rows.mask[i, t]:
                        break
                    target = target + weight * delta[t]
                    weight = weight * gamma[t] * c[t]
                    if rows.cut[i, t]:
                        break
                targets.append(target)
            for s in range(steps):
                if not rows.mask[i, s]:
                    continue
                goes_on = s + 1 < steps and not rows.cut[i, s] and rows.mask[i, s + 1]
                after = targets[s + 1] if goes_on else following[s]
                advantage = ratio[s].clamp(max=config.clip_pg) * (rows.reward[i, s] + gamma[s] * after - v[s])
                total = total - log_pi[s] * advantage
                total = total + config.value_coef * 0.5 * (targets[s] - values.value[s]) ** 2
                total = total - config.entropy_coef * output.entropy()[s]
    return total


@sabotaged_by("foresight.ops.returns.vtrace", change("ratio", torch.ones_like), change("clip_c", lambda c: 9.0))
@sabotaged_by("foresight.ops.returns.vtrace", change("cut", torch.zeros_like), change("discount", torch.ones_like))
@sabotaged_by("foresight.ops.policy.reinforce", flip_sign)
def test_the_update_goes_down_the_gradient_of_the_definition() -> None:
    """Unrolls of an older policy, with time limits, episodes in every phase, and rows that only reset."""
    for lost in (False, True):
        _compare(Clock((1.0, 5.0, -2.0), num_envs=2, lost=lost))


def _compare(env: Clock) -> None:
    config = dataclasses.replace(
        SMALL, rollout_steps=10, num_envs=2, clip_rho=1.1, clip_c=0.9, entropy_coef=0.3, max_grad_norm=1e9
    )
    old = impala.build(dataclasses.replace(config, seed=5), env.spaces)
    with torch.no_grad():
        for p in old.network.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    obs, unrolls = env.reset(0), []
    for _ in range(2):
        unroll, obs, _ = impala.rollout(old, env, obs)
        unrolls.append(unroll)
    state = impala.build(config, env.spaces)
    expected = torch.autograd.grad(_definition(state, unrolls), list(state.network.parameters()))
    impala.update(state, trees.join(unrolls))
    for p, gradient in zip(state.network.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-3)


@sabotaged_by("foresight.algorithms.policy.impala.rollout", lambda f: _without_limits(f))
def test_a_time_limit_is_not_a_termination() -> None:
    """Reward 1 for ever at γ = 0.9 is worth 10, although the clock stops every 8 steps."""
    config = dataclasses.replace(SMALL, steps=12_000, gamma=0.9, learning_rate=3e-2, entropy_coef=0.0)
    env = Clock((1.0,), num_envs=8)
    state = _last(config, env)
    assert state.network.value(env.reset(0)).value[0].item() == pytest.approx(10, abs=0.2)


def _without_limits(rollout: Any) -> Any:
    def mutant(*args: Any) -> Any:
        unroll, *position = rollout(*args)
        rows = unroll.trajectory
        rows = rows.replace(discount=rows.discount * (1 - rows.extras["limit"]))
        return dataclasses.replace(unroll, trajectory=rows), *position

    return mutant


def test_final_observations_stay_with_their_rows() -> None:
    """Joined or not, the k-th final observation is that of the k-th row that a time limit cut."""
    config = dataclasses.replace(SMALL, rollout_steps=11, num_envs=4)
    env = Clock((0.0, 1.0, 2.0, 3.0, 4.0), num_envs=4)
    state, obs, unrolls = impala.build(config, env.spaces), env.reset(0), []
    for _ in range(3):
        unroll, obs, _ = impala.rollout(state, env, obs)
        unrolls.append(unroll)
    whole = trees.join(unrolls)
    where = whole.trajectory.extras["limit"].nonzero()
    assert len(where) == len(whole.final) > 8
    for (i, t), final in zip(where.tolist(), whole.final, strict=True):
        before = int(whole.trajectory.obs[i, t].argmax())
        assert int(final.argmax()) == (before + 1) % 5


def test_with_its_own_unrolls_the_ratio_is_one() -> None:
    for _, metrics, _ in impala.train(SMALL, choice()):
        assert metrics["ratio"] == pytest.approx(1, abs=1e-6)


def test_it_counts_steps_and_reports_its_metrics() -> None:
    seen = list(impala.train(SMALL, choice()))
    assert [step for step, _, _ in seen] == list(range(128, 1025, 128))
    for _, metrics, _ in seen:
        assert all(isinstance(value, float) for value in metrics.values())
    assert set(impala.METRICS) - {"lag"} <= set(seen[-1][1])
    rates = [metrics["learning_rate"] for _, metrics, _ in seen]
    np.testing.assert_allclose(rates, [3e-3 * (1 - i / 8) for i in range(8)])  # 0 would follow the last update


def test_each_optimizer_has_its_own_epsilon_unless_one_is_given() -> None:
    def epsilon(**options) -> float:
        state = impala.build(dataclasses.replace(SMALL, **options), choice().spaces)
        return state.optimizer.param_groups[0]["eps"]

    assert epsilon(optimizer="rmsprop") == 0.01  # Espeholt et al. 2018, table D.1
    assert epsilon(optimizer="adam") == 1e-8  # Kingma & Ba 2015, algorithm 1
    assert epsilon(optimizer="adam", optimizer_epsilon=1e-3) == 1e-3


@pytest.mark.parametrize("optimizer", impala.OPTIMIZERS)
def test_a_resumed_run_is_the_uninterrupted_one(optimizer: str) -> None:
    config = dataclasses.replace(SMALL, optimizer=optimizer)
    for step, _, state in impala.train(config, choice()):
        if step == 512:
            halfway = copy.deepcopy(state)
    resumed = _last(config, choice(), halfway)
    assert resumed.step == 1024
    assert torch.equal(weights(resumed), weights(state))


ACTIONS = {  # the space, the reward, and what random actions earn
    "discrete": (gs.Discrete(2), lambda c, a: a == c, 1 / 2),
    "multi-discrete": (gs.MultiDiscrete([2, 3]), lambda c, a: (a == torch.stack([c, c + 1], -1)).all(-1), 1 / 6),
    "continuous": (
        gs.Box(-2, 2, (2,), np.float32),
        lambda c, a: 1 - (a - (2.0 * c - 1)[:, None]).square().mean(-1),
        -1.0,
    ),
}


@sabotaged_by("foresight.ops.returns.vtrace", lambda f: lambda *a: tuple(-x for x in f(*a)))
@pytest.mark.parametrize("name", ACTIONS)
def test_every_kind_of_action_is_learned(name: str) -> None:
    actions, reward, random = ACTIONS[name]
    spaces = Spaces(gs.Box(-1, 1, (1,), np.float32), actions)
    env = Bandit(spaces, 2, lambda c: (2.0 * c - 1).unsqueeze(-1), reward)
    config = dataclasses.replace(SMALL, steps=10_000, learning_rate=1e-2, entropy_coef=0.0)
    for step, metrics, state in impala.train(config, env):  # noqa: B007
        assert 4 * step < config.steps or metrics["return"] > random
    obs = env.reset(0)
    action, extras, carry = impala.act(state, obs)
    assert env._reward(env._context, action).float().mean() > 0.9
    assert extras == {} and carry is None


def test_pixels_pass_through_the_residual_trunk() -> None:
    images = torch.zeros(2, 1, 36, 36, dtype=torch.uint8)
    images[0, :, :, :18], images[1, :, :, 18:] = 255, 255
    spaces = Spaces(gs.Box(0, 255, (1, 36, 36), np.uint8), gs.Discrete(2))
    env = Bandit(spaces, 2, lambda c: images[c], lambda c, a: a == c)
    state = _last(dataclasses.replace(SMALL, steps=1024, rollouts_per_update=1), env)
    assert (impala.act(state, env.reset(0))[0] == env._context).all()


MISTAKES = [
    ({"num_envs": 4}, "num_envs is 4, but the environment has num_envs 8"),
    ({"rollouts_per_update": 0}, "rollouts_per_update must be at least 1"),
    ({"clip_c": 2.0}, "clip_c must be at most clip_rho"),
    ({"clip_c": -1.0}, "clip_c must be at least 0"),
    ({"clip_pg": -1.0}, "clip_pg must be at least 0"),
    ({"max_lag": -1}, "max_lag must be at least 0"),
    ({"optimizer": "adm"}, "Did you mean 'adam'"),
    ({"precision": "half"}, "Unknown precision 'half'"),
]


@pytest.mark.parametrize(("fields", "text"), MISTAKES, ids=[next(iter(fields)) for fields, _ in MISTAKES])
def test_mistakes_are_reported_with_what_to_do(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        next(impala.train(dataclasses.replace(SMALL, **fields), choice()))
