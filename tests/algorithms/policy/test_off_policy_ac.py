"""Off-policy actor-critic: importance weights, the behavior policy, and A2C as the on-policy case."""

from __future__ import annotations

import pytest
import torch

from foresight.algorithms.policy import off_policy_ac
from foresight.data.trajectory import Trajectory
from foresight.ops import natural
from tests.algorithms.policy.small_batches import blank, gradient
from tests.algorithms.policy.small_envs import Gymnasium
from tests.sabotage import change, flip_sign, returns, sabotaged_by, scaled, shift, swap


def _off_policy(epsilon: float, **options) -> tuple[off_policy_ac.State, Trajectory]:
    env = Gymnasium("CartPole-v1", 4)
    config = off_policy_ac.Config(num_envs=4, rollout_steps=32, epsilon=epsilon, hidden=(8,), **options)
    state = off_policy_ac.build(config, env.spaces)
    with torch.no_grad():  # a policy that is far from uniform
        state.network.body.policy.flat.mul_(30)
    return state, off_policy_ac.rollout(state, env, env.reset(0))[0]


@sabotaged_by("foresight.ops.policy.ratio", scaled(1.1))
@sabotaged_by("foresight.ops.returns.vtrace", shift("next_value"), flip_sign)
def test_on_policy_all_weights_are_one_and_the_gradient_is_that_of_a2c():
    state, batch = _off_policy(epsilon=0.0, trace_lambda=0.9)
    policy_loss, value_loss, watched = off_policy_ac.losses(state, batch)
    assert watched[1].item() == pytest.approx(1, abs=1e-6)

    network = state.network
    values, successors = network.value(batch.obs).value.detach(), network.value(batch.extras["next_obs"]).value.detach()
    advantage, running = torch.zeros_like(values), torch.zeros(4)
    for t in range(31, -1, -1):  # generalized advantages, by their definition
        discount = 0.99 * batch.discount[:, t]
        delta = batch.reward[:, t] + discount * successors[:, t] - values[:, t]
        running = delta + discount * 0.9 * (1 - batch.cut[:, t]) * running
        advantage[:, t] = running
    expected = -(advantage * network.policy(batch.obs).logp(batch.action)).mean()
    torch.testing.assert_close(gradient(state, policy_loss), gradient(state, expected), rtol=1e-3, atol=1e-5)
    error = 0.5 * (network.value(batch.obs).value - values - advantage).square().mean()
    found, wanted = (natural.flatten(torch.autograd.grad(x, network.value_parameters())) for x in (value_loss, error))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


@sabotaged_by("foresight.ops.policy.ratio", returns(torch.ones_like, "no_weights"), swap("logprob", "old_logprob"))
@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_importance_weights_give_the_on_policy_gradient(epsilon):
    """All actions in one state: Σ_a b(a) ρ(a) G(a) ∇log π(a) = Σ_a π(a) G(a) ∇log π(a)."""
    state = blank(off_policy_ac, epsilon=epsilon, max_ratio=100.0, trace_lambda=0.0)
    with torch.no_grad():
        state.network.body.policy.flat.copy_(torch.tensor([0.7, -0.2, -0.9, 0.5, 0.1, 0.0]))
    obs = torch.tensor([[1.0, 0.0]])
    behavior, target = off_policy_ac.behavior(state, obs), state.network.policy(obs)
    found, worth = 0.0, torch.tensor([1.0, 4.0])
    for action in (0, 1):
        a = torch.tensor([action])
        row = Trajectory(
            obs[None], a[None], worth[a][None], discount=torch.zeros(1, 1), cut=torch.ones(1, 1),
            mask=torch.ones(1, 1), logprob=behavior.logp(a).detach()[None], extras={"next_obs": obs[None]},
        )  # fmt: skip
        found = found + behavior.logp(a).exp().item() * gradient(state, off_policy_ac.losses(state, row)[0])
    expected = gradient(state, -(target.mean() * worth).sum())
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@sabotaged_by("foresight.algorithms.policy.off_policy_ac.behavior", change("obs", lambda x: -x))
def test_the_behavior_is_the_configured_mixture():
    state, batch = _off_policy(epsilon=0.25)
    mixed = 0.75 * state.network.policy(batch.obs).mean() + 0.125
    torch.testing.assert_close(batch.logprob, mixed.gather(-1, batch.action[..., None])[..., 0].log())
    drawn = off_policy_ac.behavior(state, batch.obs).mean()
    torch.testing.assert_close(drawn, mixed)
    assert (mixed - state.network.policy(batch.obs).mean()).abs().max() > 0.02
