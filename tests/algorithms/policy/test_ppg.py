"""PPG: the policy phase, the auxiliary phase, and what each may change."""

from __future__ import annotations

import copy

import pytest
import torch

from foresight.algorithms.policy import ppg
from foresight.data.trajectory import Trajectory
from tests.algorithms.policy.small_batches import mean_divergence
from tests.algorithms.policy.small_envs import Gymnasium, choice
from tests.sabotage import sabotaged_by


@pytest.fixture(scope="module")
def learning() -> ppg.State:
    """A state in the middle of learning CartPole. No test changes it: each takes a copy."""
    config = ppg.Config(
        steps=2048, num_envs=4, rollout_steps=64, hidden=(32,), policy_iterations=99, auxiliary_minibatches=8,
        normalize_reward=False, gamma=0.98, learning_rate=3e-3,
    )  # fmt: skip
    *_, (_, _, state) = ppg.train(config, Gymnasium("CartPole-v1", 4))
    assert len(state.remembered) == 8
    return state


def _ppg(learning: ppg.State) -> tuple[ppg.State, Trajectory]:
    """A copy of that state, and a phase's worth of rows."""
    state, env = copy.deepcopy(learning), Gymnasium("CartPole-v1", 4)
    batch, _ = ppg.rollout(state, env, env.reset(1))
    return state, batch


@sabotaged_by("foresight.algorithms.policy.ppg.joint_loss", lambda f: lambda *a: (f(*a)[0], 0 * f(*a)[1]))
@sabotaged_by("foresight.algorithms.policy.ppg.joint_loss", lambda f: lambda *a: (0 * f(*a)[0], f(*a)[1]))
def test_the_auxiliary_phase_trains_the_trunk_and_keeps_the_policy(learning):
    state, _ = _ppg(learning)
    obs, target = (torch.cat([part[key] for part in state.remembered]) for key in ("obs", "target"))

    def auxiliary() -> float:
        guess = state.network.value_head(state.network.body.policy.single(1, obs)).value
        return 0.5 * (guess - target).square().mean().item()

    with torch.no_grad():
        before, error = state.network.policy(obs), auxiliary()
        trunk = [p.clone() for p in state.network.body.policy.trunk.parameters()]
    metrics = ppg.auxiliary_phase(state)
    with torch.no_grad():
        divergence = mean_divergence(before, state.network.policy(obs))
        assert auxiliary() < 0.5 * error
        assert metrics["auxiliary_loss"] < error
    assert divergence < 0.01
    assert not torch.equal(trunk[0], next(iter(state.network.body.policy.trunk.parameters())))
    assert state.remembered == []


def _misremembered(original):
    def mutant(*arguments):
        batch, obs = original(*arguments)
        return batch.replace(logprob=batch.logprob + 0.01), obs

    return mutant


@sabotaged_by("foresight.algorithms.policy.ppg.rollout", _misremembered)
def test_ppg_begins_at_ratio_one_and_at_no_divergence(learning):
    state, batch = _ppg(learning)
    rows = batch.replace(extras={"advantage": batch.reward}).map(lambda x: x.flatten(0, 1))
    _, watched = ppg.policy_loss(state, rows)
    assert watched[1].item() == pytest.approx(0, abs=1e-9)
    assert ppg.joint_loss(state, state.network, rows.obs, rows.reward)[1].item() == pytest.approx(0, abs=1e-7)


def test_in_the_policy_phase_neither_network_has_a_gradient_of_the_other(learning):
    state, batch = _ppg(learning)
    rows = batch.replace(extras={"advantage": batch.reward}).map(lambda x: x.flatten(0, 1))
    loss, _ = ppg.policy_loss(state, rows)
    assert all(g is None for g in torch.autograd.grad(loss, state.network.value_parameters(), allow_unused=True))
    error = ppg.value_loss(state, rows.obs, rows.reward)
    trunk = list(state.network.body.policy.parameters())
    assert all(g is None for g in torch.autograd.grad(error, trunk, allow_unused=True))


def test_the_auxiliary_phase_comes_every_so_many_iterations():
    config = ppg.Config(steps=64 * 7, num_envs=8, rollout_steps=8, policy_iterations=3, hidden=(8,))
    seen = ["clone_kl" in metrics for _, metrics, _ in ppg.train(config, choice())]
    assert seen == [False, False, True, False, False, True, False]
