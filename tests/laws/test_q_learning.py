"""What Q-learning and soft actor-critics must converge to, where it can be worked out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.policy import sac, sac_discrete
from foresight.algorithms.value import dqn, rainbow
from foresight.data.replay import Transitions
from foresight.envs.base import Spaces
from foresight.nets.critics import encode
from foresight.ops import fused, value
from tests.algorithms.policy.worlds import Bandit, Clock
from tests.algorithms.value.worlds import Chain
from tests.sabotage import change, flip_sign, sabotaged_by, scaled, swap

GAMMA = 0.8
CHAIN = dqn.Config(
    steps=2_400, num_envs=2, learning_rate=0.1, batch_size=32, replay_size=2_000, learning_starts=50, train_every=2,
    target_every=20, gamma=GAMMA, epsilon_end=1.0, hidden=(), value_range=(0.0, 12.0), max_grad_norm=1e9,
)  # fmt: skip


def _last(module, config, env):
    *_, (_, _, state) = module.train(config, env)
    return state


def _time_limit_ends(original):
    """Take every cut for a termination."""
    return lambda self, row, final: original(self, {**row, "discount": row["discount"] * (1 - row["cut"])}, final)


def _no_final(original):
    return lambda self, row, final: original(self, row)


@sabotaged_by("foresight.data.replay.Replay.add", _time_limit_ends, _no_final)
@sabotaged_by("foresight.ops.fused.huber_q", scaled(-1.0), change("reward", lambda r: 0.9 * r))
@sabotaged_by("foresight.data.replay.Replay.gather", change("gamma", lambda g: 1.05 * g))
def test_dqn_reaches_the_closed_form() -> None:
    """With terminations, and cut by time limits only; with one reset rule and the other."""
    for env, double in ((Chain(), False), (Chain(ends=True), True), (Chain(lost=True), False)):
        state = _last(dqn, dqn.Config(**{**vars(CHAIN), "double": double}), env)
        torch.testing.assert_close(state.network(torch.eye(2)).mean().detach(), env.values(GAMMA), atol=0.1, rtol=0)


@sabotaged_by("foresight.ops.distributional.project", change("reward", lambda r: 0.9 * r))
@sabotaged_by("foresight.ops.distributional.quantile_huber_loss", change("target", lambda t: 0.9 * t))
@sabotaged_by("foresight.ops.value.huber_loss", flip_sign)
def test_so_does_it_with_other_kinds_of_value() -> None:
    """Dueling numbers, atoms and quantiles. The chain is deterministic: its quantiles are all equal."""
    env = Chain(ends=True)
    for options in ({"dueling": True}, {"values": "atoms"}, {"values": "quantiles", "atoms": 11}):
        state = _last(dqn, dqn.Config(**{**vars(CHAIN), **options}), env)
        torch.testing.assert_close(state.network(torch.eye(2)).mean().detach(), env.values(GAMMA), atol=0.15, rtol=0)


@sabotaged_by("foresight.data.priorities.Prioritized.add", _time_limit_ends)
@sabotaged_by("foresight.ops.distributional.project", change("reward", lambda r: 0.9 * r))
def test_rainbow_reaches_the_closed_form() -> None:
    """Without its exploration, which is another's policy over three steps: random actions, one step."""
    config = rainbow.Config(
        steps=4_000, num_envs=2, learning_rate=0.01, batch_size=32, replay_size=2_000, learning_starts=50,
        train_every=2, target_every=20, gamma=GAMMA, n_steps=1, value_range=(0.0, 12.0), sigma=None, epsilon=1.0,
        hidden=(16,), adam_epsilon=1e-8,
    )  # fmt: skip
    env = Chain(ends=False)
    state = _last(rainbow, config, env)
    torch.testing.assert_close(state.network(torch.eye(2)).mean().detach(), env.values(GAMMA), atol=0.25, rtol=0)


