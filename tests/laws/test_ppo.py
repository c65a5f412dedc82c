"""What must hold of PPO: the first ratio, the gradient there, time limits, rows that only reset."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foresight.algorithms.policy import ppo
from foresight.data.trajectory import Trajectory
from foresight.ops import advantage, kl, policy, returns, value
from foresight.ops.fused import clipped
from tests.algorithms.policy.small_envs import Clock, Gymnasium, choice
from tests.sabotage import change, drop, flip_sign, sabotaged_by, scaled, shift, swap

CARTPOLE = ppo.Config(num_envs=8, rollout_steps=64, entropy_coef=0.01)


def _rows(state: ppo.State, env) -> Trajectory:
    """One evaluated rollout as rows, with advantages: what `update` makes of it."""
    batch, *_ = ppo.rollout(state, env, env.reset(0))
    gain, target = returns.gae(
        batch.reward, 0.99 * batch.discount, batch.cut, batch.value, batch.next_value, 0.95, batch.mask
    )
    return batch.replace(extras={"advantage": gain, "target": target}).map(lambda x: x.flatten(0, 1))


@sabotaged_by(
    "foresight.algorithms.policy.ppo.evaluate", lambda f: lambda *a: f(*a).replace(logprob=f(*a).logprob + 1e-6)
)
@pytest.mark.parametrize("parts", [1, 3, 4])
def test_before_the_first_update_the_ratio_is_exactly_one(parts):
    env = Gymnasium("CartPole-v1")
    state = ppo.build(CARTPOLE, env.spaces)
    rows = _rows(state, env)
    assert (rows.logprob < 0).all()
    for batch in rows.minibatches(parts, state.shuffler):
        assert torch.equal(
            policy.ratio(state.network(batch.obs)[0].logp(batch.action), batch.logprob), torch.ones(len(batch.reward))
        )
        _, watched = ppo.objective(state, batch, clip=0.0)
        assert watched[ppo.LOSS_METRICS.index("approx_kl")] == 0
        assert watched[ppo.LOSS_METRICS.index("clip_fraction")] == 0


def test_after_the_first_update_the_ratio_is_not_one():
    env = Gymnasium("CartPole-v1")
    *_, (_, metrics, _) = ppo.train(ppo.Config(steps=512, rollout_steps=64), env)
    assert metrics["approx_kl"] > 0


def _gradient(state: ppo.State, backward) -> torch.Tensor:
    state.optimizer.zero_grad()
    backward()
    return torch.cat([p.grad.flatten().clone() for p in state.network.parameters()])


@sabotaged_by("foresight.ops.fused.mlp.backward", change("grads", lambda gs: [0.9 * g for g in gs]))
@sabotaged_by("foresight.ops.policy.clipped_surrogate", flip_sign)
@sabotaged_by("foresight.ops.fused.clipped.clipped_objective", change("normalize", lambda x: not x))
def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    """Both ways: compiled (CartPole) and readable (Pendulum)."""
    found, expected = [], []
    for name in ("CartPole-v1", "Pendulum-v1"):
        env = Gymnasium(name)
        state = ppo.build(ppo.Config(num_envs=8, rollout_steps=32, value_coef=0.0), env.spaces)
        rows = _rows(state, env)
        found.append(_gradient(state, ppo.objective(state, rows, clip=0.2)[0]))
        gain = (rows.extras["advantage"] - rows.extras["advantage"].mean()) / rows.extras["advantage"].std()
        state.network.body._compiled = False  # plain torch, which no sabotage reaches
        output, values = state.network(rows.obs)
        loss = -(gain * output.logp(rows.action)).mean() + 0 * values.value.sum()
        expected.append(_gradient(state, loss.backward))
        assert expected[-1].abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@sabotaged_by(
    "foresight.ops.fused.clipped.clipped_objective", swap("old_logprob", "advantage"), drop("clip_value"), scaled(1.01)
)
@sabotaged_by(
    "foresight.ops.fused.clipped.clipped_objective",
    change("normalize", lambda x: not x),
    change("clip_ratio", lambda x: 2 * x),
)
@given(seed=st.integers(0, 2**31))
def test_the_compiled_objective_is_the_readable_one(seed):
    """Values and gradients, with ratios in and outside the clip range and a masked action."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    n, actions = 64, 3
    mask = torch.ones(n, actions, dtype=torch.bool)
    mask[: n // 2, 2] = False
    logits = normal(n, actions).masked_fill(~mask, torch.finfo(torch.float32).min).requires_grad_()
    values = normal(n).requires_grad_()
    action = torch.randint(0, 2, (n,), generator=generator)
    old_logprob = logits.detach().log_softmax(-1).gather(-1, action[:, None])[:, 0] + 0.3 * normal(n)
    gain, target, old_value = 1 + 2 * normal(n), normal(n), values.detach() + 0.3 * normal(n)
    clip, clip_value, value_coef, entropy_coef = 0.2, 0.1, 0.7, 0.05
    *grads, watched = clipped.clipped_objective(
        logits, values, action, old_logprob, gain, target, old_value, clip, clip_value, value_coef, entropy_coef, True
    )

    logps = logits.log_softmax(-1)
    logprob = logps.gather(-1, action[:, None])[:, 0]
    ratio = policy.ratio(logprob, old_logprob)
    terms = [
        policy.clipped_surrogate(ratio, advantage.normalize(gain), clip).mean(),
        value.clipped_loss(values, old_value, target, clip_value).mean(),
        -(logps.exp() * logps).sum(-1).mean(),
        kl.k3(old_logprob, logprob).mean(),
        policy.clip_fraction(ratio, clip),
    ]
    assert 0 < terms[4] < 1
    torch.testing.assert_close(watched, torch.stack(terms).detach(), rtol=1e-4, atol=1e-5)
    loss = terms[0] + value_coef * terms[1] - entropy_coef * terms[2]
    for found, expected in zip(grads, torch.autograd.grad(loss, [logits, values]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    assert not grads[0][: n // 2, 2].any()  # a masked action has exactly no gradient


@sabotaged_by("foresight.ops.fused.mlp.backward", change("grads", lambda gs: [0.9 * g for g in gs]))
@sabotaged_by("foresight.ops.fused.clipped.clipped_objective", scaled(1.01))
@sabotaged_by("foresight.ops.policy.clip_fraction", scaled(1.01))
def test_one_objective_for_both_ways():
    """The whole of `objective`, compiled and not, on a real rollout after some learning."""
    env = Gymnasium("CartPole-v1")
    *_, (_, _, state) = ppo.train(ppo.Config(steps=1024, rollout_steps=64, learning_rate=1e-2, clip_value=0.2), env)
    rows = _rows(state, env)
    rows = rows.replace(logprob=rows.logprob - 0.3, value=rows.value + 0.3)
    backward, compiled = ppo.objective(state, rows, clip=0.2)
    fast = _gradient(state, backward)
    state.network.vjp = lambda obs: None
    state.network.body._compiled = False  # plain torch in the MLPs too
    backward, readable = ppo.objective(state, rows, clip=0.2)
    torch.testing.assert_close(compiled, readable, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast, _gradient(state, backward), rtol=1e-3, atol=1e-5)


def _time_limit_ends(original):
    """Take every cut for a termination."""
    return lambda reward, discount, cut, *rest: original(reward, discount * (1 - cut), cut, *rest)


def _learned_values(env: Clock) -> torch.Tensor:
    config = ppo.Config(
        steps=6_144, num_envs=8, rollout_steps=32, epochs=6, minibatches=2, learning_rate=0.3, hidden=(),
        gamma=0.9, value_coef=1.0, max_grad_norm=1e9,
    )  # fmt: skip
    *_, (_, _, state) = ppo.train(config, env)
    return state.network.value(torch.eye(len(env.rewards))).value.detach()


@sabotaged_by("foresight.ops.returns.gae", _time_limit_ends)
def test_a_time_limit_is_no_termination():
    """Reward 1 for ever is worth 1 / (1 - 0.9) = 10, though every episode is cut after 8 steps."""
    assert _learned_values(Clock()).item() == pytest.approx(10, abs=0.1)


@sabotaged_by("foresight.ops.returns.gae", _time_limit_ends, shift("next_value"))
@sabotaged_by("foresight.envs.collect._Limits.add", lambda f: lambda self, *arguments: None)
def test_a_time_limit_bootstraps_from_its_own_final_observation():
    """Episodes are cut in state 2 and begin in state 0: the wrong successor would show in every value."""
    env = Clock((0.0, 0.0, 3.0))
    torch.testing.assert_close(_learned_values(env), env.values(0.9), atol=0.1, rtol=0)


@sabotaged_by(
    "foresight.data.trajectory.Trajectory.replace",
    lambda f: lambda self, **k: f(self, **{"mask": torch.ones_like(self.mask), **k}),
)
def test_rows_that_only_reset_have_no_gradient():
    """They pay 1000 here. The gradient of the others is as if they were not there."""
    env = Clock((0.0, 0.0, 3.0), lost=True)
    torch.testing.assert_close(_learned_values(env), env.values(0.9), atol=0.1, rtol=0)


def test_what_stands_in_such_a_row_has_no_effect():
    env, weights = choice(), []
    for garbage in (0.0, 1e6):
        state = ppo.build(
            ppo.Config(num_envs=8, rollout_steps=8, hidden=(8,), normalize_reward=True, normalize_obs=True), env.spaces
        )
        batch, *_ = ppo.rollout(state, env, env.reset(0))
        mask = torch.ones(8, 8)
        mask[:, 3] = 0
        mask[2, 5] = 0
        fill = [x.masked_fill(mask == 0, garbage) for x in (batch.reward, batch.value, batch.next_value)]
        obs = batch.obs.masked_fill((mask == 0).unsqueeze(-1), garbage)
        metrics = ppo.update(
            state, batch.replace(obs=obs, reward=fill[0], value=fill[1], next_value=fill[2], mask=mask)
        )
        weights.append((torch.cat([p.flatten() for p in state.network.parameters()]), metrics))
    assert torch.equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


@sabotaged_by(
    "foresight.ops.fused.clipped.clipped_epochs",
    change("adam", lambda a: a._replace(step=3 * a.step)),
    change("order", lambda x: x.flip(0)),
)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_compiled_epochs_are_the_readable_ones(activation):
    """Weights, moments and metrics after two epochs of five minibatches, of which none is full."""
    env = Gymnasium("CartPole-v1")
    config = ppo.Config(
        steps=1024, rollout_steps=64, learning_rate=1e-3, clip_value=0.2, entropy_coef=0.01, epochs=2, minibatches=5,
        activation=activation,
    )  # fmt: skip
    *_, (_, _, state) = ppo.train(config, env)
    rows = _rows(state, env).replace(mask=None, next_value=None)
    rows = rows.replace(logprob=rows.logprob - 0.1, value=rows.value + 0.1)
    states = [state, copy.deepcopy(state)]
    metrics = [way(one, rows, 0.2) for way, one in zip((ppo.epochs, ppo.epochs.__wrapped__), states, strict=True)]
    torch.testing.assert_close(*metrics, rtol=1e-3, atol=1e-4)
    found, expected = ([one.network.body.flat, *one.optimizer.state_dict()["state"][0].values()] for one in states)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-5)
    assert torch.equal(torch.rand(3, generator=state.shuffler), torch.rand(3, generator=states[1].shuffler))


def test_what_has_no_compiled_epochs_takes_the_readable_ones(monkeypatch):
    calls = []
    monkeypatch.setattr(ppo.optim, "descend", lambda *args: calls.append(args))
    for options in ({"target_kl": 1.0}, {"normalize_obs": True}, {"hidden": (256, 256)}, {"activation": "elu"}):
        config, before = ppo.Config(num_envs=8, rollout_steps=32, **options), len(calls)
        env = Gymnasium("CartPole-v1")
        state = ppo.build(config, env.spaces)
        rows = _rows(state, env).replace(mask=None, next_value=None)
        assert ppo.epochs(state, rows, 0.2).shape == (16, 5) and len(calls) == before + 16
