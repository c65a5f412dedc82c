"""gSDE in PPO, IMPALA and SAC: noise that is linear in the policy's features, with weights held for some steps."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.policy import impala, ppo, sac
from foresight.data.replay import Transitions
from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.nets.heads import StateDependentHead
from tests.algorithms.policy.sac_runs import SAC, aim
from tests.algorithms.policy.small_envs import Bandit, sides
from tests.algorithms.small_runs import last
from tests.algorithms.states import forgets, restored, weights
from tests.sabotage import change, returns, sabotaged_by, scaled

BOX = gs.Box(-2, 2, (2,), np.float32)
HELD = ppo.Config(
    steps=512, num_envs=8, rollout_steps=8, hidden=(16,), log_std=-1.0, state_dependent_noise=4, learning_rate=1e-2
)
HELD_IMPALA = impala.Config(
    steps=512, num_envs=8, rollout_steps=8, rollouts_per_update=1, hidden=(16,), log_std=-1.0, state_dependent_noise=4,
    learning_rate=1e-2, optimizer="adam", entropy_coef=0.0,
)  # fmt: skip
BOTH = pytest.mark.parametrize(("module", "config"), [(ppo, HELD), (impala, HELD_IMPALA)], ids=["ppo", "impala"])
KINDS = pytest.mark.parametrize("options", [{}, {"memory": "gru", "memory_size": 16}], ids=["vector", "memory"])


def _closeness(c, a):
    return 1 - (a - (2.0 * c - 1)[:, None]).square().mean(-1)


def _contexts() -> Bandit:
    spaces = Spaces(gs.Box(-1, 1, (1,), np.float32), BOX)
    return Bandit(spaces, 2, lambda c: (2.0 * c - 1).unsqueeze(-1), _closeness)


@sabotaged_by("foresight.ops.policy.state_dependent_std", scaled(1.1), change("features", torch.ones_like))
def test_the_noise_is_normal_with_the_squared_features_times_the_variances():
    """Scores equal torch's; drawn weights have this variance; constant features become state-independent noise."""
    generator = torch.Generator().manual_seed(0)
    head = StateDependentHead(2)
    head.over(3)
    sigma = torch.tensor([[0.5, 1.0], [0.2, 0.1], [2.0, 0.3]])
    head.log_std.data.copy_(sigma.log())
    mean, features = torch.randn(5, 2, generator=generator), torch.randn(5, 3, generator=generator)
    output = head(torch.cat([mean, features], -1))
    variance = torch.stack([sum(features[:, i] ** 2 * sigma[i, j] ** 2 for i in range(3)) for j in range(2)], -1)
    expected = torch.distributions.Normal(mean, variance.sqrt())
    x = torch.randn(5, 2, generator=generator)
    torch.testing.assert_close(output.logp(x), expected.log_prob(x).sum(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.entropy(), expected.entropy().sum(-1), rtol=1e-4, atol=1e-5)
    assert torch.equal(output.mode(), mean)
    drawn = head(torch.cat([mean[:1], features[:1]], -1).expand(20_000, -1))
    noise = drawn.perturbed(next(head.noise(20_000, 1, generator))) - mean[0]
    torch.testing.assert_close(noise.var(0), variance[0], rtol=0.05, atol=0)
    assert noise.mean(0).abs().max() < 0.05

    constant = head(torch.cat([mean, torch.ones(5, 3)], -1))
    torch.testing.assert_close(constant.std, (sigma**2).sum(0).sqrt().expand(5, 2))


@sabotaged_by(
    "foresight.nets.heads.StateDependentHead.noise", change("every", lambda n: 1), change("rows", lambda n: 1)
)
@BOTH
def test_noise_is_held_between_redraws_and_differs_between_environments(module, config):
    """Equal states get equal actions until the weights are drawn again, at every rollout's start at the latest."""
    env = _contexts()
    state = module.build(config, env.spaces)
    batch, obs, _ = module.rollout(state, env, env.reset(0))
    later, _, _ = module.rollout(state, env, obs)
    batch, later = (getattr(x, "trajectory", x) for x in (batch, later))
    action = torch.cat([batch.action, later.action], 1)  # the contexts alternate: steps t and t + 2 show the same
    same = (action[:, :-2] - action[:, 2:]).abs().amax((0, 2)) < 1e-6
    assert same.tolist() == [True, True, False, False] * 3 + [True, True]
    assert not torch.isclose(action[0], action[2]).any()  # environments 0 and 2 see the same
    output = state.network.policy(batch.obs)
    torch.testing.assert_close(batch.logprob, output.logp(batch.action))


@sabotaged_by("foresight.ops.returns.gae", lambda f: lambda *a: tuple(-x for x in f(*a)))
@KINDS
def test_it_learns_with_every_kind_of_network(options):
    _learns(ppo, dataclasses.replace(HELD, steps=2_000, rollout_steps=16, **options))


@sabotaged_by("foresight.ops.returns.vtrace", lambda f: lambda *a: tuple(-x for x in f(*a)))
@KINDS
def test_impala_learns_with_every_kind_of_network(options):
    _learns(impala, dataclasses.replace(HELD_IMPALA, steps=6_000, **options))


def _learns(module, config):
    for step, metrics, state in module.train(config, _contexts()):  # noqa: B007
        assert 4 * step < config.steps or metrics["return"] > 0  # which random actions do not earn
    env = _contexts()
    obs = env.reset(0)
    action, _, _ = module.act(state, obs)
    assert _closeness(env._context, action).mean() > 0.9
    sampled, _, _ = module.act(state, obs, explore=True)
    assert not torch.equal(sampled, action)
    head = state.network.policy_head
    assert head.log_std.shape == (16, 2) and head.log_std.std() > 0


@sabotaged_by("foresight.nets.actor_critic.Sampled.__call__", returns(lambda x: x + 0.1))
@KINDS
def test_the_learner_of_impala_gives_actions_the_probability_that_actors_gave_them(options):
    """V-trace's ratio is 1 for rollouts of the policy that is updated."""
    config = dataclasses.replace(HELD_IMPALA, rollouts_per_update=2, popart_rate=0.01, **options)
    for _, metrics, _ in impala.train(config, _contexts()):
        assert metrics["ratio"] == pytest.approx(1, abs=1e-5)


@BOTH
def test_pixels_share_their_trunk(module, config):
    env = sides(BOX, _closeness)
    state = last(module, dataclasses.replace(config, steps=64, images="nature"), env)
    assert state.network.policy_head.log_std.shape == (512, 2)
    assert module.act(state, env.reset(0))[0].shape == (8, 2)


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in ("network", "optimizer", "generator")])
@BOTH
def test_a_resumed_run_is_the_uninterrupted_one(module, config):
    copies = []
    for step, _, state in module.train(config, _contexts()):
        if step == 256:
            copies = [copy.deepcopy(state), restored(module, state, _contexts())]
    for halfway in copies:
        assert torch.equal(weights(last(module, config, _contexts(), halfway)), weights(state))


