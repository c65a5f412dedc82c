"""SAC and discrete SAC as programs: settings, observations, resuming, and mistakes."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.policy import sac, sac_discrete
from foresight.data.replay import Transitions
from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.nets.critics import encode
from foresight.runtime import machine
from tests.algorithms.policy.sac_runs import DISCRETE, SAC, aim
from tests.algorithms.policy.small_envs import choice, sides
from tests.algorithms.small_runs import bandit, last
from tests.algorithms.states import assert_seeds_decide, continued, forgets, halfway_and_end, restored, weights
from tests.sabotage import change, sabotaged_by, scaled

CASES = [(sac, SAC, aim), (sac_discrete, DISCRETE, choice)]
BOTH = pytest.mark.parametrize(("module", "config", "make"), CASES, ids=["sac", "discrete"])


@BOTH
def test_it_counts_steps_and_reports_its_metrics(module, config, make) -> None:
    seen = list(module.train(dataclasses.replace(config, steps=1_500), make()))
    assert [step for step, _, _ in seen] == [1000, 1504]
    for step, metrics, state in seen:
        assert state.step in (step, 1504)
        assert set(metrics) == {"critic_loss", "q", "alpha", "entropy", "return", "length"} >= set(module.METRICS)
        assert all(isinstance(x, float) for x in metrics.values())


@BOTH
def test_equal_seeds_give_equal_runs_and_others_do_not(module, config, make) -> None:
    assert_seeds_decide(module, config, make)


FIELDS = (
    "actor", "critics", "log_alpha", "actor_optimizer", "critic_optimizer", "alpha_optimizer", "replay",
    "generator", "sampler",
)  # fmt: skip


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in FIELDS])
@BOTH
def test_a_resumed_run_is_the_uninterrupted_one(module, config, make) -> None:
    _resumes(module, config, make)


@sabotaged_by("tests.algorithms.states.restored", forgets("inner"))
def test_what_updates_draw_is_resumed_too() -> None:
    _resumes(sac, SAC, aim)


def _resumes(module, config, make) -> None:
    halfway, whole = halfway_and_end(module, config, make, 960)
    resumed = continued(module, restored(module, halfway, make()), make(), 960)
    assert whole.step == resumed.step == 960
    assert torch.equal(weights(whole), weights(resumed))
    assert whole.episodes == resumed.episodes


@sabotaged_by("foresight.ops.fused.soft.soft_step", change("columns", lambda x: (*x[:5], -x[5], *x[6:])))  # the reward
@sabotaged_by("foresight.nets.critics.SquashedActor.from_env", lambda f: lambda self, action: -f(self, action))
def test_sac_learns_where_to_aim() -> None:
    env = aim()
    config = dataclasses.replace(SAC, steps=2_000, learning_rate=0.02, train_every=4)
    state = sac.build(config, env.spaces)
    obs = env.reset(0)
    drawn = torch.stack([env._reward(env._context, sac.act(state, obs, explore=True)[0]) for _ in range(200)])
    assert drawn.mean() < -2  # a random policy: uniform over the bounds before learning starts
    state = last(sac, config, env, state)
    obs = env.reset(0)
    action, extras, carry = sac.act(state, obs)
    assert env._reward(env._context, action).min() > -0.2 and extras == {} and carry is None
    assert torch.equal(action, sac.act(state, obs)[0])


def test_first_actions_are_uniform() -> None:
    state = sac.build(SAC, aim().spaces)
    obs = torch.eye(4)[torch.zeros(20_000, dtype=torch.int64)]
    drawn = sac.act(state, obs, explore=True)[0]
    torch.testing.assert_close(drawn.mean(0), torch.tensor([0.0, 2.0]), atol=0.05, rtol=0)
    torch.testing.assert_close(drawn.std(0), torch.full((2,), 4 / 12**0.5), atol=0.03, rtol=0)
    discrete = sac_discrete.build(DISCRETE, choice().spaces)
    counts = sac_discrete.act(discrete, obs, explore=True)[0].bincount(minlength=4)
    assert (counts - 5000).abs().max() < 5 * 5000**0.5


def test_pixels_are_learned() -> None:
    def near(c: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return -((a[:, 0] - (2.0 * c - 1) / 2).square())

    options = {"steps": 1_200, "learning_rate": 1e-3, "hidden": (32,), "entropy_temperature": 0.05}
    env = sides(gs.Box(-1, 1, (1,), np.float32), near)
    state = last(sac, dataclasses.replace(SAC, **options), env)
    assert near(env._context, sac.act(state, env.reset(0))[0]).min() > -0.15
    env = sides()
    state = last(sac_discrete, dataclasses.replace(DISCRETE, **{**options, "steps": 500}), env)
    assert (sac_discrete.act(state, env.reset(0))[0] == env._context).all()


MISTAKES = [
    ({"num_envs": 4}, "num_envs is 4, but the environment has num_envs 8"),
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"gamma": 1.5}, "gamma must be between 0 and 1"),
    ({"entropy_temperature": 0.0}, "entropy_temperature must be above 0"),
    ({"backbone": "critic"}, "backbone 'critic' has no effect without a memory"),
    ({"replay_size": 10}, "replay_size 10 is too small"),
    ({"memory": "gru", "replay_size": 8 * 33}, "33 steps per environment, but a batch needs more than 33"),
]


@BOTH
@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_named(module, config, make, options, message) -> None:
    with pytest.raises(UserError, match=message):
        next(module.train(dataclasses.replace(config, **options), make()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "half"}, "Unknown precision 'half'"),
        ({"precision": "bfloat16", "memory": "gru"}, "needs precision float32"),
    ],
)
def test_precisions_that_do_not_fit_are_named(options, message) -> None:
    with pytest.raises(UserError, match=message):
        sac.build(dataclasses.replace(SAC, **options), aim().spaces)


def test_actions_of_the_wrong_kind_are_named() -> None:
    with pytest.raises(UserError, match=r"continuous actions.*takes Discrete.*sac_discrete"):
        sac.build(SAC, choice().spaces)
    with pytest.raises(UserError, match=r"Discrete actions.*takes Box.*Use sac or ppo"):
        sac_discrete.build(DISCRETE, aim().spaces)


@sabotaged_by("foresight.ops.fused.soft.soft_q", scaled(1.01), change("alpha", lambda a: 2 * a))
@sabotaged_by("foresight.ops.fused.mlp.backward", change("grads", lambda gs: [1.1 * g for g in gs]))
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


@sabotaged_by("foresight.ops.fused.soft.soft_step", change("alpha", lambda a: 1.1 * a), change("relu", lambda r: not r))
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("hidden", "threads"), [((16,), 1), ((256, 256), 1), ((256, 256), 2)])
def test_the_compiled_gradient_steps_are_the_readable_ones(hidden: tuple[int, ...], threads: int, every: int) -> None:
    """Of critics and policy, with the moments of the steps before, and log-stds within and outside their bounds."""
    spaces, drawn = Spaces(gs.Box(-1, 1, (5,), np.float32), gs.Box(-2, 3, (2,), np.float32)), torch.Generator()
    rows = [
        Transitions(
            torch.randn(200, 5, generator=drawn), torch.rand(200, 2, generator=drawn),
            torch.randn(200, generator=drawn), 0.9 * torch.rand(200, generator=drawn).round(),
            torch.randn(200, 5, generator=drawn), torch.arange(200),
        ) for _ in range(4)
    ]  # fmt: skip
    found = []
    for compiled in (True, False):
        config = sac.Config(hidden=hidden, policy_every=every, entropy_temperature=0.3, log_std_bounds=(-0.1, 0.1))
        state = sac.build(config, spaces)
        for module, seed in ((state.critics, 1), (state.target, 2), (state.actor, 3)):
            torch.nn.init.normal_(module.mlp.flat, std=0.1, generator=torch.Generator().manual_seed(seed))
        state.critics.mlp._compiled = state.actor.mlp._compiled = compiled
        with machine.threads(threads):
            metrics = [sac.update(state, batch) for batch in rows]
        seen = torch.tensor(
            [[row.get(name, 0.0) for name in ("critic_loss", "q", "alpha", "entropy")] for row in metrics]
        )
        for optimizer, module in ((state.critic_optimizer, state.critics), (state.actor_optimizer, state.actor)):
            moments = optimizer.state[module.mlp.flat]
            assert moments["step"] == (4 if module is state.critics else 4 // every)
            seen = [*seen, module.mlp.flat.detach(), moments["exp_avg"], moments["exp_avg_sq"]]
        found.append([*seen, state.log_alpha.detach(), state.target.mlp.flat])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())


@sabotaged_by("foresight.nets.precision.dtype", lambda f: lambda *_: None)
def test_updates_in_bfloat16_are_near_those_in_float32() -> None:
    spaces = Spaces(gs.Box(-1, 1, (3,), np.float32), gs.Box(-2, 2, (2,), np.float32))
    batch = Transitions(
        torch.randn(70, 3), torch.randn(70, 2), torch.randn(70), torch.full((70,), 0.9), torch.randn(70, 3),
        torch.arange(70),
    )  # fmt: skip
    found = []
    for precision in ("float32", "bfloat16"):
        state = sac.build(sac.Config(precision=precision), spaces)
        for module in (state.critics, state.target, state.actor):
            torch.nn.init.normal_(module.mlp.flat, std=0.1, generator=torch.Generator().manual_seed(1))
        found.append(sac.update(state, batch))
    for name in ("critic_loss", "q", "entropy"):
        assert found[0][name] != found[1][name] == pytest.approx(found[0][name], rel=0.02)


@sabotaged_by("foresight.ops.fused.soft.soft_step", change("alpha", lambda alpha: 0 * alpha))
@sabotaged_by("foresight.nets.critics.SquashedActor.from_env", scaled(0.5))
def test_sac_finds_the_soft_optimal_policy() -> None:
    """With reward -(a - 1)² / 2 on [-4, 4] and fixed α: π ∝ exp(r / α) is a normal with variance α."""
    env = bandit(gs.Box(-4, 4, (1,), np.float32), lambda c, a: -0.5 * (a[:, 0] - 1) ** 2)
    config = sac.Config(
        steps=4_000, num_envs=8, learning_rate=1e-2, anneal_lr=True, batch_size=64, replay_size=20_000,
        learning_starts=400, train_every=8, entropy_temperature=0.25, learn_temperature=False, hidden=(32, 32), tau=0.1,
    )  # fmt: skip
    state = last(sac, config, env)
    draws = state.actor.to_env(state.actor(torch.ones(4000, 1)).sample(state.generator)).detach()
    assert draws.mean().item() == pytest.approx(1, abs=0.1)
    assert draws.std().item() == pytest.approx(math.sqrt(0.25), abs=0.07)


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


def _batch(rows: int = 32) -> Transitions:
    drawn = torch.Generator().manual_seed(0)
    return Transitions(
        torch.randn(rows, 3, generator=drawn), torch.rand(rows, 1, generator=drawn), torch.randn(rows, generator=drawn),
        torch.ones(rows), torch.randn(rows, 3, generator=drawn), torch.arange(rows),
    )  # fmt: skip


SMALL = Spaces(gs.Box(-1, 1, (3,), np.float32), gs.Box(-1, 1, (1,), np.float32))


@sabotaged_by("tests.algorithms.states.restored", forgets("gradient_steps"))
def test_the_policy_may_be_updated_less_often_than_the_critics() -> None:
    """Every second gradient step moves policy and temperature, also after a restart; with 1 every one does."""
    state, moved = sac.build(sac.Config(hidden=(8,), policy_every=2), SMALL), []
    for _ in range(4):
        critics, actor, alpha = state.critics.mlp.flat.clone(), state.actor.mlp.flat.clone(), state.log_alpha.clone()
        metrics = sac.update(state, _batch())
        assert not torch.equal(critics, state.critics.mlp.flat)
        moved.append(not torch.equal(actor, state.actor.mlp.flat))
        assert moved[-1] == ("entropy" in metrics) == (not torch.equal(alpha, state.log_alpha))
        state = restored(sac, state, SimpleNamespace(spaces=SMALL))
    assert moved == [False, True, False, True]


@sabotaged_by("foresight.nets.critics.SquashedActor.__init__", change("log_std_bounds", lambda b: (-5.0, 2.0)))
def test_the_log_std_stays_within_its_bounds() -> None:
    """Far outside, the spread of the actions before the tanh is that of the bound."""
    state = sac.build(sac.Config(hidden=(), log_std_bounds=(-1.0, 0.5)), SMALL)
    for bias, bound in ((-9.0, -1.0), (9.0, 0.5)):
        state.actor.mlp.layers()[0][-1][1][1] = bias  # the bias of the last layer
        assert state.actor(torch.zeros(1, 3)).base.std.log().item() == pytest.approx(bound)
    with pytest.raises(UserError, match="log_std_bounds"):
        sac.build(sac.Config(log_std_bounds=(1.0, 1.0)), SMALL)
    with pytest.raises(UserError, match="has no effect with state_dependent_noise"):
        sac.build(sac.Config(log_std_bounds=(-1.0, 0.5), state_dependent_noise=4), SMALL)
    with pytest.raises(UserError, match="noise_log_std is of state_dependent_noise"):
        sac.build(sac.Config(noise_log_std=-1.0), SMALL)
