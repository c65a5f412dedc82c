"""DQN and Rainbow as programs: settings, observations, resuming, and mistakes."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.value import dqn, rainbow
from foresight.envs.base import Spaces
from foresight.errors import UserError
from tests.algorithms.policy.small_envs import choice, hidden_choice, sides
from tests.algorithms.states import forgets, restored, weights
from tests.algorithms.value.small_envs import Chain
from tests.sabotage import flip_sign, sabotaged_by

DQN = dqn.Config(
    steps=800, num_envs=8, learning_starts=64, train_every=8, batch_size=32, replay_size=4_000, hidden=(16,),
    learning_rate=5e-3, target_every=40, epsilon_fraction=0.5,
)  # fmt: skip
RAINBOW = rainbow.Config(
    steps=800, num_envs=8, learning_starts=64, train_every=8, batch_size=32, replay_size=4_000, hidden=(16,),
    learning_rate=5e-3, target_every=40, n_steps=2, value_range=(-1.0, 2.0),
)  # fmt: skip
BOTH = pytest.mark.parametrize(("module", "config"), [(dqn, DQN), (rainbow, RAINBOW)], ids=["dqn", "rainbow"])


def _last(module, config, env, state=None):
    *_, (_, _, state) = module.train(config, env, state)
    return state


@BOTH
def test_it_counts_steps_and_says_what_it_saw(module, config) -> None:
    seen = list(module.train(dataclasses.replace(config, steps=2_500), choice()))
    assert [step for step, _, _ in seen] == [1000, 2000, 2504]
    for step, metrics, state in seen:
        assert state.step in (step, 2504)
        assert set(module.METRICS) <= set(metrics)
        assert all(isinstance(x, float) for x in metrics.values())
    if module is dqn:
        assert [round(m["epsilon"], 3) for _, m, _ in seen] == [0.24, 0.05, 0.05]


@BOTH
def test_equal_seeds_give_equal_runs_and_others_do_not(module, config) -> None:
    runs = [weights(_last(module, dataclasses.replace(config, seed=seed), choice())) for seed in (3, 3, 4)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    before = torch.random.get_rng_state()
    _last(module, config, choice())
    assert torch.equal(before, torch.random.get_rng_state())  # the caller's generator is left alone


@sabotaged_by(
    "tests.algorithms.states.restored",
    *[forgets(name) for name in ("network", "target", "optimizer", "replay", "generator", "sampler")],
)
@BOTH
def test_a_resumed_run_is_the_uninterrupted_one(module, config) -> None:
    _resumes(module, config)


@sabotaged_by("tests.algorithms.states.restored", forgets("inner"))
def test_what_updates_draw_is_resumed_too() -> None:
    _resumes(rainbow, RAINBOW)


def _resumes(module, config) -> None:
    config, copies = dataclasses.replace(config, steps=1_600), []
    wild = {"epsilon_end": 0.5} if module is dqn else {"sigma": 3.0}  # so that it shows what is drawn
    config = dataclasses.replace(config, **wild)
    halfway = _last(module, dataclasses.replace(config, steps=800), Chain(8))
    for state in (copy.deepcopy(halfway), restored(module, halfway, Chain(8))):
        state.config = config
        copies.append(_last(module, config, Chain(8), state))
    assert copies[0].step == copies[1].step == 1600
    assert torch.equal(weights(copies[0]), weights(copies[1]))
    assert copies[0].episodes == copies[1].episodes


@BOTH
def test_a_finished_state_has_nothing_left_to_do(module, config) -> None:
    assert list(module.train(config, choice(), _last(module, config, choice()))) == []


@sabotaged_by("foresight.ops.fused.huber_q", lambda f: lambda *a: (-f(*a)[0], f(*a)[1]))
def test_dqn_learns_and_exploring_is_random_as_often_as_epsilon_says() -> None:
    env = choice()
    state = dqn.build(DQN, env.spaces)
    obs = env.reset(0)
    assert dqn.epsilon(state) == 1.0
    drawn = torch.stack([dqn.act(state, obs, explore=True)[0] for _ in range(300)])
    assert (drawn == env._context).float().mean().item() == pytest.approx(0.25, abs=0.05)  # a random policy
    state = _last(dqn, dataclasses.replace(DQN, steps=4_000), env, state)
    state.config = dataclasses.replace(DQN, steps=4_000, epsilon_end=0.4)
    action, extras, carry = dqn.act(state, obs)
    assert (action == torch.arange(8) % 4).all() and extras == {} and carry is None
    drawn = torch.stack([dqn.act(state, obs, explore=True)[0] for _ in range(1000)])
    assert (drawn == action).float().mean().item() == pytest.approx(0.6 + 0.4 / 4, abs=0.02)


@sabotaged_by("foresight.ops.distributional.project", flip_sign)
@pytest.mark.parametrize(
    "options", [{}, {"sigma": None, "epsilon": 0.1, "double": False, "dueling": False, "n_steps": 1}]
)
def test_rainbow_learns(options) -> None:
    env = choice()
    state = _last(rainbow, dataclasses.replace(RAINBOW, steps=5_000, **options), env)
    obs = env.reset(0)
    action, extras, carry = rainbow.act(state, obs)
    assert (action == env._context).all() and extras == {} and carry is None


def test_masked_actions_are_never_taken() -> None:
    env = hidden_choice()
    for module, config in ((dqn, DQN), (rainbow, RAINBOW)):
        for _, metrics, state in module.train(config, env):  # noqa: B007
            assert metrics["return"] == 1
        assert module.act(state, env.reset(0))[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


@sabotaged_by(
    "foresight.data.replay.Replay.gather", lambda f: lambda *a: dataclasses.replace(f(*a), reward=-f(*a).reward)
)
@BOTH
def test_pixels_are_learned_and_stay_bytes(module, config) -> None:
    env = sides()
    state = _last(module, dataclasses.replace(config, steps=600, learning_rate=1e-3, n_steps=1), env)
    assert (module.act(state, env.reset(0))[0] == env._context).all()
    rows = (state.replay if module is dqn else state.replay.replay).rows
    assert rows.obs.dtype == torch.uint8


def test_the_target_moves_when_it_should() -> None:
    seen = []
    state = dqn.build(dataclasses.replace(DQN, steps=200, target_every=100), choice().spaces)
    for _ in dqn.train(state.config, choice(), state):
        seen.append(torch.equal(state.target.body.flat, state.network.body.flat))
    assert seen == [True]  # 200 is a multiple of 100
    state = _last(dqn, dataclasses.replace(DQN, steps=264, target_every=100), choice())
    assert not torch.equal(state.target.body.flat, state.network.body.flat)


def _once_a_call(track):
    """As if the target moved once, however many gradient steps there were."""
    return lambda target, source, rate=1.0: track(target, source, 0.0 if rate < 1 else rate)


@sabotaged_by("foresight.training.optim.track", _once_a_call)
@pytest.mark.parametrize(("updates", "train_every", "moves"), [(1, 8, 3), (4, 8, 12), (1, 4, 6)])
def test_a_slow_target_moves_after_every_gradient_step(updates, train_every, moves) -> None:
    """The network stands still (rate 0), so that after k moves (1 - τ)ᵏ of the distance to it is left."""
    config = dataclasses.replace(
        DQN,
        learning_rate=0.0,
        tau=0.5,
        target_every=1,
        gradient_steps=updates,
        train_every=train_every,
        learning_starts=0,
    )
    env = choice()
    state = dqn.build(config, env.spaces)
    obs = env.reset(0)
    for _ in range(2):  # rows to learn from
        state.step = 1
        dqn.collect.remember(state.replay, dqn.rollout(state, env, obs)[0])
    state.step = 0
    with torch.no_grad():
        state.network.body.flat.normal_(generator=torch.Generator().manual_seed(0))
        state.target.body.flat.zero_()
    for _ in range(3):
        unroll, obs = dqn.rollout(state, env, obs)
        dqn.learn(state, unroll)
    torch.testing.assert_close(state.target.body.flat, (1 - 0.5**moves) * state.network.body.flat)
    assert state.gradient_steps == moves


CONTINUOUS = Spaces(gs.Box(-1, 1, (3,), np.float32), gs.Box(-2, 2, (1,), np.float32))
MISTAKES = [
    ({"num_envs": 4}, "num_envs is 4, but the environment has num_envs 8"),
    ({"n_steps": 0}, "n_steps must be at least 1"),
    ({"gamma": 1.5}, "gamma must be between 0 and 1"),
    ({"replay_size": 20}, "replay_size 20 is too small"),
    ({"activation": "tahn"}, "Did you mean 'tanh'"),
]


@BOTH
@pytest.mark.parametrize(("options", "says"), MISTAKES)
def test_mistakes_are_named(module, config, options, says) -> None:
    with pytest.raises(UserError, match=says):
        next(module.train(dataclasses.replace(config, **options), choice()))


def test_more_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="Did you mean 'atoms'"):
        dqn.build(dataclasses.replace(DQN, values="atom"), choice().spaces)
    for module, config in ((dqn, DQN), (rainbow, RAINBOW)):
        with pytest.raises(UserError, match=r"Discrete actions.*takes Box.*Use sac or ppo"):
            module.build(config, CONTINUOUS)
