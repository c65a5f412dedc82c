"""TRPO: the natural gradient step, the trust region and the line search."""

from __future__ import annotations

import pytest
import torch

from foresight.algorithms.policy import trpo
from foresight.ops import natural
from tests.algorithms.policy.small_batches import mean_divergence
from tests.algorithms.policy.small_envs import Gymnasium, choice
from tests.sabotage import change, flip_sign, returns, sabotaged_by, scaled


def _trpo(name: str, seed: int, **options):
    env = Gymnasium(name, 4) if name else choice()
    config = trpo.Config(num_envs=env.num_envs, rollout_steps=64, seed=seed, hidden=(16,), **options)
    state = trpo.build(config, env.spaces)
    batch, _ = trpo.rollout(state, env, env.reset(seed))
    generator = torch.Generator().manual_seed(seed)
    return state, batch.map(lambda x: x.flatten(0, 1)), torch.randn(batch.reward.numel(), generator=generator)


@sabotaged_by("foresight.nets.outputs.Categorical.kl", scaled(0.1))
@sabotaged_by("foresight.ops.natural.conjugate_gradient", flip_sign)
@sabotaged_by("foresight.algorithms.policy.trpo.surrogate", flip_sign)
@sabotaged_by("foresight.algorithms.policy.trpo.step_direction", scaled(0.01))
def test_trpo_improves_and_never_leaves_its_trust_region():
    fractions = []
    for name, target, seed in [("CartPole-v1", 0.01, 0), ("CartPole-v1", 0.3, 1), ("Pendulum-v1", 0.01, 2),
                               ("Pendulum-v1", 1.0, 3), ("", 0.02, 4), ("", 3.0, 5)]:  # fmt: skip
        state, rows, gain = _trpo(name, seed, target_kl=target, damping=1e-3)
        with torch.no_grad():
            before = state.network.policy(rows.obs)
            old = before.logp(rows.action)
        metrics = trpo.improve(state, rows, gain)
        with torch.no_grad():
            after = state.network.policy(rows.obs)
            gained = ((after.logp(rows.action) - old).exp() * gain).mean() - gain.mean()
        divergence = mean_divergence(before, after)
        assert 0.2 * target < divergence <= target * (1 + 1e-5)
        assert divergence == pytest.approx(metrics["kl"], rel=1e-3)
        assert gained.item() == pytest.approx(metrics["improvement"], rel=1e-2, abs=1e-5)
        assert gained > 0
        fractions.append(metrics["step_fraction"])
    assert min(fractions) < 1 == max(fractions)  # the search had work to do, somewhere


def _bits(state) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in state.network.parameters()]).view(torch.int32)


@sabotaged_by("foresight.algorithms.policy.trpo._put", change("vector", lambda v: v * (1 + 1e-6)))
@sabotaged_by("foresight.algorithms.policy.trpo.surrogate", returns(lambda x: x + torch.rand(()), "noisy"))
@pytest.mark.parametrize("fault", ["downhill", "nan", "too far"])
def test_trpo_puts_its_parameters_back_when_the_search_fails(fault):
    state, rows, gain = _trpo("Pendulum-v1", 0)
    torch.manual_seed(0)
    before = _bits(state)
    parameters = state.network.policy_parameters()
    uphill = natural.flatten(
        torch.autograd.grad((state.network.policy(rows.obs).logp(rows.action) * gain).mean(), parameters)
    )
    full = {"downhill": -1e-3 * uphill, "nan": uphill * torch.nan, "too far": 1e4 * uphill}[fault]
    metrics = trpo.line_search(state, rows, gain, full)
    assert metrics == {"kl": 0.0, "improvement": 0.0, "step_fraction": 0.0}
    assert torch.equal(_bits(state), before)
    assert trpo.line_search(state, rows, gain, 1e-3 * uphill)["step_fraction"] == 1.0  # and a good step is taken


def test_without_anything_to_gain_trpo_stays_where_it_is():
    state, rows, gain = _trpo("CartPole-v1", 0)
    before = _bits(state)
    assert trpo.improve(state, rows, 0 * gain)["step_fraction"] == 0.0
    assert torch.equal(_bits(state), before)


@sabotaged_by("foresight.algorithms.policy.trpo.step_direction", scaled(1.1))
@sabotaged_by("foresight.ops.natural.conjugate_gradient", change("b", lambda b: b.roll(1)))
def test_the_full_step_is_the_edge_of_the_quadratic_model():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator)
    fisher, gradient = root @ root.t() + torch.eye(6), torch.randn(6, generator=generator)
    step = trpo.step_direction(trpo.Config(target_kl=0.02, cg_iterations=30), gradient, lambda v: fisher @ v)
    assert 0.5 * step @ fisher @ step == pytest.approx(0.02, rel=1e-4)
    natural_gradient = torch.linalg.solve(fisher, gradient)
    assert torch.cosine_similarity(step, natural_gradient, dim=0) == pytest.approx(1, abs=1e-5)


@sabotaged_by("foresight.algorithms.policy.trpo.improve", lambda f: lambda *a: {"kl": 0.0, "entropy": 0.0})
def test_policy_and_value_move_apart():
    state, rows, gain = _trpo("CartPole-v1", 0)
    policy, value = ([p.detach().clone() for p in part] for part in (
        state.network.policy_parameters(), state.network.value_parameters()))  # fmt: skip
    trpo.improve(state, rows, gain)
    assert not torch.equal(policy[0], state.network.policy_parameters()[0])
    assert torch.equal(value[0], state.network.value_parameters()[0])
    policy = [p.detach().clone() for p in state.network.policy_parameters()]
    trpo.fit_value(state, rows, gain)
    assert all(torch.equal(a, b) for a, b in zip(policy, state.network.policy_parameters(), strict=True))
    assert not torch.equal(value[0], state.network.value_parameters()[0])