def test_mistakes_are_named():
    for module, config in ((ppo, HELD), (impala, HELD_IMPALA)):
        with pytest.raises(UserError, match="state_dependent_noise needs continuous actions"):
            module.build(config, Spaces(gs.Box(0, 1, (2,), np.float32), gs.Discrete(2)))
        with pytest.raises(UserError, match="state_dependent_noise must be at least 1, not 0"):
            module.build(dataclasses.replace(config, state_dependent_noise=0), _contexts().spaces)
    with pytest.raises(UserError, match="state_dependent_noise must be at least 1, not 0"):
        sac.build(dataclasses.replace(SAC, state_dependent_noise=0), aim().spaces)
    with pytest.raises(UserError, match="A VLA has no state_dependent_noise"):
        ppo.build(dataclasses.replace(HELD, policy="runs/x"), _contexts().spaces)


# --- SAC

HELD_SAC = dataclasses.replace(SAC, state_dependent_noise=3, noise_log_std=-1.0)


@sabotaged_by("foresight.ops.policy.state_dependent_std", scaled(1.1))
def test_squashed_noise_has_the_density_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    head = StateDependentHead(2, -0.5, squashed=True)
    head.over(3)
    mean, features = torch.randn(5, 2, generator=generator), torch.randn(5, 3, generator=generator)
    output = head(torch.cat([mean, features], -1))
    std = ((features**2) @ head.log_std.exp().square().expand(3, 2)).sqrt()
    normal = torch.distributions.Normal(mean, std)
    expected = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    action, logp = output.sample_logp(generator)
    torch.testing.assert_close(logp, expected.log_prob(action).sum(-1), rtol=1e-3, atol=1e-3)
    logp.sum().backward()
    assert head.log_std.grad.abs().min() > 0


@sabotaged_by("foresight.algorithms.policy.sac._held_noise", change("every", lambda n: n + 1))
def test_sac_holds_its_noise() -> None:
    """Equal observations get equal actions for three steps of every environment."""
    state = sac.build(dataclasses.replace(HELD_SAC, learning_starts=0), aim().spaces)
    obs = torch.eye(4).repeat(2, 1)
    action = torch.stack([sac.act(state, obs, explore=True)[0] for _ in range(6)])
    same = (action[1:] == action[:-1]).all(-1).all(-1)
    assert same.tolist() == [True, True, False, True, True]
    assert not torch.isclose(action[0, 0], action[0, 4]).any()  # two environments that see the same


@sabotaged_by("foresight.algorithms.policy.sac.critic_loss", change("reward", lambda r: -r))
def test_sac_learns_with_it() -> None:
    state = last(sac, dataclasses.replace(HELD_SAC, steps=2_000, learning_rate=0.02, train_every=4), aim())
    env = aim()
    action, _, _ = sac.act(state, env.reset(0))
    assert env._reward(env._context, action).mean() > -0.2  # a random policy: below -2


def test_updates_of_sac_in_bfloat16_are_near_those_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    obs, action, reward, after = (torch.randn(64, n, generator=generator) for n in (4, 2, 1, 4))
    batch = Transitions(obs, action, reward.squeeze(-1), torch.full((64,), 0.9), after, torch.arange(64))
    found = []
    for precision in ("float32", "bfloat16"):
        state = sac.build(dataclasses.replace(HELD_SAC, precision=precision), aim().spaces)
        found.append(sac.update(state, batch))
    for name in ("critic_loss", "entropy"):
        assert found[0][name] != found[1][name] == pytest.approx(found[0][name], rel=0.02)


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in ("noise", "noise_age", "generator")])
def test_a_resumed_run_of_sac_is_the_uninterrupted_one() -> None:
    config = dataclasses.replace(HELD_SAC, steps=240, state_dependent_noise=4)
    state = sac.build(config, aim().spaces)
    obs = aim().reset(0)
    for _ in range(2):
        sac.act(dataclasses.replace(state, step=100), obs, explore=True)
    state.step, env = 100, aim()
    sac.act(state, obs, explore=True)
    copies = [copy.deepcopy(state), restored(sac, state, env)]
    expected = torch.stack([sac.act(state, obs, explore=True)[0] for _ in range(8)])
    for other in copies:
        assert torch.equal(torch.stack([sac.act(other, obs, explore=True)[0] for _ in range(8)]), expected)