@sabotaged_by("foresight.data.replay.Replay.add", _time_limit_ends)
def test_reward_one_for_ever_is_worth_twenty() -> None:
    """1 / (1 - 0.95), though every episode is cut after 8 steps."""
    config = dqn.Config(
        **{**vars(CHAIN), "gamma": 0.95, "num_envs": 8, "train_every": 8, "steps": 8_000, "learning_rate": 0.1}
    )
    state = _last(dqn, config, Clock())
    assert state.network(torch.ones(1, 1)).mean().detach().flatten().tolist() == pytest.approx([20, 20], abs=1)


@sabotaged_by("foresight.ops.fused.huber_q", scaled(1.01), swap("following", "q"))
@pytest.mark.parametrize("double", [False, True])
def test_the_compiled_objective_is_the_readable_one(double: bool) -> None:
    config = dqn.Config(double=double, hidden=(16,))
    spaces = Spaces(gs.Box(-1, 1, (5,), np.float32), gs.Discrete(3))
    state = dqn.build(config, spaces)
    torch.nn.init.normal_(state.network.body.flat, std=0.8)
    torch.nn.init.normal_(state.target.body.flat, std=0.8)
    batch = Transitions(
        torch.randn(70, 5), torch.randint(0, 3, (70,)), 2 * torch.randn(70), 0.9 * (torch.rand(70) < 0.8).float(),
        torch.randn(70, 5), torch.arange(70),
    )  # fmt: skip
    backward, *fast = dqn.objective(state, batch)
    backward()
    gradient = state.network.body.flat.grad.clone()
    state.network.zero_grad()
    state.network.body._compiled = False
    backward, *readable = dqn.objective(state, batch)
    backward()
    torch.testing.assert_close(fast, readable)
    torch.testing.assert_close(gradient, state.network.body.flat.grad, rtol=1e-4, atol=1e-6)


@sabotaged_by("foresight.ops.value.double_q_target", swap("reward", "discount"))
def test_the_compiled_gradient_is_that_of_the_q_target() -> None:
    q = torch.randn(40, 3, requires_grad=True)
    action, choice = torch.randint(0, 3, (40,)), torch.randint(0, 3, (40,))
    reward, discount, following = torch.randn(40), torch.rand(40), torch.randn(40, 3)
    grad, seen = fused.huber_q(q.detach(), action, reward, discount, following, choice)
    done = q.gather(-1, action[:, None])[:, 0]
    loss = value.huber_loss(done, value.double_q_target(reward, discount, following, choice)).mean()
    loss.backward()
    torch.testing.assert_close(grad, q.grad)
    torch.testing.assert_close(seen, torch.stack([loss, done.mean()]).detach())


@sabotaged_by("foresight.ops.fused.soft_q", scaled(1.01), change("alpha", lambda a: 2 * a))
@sabotaged_by("foresight.nets.stacked_mlp._back", change("grad", lambda g: 1.1 * g))
@pytest.mark.parametrize("n", [1, 3])
def test_the_compiled_critics_are_the_readable_ones(n: int) -> None:
    """A whole update of SAC, compiled and not: the same losses, and critics that moved alike."""
    spaces = Spaces(gs.Box(-1, 1, (3,), np.float32), gs.Box(-2, 2, (2,), np.float32))
    passed = (None, torch.randn(70, n - 1, 3), torch.rand(70, n - 1)) if n > 1 else ()
    batch = Transitions(
        torch.randn(70, 3), torch.randn(70, 2), torch.randn(70), 0.9 * (torch.rand(70) < 0.8).float(),
        torch.randn(70, 3), torch.arange(70), *passed,
    )  # fmt: skip
    found = []
    for compiled in (True, False):
        state = sac.build(sac.Config(hidden=(16,), entropy_temperature=0.3), spaces)
        for module in (state.critics, state.target, state.actor):
            torch.nn.init.normal_(module.mlp.flat, std=0.5, generator=torch.Generator().manual_seed(1))
        state.critics.mlp._compiled = compiled
        backward, loss, q = sac.objective(state, encode(state.actor, state.critics, state.target, batch, 0.99))
        backward()
        found.append((loss, q, state.critics.mlp.flat.grad.clone()))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def _bandit(action: gs.Space, reward) -> Bandit:
    """One state, one-step episodes."""
    spaces = Spaces(gs.Box(0, 1, (1,), np.float32), action)
    return Bandit(spaces, 1, lambda c: torch.ones(len(c), 1), reward)


