"""DQN and Rainbow as programs: settings, observations, resuming, and mistakes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.value import dqn, rainbow
from foresight.data.priorities import Prioritized
from foresight.data.replay import Transitions
from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.ops import value
from foresight.ops.fused import double_q
from foresight.runtime import machine
from tests.algorithms.policy.small_envs import Clock, choice, hidden_choice, sides
from tests.algorithms.small_runs import GAMMA, last, time_limit_ends
from tests.algorithms.states import assert_seeds_decide, forgets
from tests.algorithms.value.small_envs import Chain
from tests.algorithms.value.value_runs import DQN, RAINBOW, resumes
from tests.sabotage import change, flip_sign, sabotaged_by, scaled, swap

BOTH = pytest.mark.parametrize(("module", "config"), [(dqn, DQN), (rainbow, RAINBOW)], ids=["dqn", "rainbow"])


@BOTH
def test_it_counts_steps_and_reports_its_metrics(module, config) -> None:
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
    assert_seeds_decide(module, config, choice)


@sabotaged_by(
    "tests.algorithms.states.restored",
    *[forgets(name) for name in ("network", "target", "optimizer", "replay", "generator", "sampler")],
)
@BOTH
def test_a_resumed_run_is_the_uninterrupted_one(module, config) -> None:
    resumes(module, config)


@BOTH
def test_a_finished_state_has_nothing_left_to_do(module, config) -> None:
    assert list(module.train(config, choice(), last(module, config, choice()))) == []


def _with_reward(factor: float):
    return change("columns", lambda columns: (*columns[:2], factor * columns[2], *columns[3:]))


@sabotaged_by("foresight.ops.fused.double_q.q_step", _with_reward(-1.0))
def test_dqn_learns_and_explores_at_random_with_probability_epsilon() -> None:
    env = choice()
    state = dqn.build(DQN, env.spaces)
    obs = env.reset(0)
    assert dqn.epsilon(state) == 1.0
    drawn = torch.stack([dqn.act(state, obs, explore=True)[0] for _ in range(300)])
    assert (drawn == env._context).float().mean().item() == pytest.approx(0.25, abs=0.05)  # a random policy
    state = last(dqn, dataclasses.replace(DQN, steps=4_000), env, state)
    state.config = dataclasses.replace(DQN, steps=4_000, epsilon_end=0.4)
    action, extras, carry = dqn.act(state, obs)
    assert (action == torch.arange(8) % 4).all() and extras == {} and carry is None
    drawn = torch.stack([dqn.act(state, obs, explore=True)[0] for _ in range(1000)])
    assert (drawn == action).float().mean().item() == pytest.approx(0.6 + 0.4 / 4, abs=0.02)


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
    state = last(module, dataclasses.replace(config, steps=600, learning_rate=1e-3, n_steps=1), env)
    assert (module.act(state, env.reset(0))[0] == env._context).all()
    rows = (state.replay if module is dqn else state.replay.replay).storage
    assert rows.obs.dtype == torch.uint8


def test_the_target_moves_when_it_should() -> None:
    seen = []
    state = dqn.build(dataclasses.replace(DQN, steps=200, target_every=100), choice().spaces)
    for _ in dqn.train(state.config, choice(), state):
        seen.append(torch.equal(state.target.body.flat, state.network.body.flat))
    assert seen == [True]  # 200 is a multiple of 100
    state = last(dqn, dataclasses.replace(DQN, steps=264, target_every=100), choice())
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
    for _ in range(2):  # rows to train on
        state.step = 1
        dqn.collect.add_to_replay(state.replay, dqn.rollout(state, env, obs)[0])
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
@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_named(module, config, options, message) -> None:
    with pytest.raises(UserError, match=message):
        next(module.train(dataclasses.replace(config, **options), choice()))


def test_more_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="Did you mean 'atoms'"):
        dqn.build(dataclasses.replace(DQN, values="atom"), choice().spaces)
    for module, config in ((dqn, DQN), (rainbow, RAINBOW)):
        with pytest.raises(UserError, match=r"Discrete actions.*takes Box.*Use sac or ppo"):
            module.build(config, CONTINUOUS)


CHAIN = dqn.Config(
    steps=800, num_envs=4, learning_rate=0.1, batch_size=32, replay_size=2_000, learning_starts=50, train_every=2,
    target_every=20, gamma=GAMMA, epsilon_end=1.0, hidden=(), value_range=(0.0, 12.0), max_grad_norm=1e9,
)  # fmt: skip


def _no_final(original):
    return lambda self, row, final: original(self, row)


@sabotaged_by("foresight.data.replay.Replay.add", time_limit_ends, _no_final)
@sabotaged_by("foresight.ops.fused.double_q.q_step", _with_reward(0.9))
@sabotaged_by("foresight.data.replay.Replay.gather", change("gamma", lambda g: 1.05 * g))
def test_dqn_reaches_the_closed_form() -> None:
    """With terminations, and cut by time limits only; with one reset rule and the other."""
    for env, double in ((Chain(4), False), (Chain(4, ends=True), True), (Chain(4, lost=True), False)):
        state = last(dqn, dqn.Config(**{**vars(CHAIN), "double": double}), env)
        torch.testing.assert_close(state.network(torch.eye(2)).mean().detach(), env.values(GAMMA), atol=0.1, rtol=0)


@sabotaged_by("foresight.ops.distributional.project", change("reward", lambda r: 0.9 * r))
@sabotaged_by("foresight.ops.distributional.quantile_huber_loss", change("target", lambda t: 0.9 * t))
@sabotaged_by("foresight.ops.value.huber_loss", flip_sign)
def test_dqn_reaches_the_closed_form_with_other_kinds_of_value() -> None:
    """Dueling numbers, atoms and quantiles. The chain is deterministic: its quantiles are all equal."""
    env = Chain(4, ends=True)
    for options in ({"dueling": True}, {"values": "atoms"}, {"values": "quantiles", "atoms": 11}):
        state = last(dqn, dqn.Config(**{**vars(CHAIN), **options}), env)
        torch.testing.assert_close(state.network(torch.eye(2)).mean().detach(), env.values(GAMMA), atol=0.15, rtol=0)


@sabotaged_by("foresight.data.replay.Replay.add", time_limit_ends)
def test_reward_one_for_ever_is_worth_twenty() -> None:
    """1 / (1 - 0.95), though every episode is cut after 8 steps."""
    config = dqn.Config(
        **{**vars(CHAIN), "gamma": 0.95, "num_envs": 8, "train_every": 8, "steps": 8_000, "learning_rate": 0.1}
    )
    state = last(dqn, config, Clock())
    assert state.network(torch.ones(1, 1)).mean().detach().flatten().tolist() == pytest.approx([20, 20], abs=1)


@sabotaged_by("foresight.ops.fused.double_q.huber_q", scaled(1.01), swap("following", "q"))
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


@sabotaged_by("foresight.ops.fused.double_q.q_step", _with_reward(1.01), change("double", lambda double: not double))
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("hidden", "threads"), [((16,), 1), ((256, 256), 1), ((256, 256), 2)])
def test_the_compiled_gradient_step_is_the_readable_one(hidden: tuple[int, ...], threads: int, double: bool) -> None:
    """Of a clipped gradient, with the moments of the steps before."""
    spaces, generator = Spaces(gs.Box(-1, 1, (5,), np.float32), gs.Discrete(3)), torch.Generator().manual_seed(0)
    rows = [
        Transitions(
            torch.randn(200, 5, generator=generator), torch.randint(0, 3, (200,), generator=generator),
            2 * torch.randn(200, generator=generator), 0.9 * torch.rand(200, generator=generator).round(),
            torch.randn(200, 5, generator=generator), torch.arange(200),
        ) for _ in range(3)
    ]  # fmt: skip
    found = []
    for compiled in (True, False):
        state = dqn.build(dqn.Config(double=double, hidden=hidden, max_grad_norm=0.1), spaces)
        torch.nn.init.normal_(state.target.body.flat, std=0.2, generator=torch.Generator().manual_seed(1))
        state.network.body._compiled = compiled
        with machine.threads(threads):
            losses = torch.tensor([list(dqn.update(state, batch).values()) for batch in rows])
        moments = state.optimizer.state[state.network.body.flat]
        assert moments["step"] == 3
        found.append([losses, state.network.body.flat.detach(), moments["exp_avg"], moments["exp_avg_sq"]])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())


@sabotaged_by("foresight.nets.precision.dtype", lambda f: lambda *_: None)
def test_updates_in_bfloat16_are_near_those_in_float32() -> None:
    spaces = Spaces(gs.Box(-1, 1, (5,), np.float32), gs.Discrete(3))
    batch = Transitions(
        torch.randn(70, 5), torch.randint(0, 3, (70,)), torch.randn(70), torch.full((70,), 0.9), torch.randn(70, 5),
        torch.arange(70),
    )  # fmt: skip
    losses = []
    for precision in ("float32", "bfloat16"):
        state = dqn.build(dqn.Config(precision=precision), spaces)
        for module in (state.network, state.target):
            torch.nn.init.normal_(module.body.flat, std=0.1, generator=torch.Generator().manual_seed(0))
        losses.append(dqn.update(state, batch)["loss"])
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)


@sabotaged_by("foresight.ops.value.double_q_target", swap("reward", "discount"))
def test_the_compiled_gradient_is_that_of_the_q_target() -> None:
    q = torch.randn(40, 3, requires_grad=True)
    action, choice = torch.randint(0, 3, (40,)), torch.randint(0, 3, (40,))
    reward, discount, following = torch.randn(40), torch.rand(40), torch.randn(40, 3)
    grad, seen = double_q.huber_q(q.detach(), action, reward, discount, following, choice)
    done = q.gather(-1, action[:, None])[:, 0]
    loss = value.huber_loss(done, value.double_q_target(reward, discount, following, choice)).mean()
    loss.backward()
    torch.testing.assert_close(grad, q.grad)
    torch.testing.assert_close(seen, torch.stack([loss, done.mean()]).detach())


PRIORITIZED = {"priority_exponent": 0.6}
KINDS = pytest.mark.parametrize(
    "options", [{}, {"double": True}, {"values": "quantiles", "atoms": 5}, {"values": "atoms"}]
)


def _unweighted(original):
    return lambda state: dataclasses.replace(batch := original(state), weight=torch.ones_like(batch.weight))


@sabotaged_by("foresight.algorithms.value.dqn.sample", _unweighted)
@KINDS
def test_prioritized_replay_is_uniform_replay_on_average(options) -> None:
    """With the whole correction, weights times probabilities are equal."""
    config = dataclasses.replace(DQN, **{**PRIORITIZED, **options}, priority_correction=1.0)
    state = last(dqn, dataclasses.replace(config, steps=160), choice())
    assert isinstance(state.replay, Prioritized) and state.replay.tree is not None
    batch = dqn.sample(state)
    probability = state.replay.tree[batch.key] / state.replay.tree.total
    assert probability.unique().numel() > 3  # they were trained on
    torch.testing.assert_close(
        (batch.weight * probability / (batch.weight * probability).max()).float(), torch.ones(32)
    )


@sabotaged_by("foresight.algorithms.value.dqn.sample", lambda f: lambda s: dataclasses.replace(f(s), weight=None))
@KINDS
def test_equal_priorities_are_uniform_replay(options) -> None:
    """What has not been trained on yet has equal priorities: every step is as likely, and weighs 1."""
    config = dataclasses.replace(DQN, **{**PRIORITIZED, **options}, learning_starts=10_000)
    state = last(dqn, dataclasses.replace(config, steps=160), choice())
    batch = dqn.sample(state)
    assert batch.weight is not None and torch.equal(batch.weight, torch.ones_like(batch.weight))
    shares = state.replay.tree[batch.key] / state.replay.tree.total
    assert len(shares.unique()) == 1 and 1 / shares[0] == pytest.approx(len(state.replay), abs=8 * config.n_steps)


@sabotaged_by("foresight.data.priorities.Prioritized.update", change("priority", lambda p: p + 1))
@KINDS
def test_priorities_are_the_errors_of_the_batch(options) -> None:
    """|δ| of scalars and of means of quantiles, the KL of atoms; weights multiply the loss of each transition."""
    config = dataclasses.replace(DQN, **{"priority_exponent": 1.0, **options}, learning_rate=0.0, tau=0.5)
    state = last(dqn, dataclasses.replace(config, steps=160), choice())
    assert isinstance(state.replay, Prioritized) and state.replay.tree is not None
    batch = dqn.sample(state)
    dqn.update(state, batch)
    with torch.no_grad():
        next_q, q = state.target(batch.next_obs), state.network(batch.obs).pick(batch.action)
        online = state.network(batch.next_obs) if config.double else next_q
        target = next_q.pick(online.mean().argmax(-1)).backup(batch.reward, batch.discount)
        if config.values == "atoms":
            expected = (target * (target.clamp(min=1e-30).log() - q.logits.log_softmax(-1))).sum(-1)
        else:
            expected = ((target.mean(-1) if target.dim() > 1 else target) - q.mean()).abs()
    torch.testing.assert_close(state.replay.tree[batch.key].float(), expected, atol=1e-5, rtol=1e-4)


def test_weights_of_one_are_no_weights() -> None:
    """The prioritized objective, of the readable loss, becomes DQN's, of the compiled one."""
    state = dqn.build(DQN, choice().spaces)
    torch.nn.init.normal_(state.network.body.flat, std=0.8)
    batch = Transitions(
        torch.randn(70, 4), torch.randint(0, 4, (70,)), 2 * torch.randn(70), torch.rand(70), torch.randn(70, 4),
        torch.arange(70),
    )  # fmt: skip
    found = []
    for weight in (None, torch.ones(70), torch.arange(70) % 2.0):
        backward, loss, _, error = dqn.objective(state, dataclasses.replace(batch, weight=weight))
        backward()
        found.append((loss, state.network.body.flat.grad.clone()))
        state.network.zero_grad()
        assert (error is None) == (weight is None)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found[0][1], found[2][1])


@sabotaged_by("foresight.data.priorities.Prioritized.transitions", change("beta", lambda b: 0.4))
@pytest.mark.parametrize(
    ("module", "config"), [(dqn, dataclasses.replace(DQN, **PRIORITIZED)), (rainbow, RAINBOW)], ids=["dqn", "rainbow"]
)
def test_the_correction_of_priorities_rises_to_the_whole(module, config) -> None:
    """β of the weights (P_min / P)^β: `priority_correction` at the start, 1 at the end, in equal steps between."""
    state = last(module, dataclasses.replace(config, steps=160, priority_correction=0.4), choice())
    assert isinstance(state.replay, Prioritized) and state.replay.tree is not None
    for step, beta in ((0, 0.4), (80, 0.7), (160, 1.0), (168, 1.0)):
        state.step = step
        batch = module.sample(state)
        priority = state.replay.tree[batch.key]
        assert priority.max() > 1.2 * priority.min()
        torch.testing.assert_close(batch.weight, ((priority.min() / priority) ** beta).float())


def test_a_resumed_prioritized_run_is_the_uninterrupted_one() -> None:
    resumes(dqn, dataclasses.replace(DQN, **PRIORITIZED))