@sabotaged_by("foresight.nets.outputs.TanhNormal.sample_logp", lambda f: lambda *a: (f(*a)[0], 0 * f(*a)[1]))
@sabotaged_by("foresight.nets.critics.SquashedActor.from_env", scaled(0.5))
def test_sac_finds_the_soft_optimal_policy() -> None:
    """With reward -(a - 1)² / 2 in world units on [-4, 4] and fixed α: π ∝ exp(r / α) is a normal with variance α."""
    env = _bandit(gs.Box(-4, 4, (1,), np.float32), lambda c, a: -0.5 * (a[:, 0] - 1) ** 2)
    config = sac.Config(
        steps=10_000, num_envs=8, learning_rate=5e-3, anneal_lr=True, batch_size=128, replay_size=20_000,
        learning_starts=1_000, train_every=8, entropy_temperature=0.25, learn_temperature=False, hidden=(32,), tau=0.05,
    )  # fmt: skip
    state = _last(sac, config, env)
    draws = state.actor.to_env(state.actor(torch.ones(4000, 1)).sample(state.generator)).detach()
    assert draws.mean().item() == pytest.approx(1, abs=0.1)
    assert draws.std().item() == pytest.approx(math.sqrt(0.25), abs=0.07)


@sabotaged_by("foresight.nets.outputs.Categorical.entropy", scaled(0.5))
def test_discrete_sac_finds_the_soft_optimal_policy() -> None:
    """π = softmax(r / α), and the soft value is α log Σ exp(r / α)."""
    rewards = torch.tensor([0.0, 0.3, 0.5])
    env = _bandit(gs.Discrete(3), lambda c, a: rewards[a])
    config = sac_discrete.Config(
        steps=8_000, num_envs=8, learning_rate=5e-3, batch_size=64, learning_starts=200, train_every=8,
        replay_size=10_000, entropy_temperature=0.25, learn_temperature=False, hidden=(16,),
    )  # fmt: skip
    state = _last(sac_discrete, config, env)
    found = state.actor(torch.ones(1, 1)).mean()[0].detach()
    torch.testing.assert_close(found, (rewards / 0.25).softmax(0), atol=0.03, rtol=0)


@sabotaged_by("foresight.nets.outputs.Categorical.entropy", flip_sign)
def test_the_temperature_finds_the_entropy_that_is_wanted() -> None:
    """Where nothing is to be gained the entropy would be the greatest; the temperature holds it where it should be."""
    env = _bandit(gs.Discrete(3), lambda c, a: torch.tensor([0.0, 0.3, 0.5])[a])
    config = sac_discrete.Config(
        steps=12_000, num_envs=8, learning_rate=5e-3, batch_size=64, learning_starts=200, train_every=8,
        replay_size=10_000, entropy_temperature=1.0, target_entropy=0.5, hidden=(16,),
    )  # fmt: skip
    state = _last(sac_discrete, config, env)
    assert state.actor(torch.ones(1, 1)).entropy().item() == pytest.approx(0.5 * math.log(3), abs=0.08)


@sabotaged_by("foresight.training.optim.track", change("rate", lambda r: 1.0))
def test_soft_targets_lag_behind() -> None:
    state = sac.build(sac.Config(hidden=(8,), tau=0.1), Spaces(gs.Box(-1, 1, (3,), np.float32), gs.Box(-1, 1, (1,))))
    before = state.target.mlp.flat.clone()
    batch = Transitions(
        torch.randn(16, 3), torch.rand(16, 1), torch.randn(16), torch.ones(16), torch.randn(16, 3), torch.arange(16)
    )
    sac.update(state, batch)
    expected = before + 0.1 * (state.critics.mlp.flat.detach() - before)
    torch.testing.assert_close(state.target.mlp.flat, expected)
    assert not torch.equal(state.critics.mlp.flat, before)
