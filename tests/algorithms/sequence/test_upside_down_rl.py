"""Upside-Down RL as a program: commands, the examples of them, a fixed point, learning, and mistakes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from foresight.algorithms.sequence import upside_down_rl as udrl
from foresight.data import episodes
from foresight.envs.base import Env
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.training import offline
from tests.algorithms.sequence.chain import SPACES, chain
from tests.algorithms.small_runs import last
from tests.algorithms.states import forgets, restored, stopped_and_whole, weights
from tests.sabotage import change, sabotaged_by

CONFIG = udrl.Config(
    steps=600, num_envs=2, warmup_episodes=8, replay_size=12, best_episodes=4, gradient_steps=10, batch_size=64,
    hidden=(16,),
)  # fmt: skip


def _cart_pole() -> Env:
    return make("CartPole-v1", num_envs=2)


@sabotaged_by("tests.algorithms.states.restored", *[forgets(x) for x in ("behavior", "replay", "generator", "sampler")])
def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    env = _cart_pole()
    stopped, whole = stopped_and_whole(udrl, CONFIG, _cart_pole)
    resumed = last(udrl, CONFIG, env, restored(udrl, stopped, env))
    assert stopped.step < resumed.step and torch.equal(weights(resumed), weights(whole))
    assert len(resumed.replay) == 12 and resumed.replay.returns.sort().values.equal(resumed.replay.returns)
    env.close()


def test_a_run_that_ends_with_its_first_episodes_is_refused() -> None:
    env = _cart_pole()
    with pytest.raises(UserError, match=r"The first 8 episodes took \d+ env steps, and the run ends after 5: nothing"):
        last(udrl, dataclasses.replace(CONFIG, steps=5), env)
    env.close()


@sabotaged_by("foresight.data.episodes.Episodes.highest", lambda f: lambda self, count: self)
def test_commands_are_those_of_the_best_episodes() -> None:
    state = udrl.build(CONFIG, SPACES)
    assert udrl.command(state, 2, True)[0].tolist() == [0, 0]  # before the first episode
    udrl.add(state, chain())  # returns 2: three of four are kept, 1: ten, 0: three
    assert len(state.replay) == 12 and float(state.replay.returns.min()) == 1
    asked, horizon = udrl.command(state, 500, True)  # of the four best: mean 1.75, deviation 0.433
    assert horizon.tolist() == [2] * 500
    assert 1.75 <= asked.min() < 1.8 and 2.13 < asked.max() <= 1.75 + 0.75**0.5 / 2
    assert udrl.command(state, 1, False)[0].item() == 1.75
    state.config = dataclasses.replace(CONFIG, target_return=9.0)
    assert udrl.command(state, 1, False)[0].item() == 9


@sabotaged_by("foresight.algorithms.sequence.upside_down_rl.rewarded", lambda f: lambda carry, reward: carry)
@sabotaged_by("foresight.algorithms.sequence.upside_down_rl.reset_carry", lambda f: lambda carry, cut: carry)
def test_a_command_shrinks_by_rewards_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    state = udrl.build(dataclasses.replace(CONFIG, target_return=5.0), SPACES)
    udrl.add(state, chain())
    seen, forward = [], udrl.Behavior.forward
    monkeypatch.setattr(udrl.Behavior, "forward",
                        lambda *args: seen.append([x.tolist() for x in args[2:]]) or forward(*args))  # fmt: skip
    carry = None
    for reward, cut in (([1.0, 2.0], [0, 0]), ([1.0, 2.0], [0, 1]), ([1.0, 2.0], [0, 0]), ([0.0, 0.0], [0, 0])):
        _, _, carry = udrl.act(state, torch.ones(2, 1), carry)
        carry = udrl.reset_carry(udrl.rewarded(carry, torch.tensor(reward)), torch.tensor(cut))
    assert [to_go for to_go, _ in seen] == [[5, 5], [4, 3], [3, 5], [2, 3]]
    assert [horizon for _, horizon in seen] == [[2, 2], [1, 1], [1, 2], [1, 1]]  # at least 1


@sabotaged_by("foresight.algorithms.sequence.upside_down_rl.update", change("to_go", lambda x: x.roll(1, 0)))
@sabotaged_by("foresight.algorithms.sequence.upside_down_rl.update", change("horizon", torch.zeros_like))
def test_it_learns_what_the_episodes_did_that_fulfilled_a_command() -> None:
    """Observations are constant, so an action depends on the command alone. Of return 1, half of the actions are 1."""
    config = dataclasses.replace(CONFIG, replay_size=16, batch_size=512, hidden=(32, 32), learning_rate=1e-2,
                                 return_scale=1.0, horizon_scale=1.0)  # fmt: skip
    state = udrl.build(config, SPACES)
    udrl.add(state, chain())
    for _ in range(200):
        udrl.update(state, *udrl.sample(state))
    with torch.no_grad():
        y = state.behavior(torch.ones(3, 1), torch.tensor([1.0, 2, 0]), torch.full((3,), 2.0))
        assert y.softmax(-1)[:, 1].tolist() == pytest.approx([0.5, 1, 0], abs=0.06)
        y = state.behavior(torch.ones(3, 1), torch.tensor([1.0, 2, 0]), torch.full((3,), 1.0))
        assert y.softmax(-1)[:, 1].tolist() == pytest.approx([0.5, 1, 0], abs=0.06)


def _one_step_more(sample):
    def mutant(state):
        *rest, horizon = sample(state)
        return *rest, horizon + 1

    return mutant


@sabotaged_by("foresight.algorithms.sequence.upside_down_rl.sample", _one_step_more)
def test_segments_end_where_they_were_drawn() -> None:
    """Rewards are 1 per step, so a command asks for as much as it has steps; to the end only without `to_end`."""
    obs = torch.arange(6.0)[:, None]
    data = episodes.Episodes(obs, torch.zeros(6).long(), torch.tensor([1.0] * 5 + [0]), torch.tensor([5]),
                             torch.tensor([True]))  # fmt: skip
    for to_end in (True, False):
        state = udrl.build(dataclasses.replace(CONFIG, to_end=to_end, batch_size=500), SPACES)
        udrl.add(state, data)
        obs, _, to_go, horizon = udrl.sample(state)
        assert torch.equal(to_go, horizon) and horizon.min() == 1 and horizon.max() == 5
        assert bool((obs[:, 0] + horizon == 5).all()) is to_end


def test_it_improves_on_its_first_episodes() -> None:
    env = make("CartPole-v1", num_envs=8)
    config = udrl.Config(
        steps=3_000, num_envs=8, warmup_episodes=24, replay_size=24, best_episodes=8, gradient_steps=30, batch_size=128,
        hidden=(32, 32), learning_rate=5e-3, to_end=False,
    )  # fmt: skip
    runs = udrl.train(config, env)
    random = sum(next(runs)[2].episodes.returns[:24]) / 24  # of the untrained policy
    *_, (_, _, state) = runs
    env.close()
    trained = sum(state.episodes.returns[-16:]) / 16
    assert trained > 1.5 * random, (trained, random)


def test_evaluation_samples_at_a_temperature() -> None:
    """At 1 as in exploration, and the likeliest action at 0 and just above it."""
    state = udrl.build(CONFIG, SPACES)
    udrl.add(state, chain())
    with torch.no_grad():
        state.behavior.head.bias[1:] += 1
    shares = {}
    for temperature in (0.0, 0.01, 0.5, 1.0):
        state.config = dataclasses.replace(CONFIG, temperature=temperature)
        shares[temperature] = float(udrl.act(state, torch.ones(2_000, 1))[0].float().mean())
    assert shares[0.0] == shares[0.01] == 1
    logit = torch.logit(torch.tensor([shares[0.5], shares[1.0]]))
    assert logit[0] == pytest.approx(2 * float(logit[1]), rel=0.15) and 0.5 < shares[1.0] < 0.95


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="best_episodes must be at least 1"):
        udrl.build(dataclasses.replace(CONFIG, best_episodes=0), SPACES)
    with pytest.raises(UserError, match="temperature is of a choice"):
        udrl.build(dataclasses.replace(CONFIG, temperature=-1.0), SPACES)
    with pytest.raises(UserError, match="hidden must have"):
        udrl.build(dataclasses.replace(CONFIG, hidden=()), SPACES)
    monkeypatch.setattr(offline, "read", lambda *_: chain())
    env = make("CartPole-v1", num_envs=1)
    with pytest.raises(UserError, match="num_envs is 2"):
        last(udrl, CONFIG, env)
    env.close()
    monkeypatch.setattr(offline, "read", lambda *_: dataclasses.replace(chain(), reward=torch.zeros(48)))
    with pytest.raises(UserError, match="The data have no rewards"):
        last(udrl, dataclasses.replace(CONFIG, data=("d",)), SimpleNamespace(spaces=SPACES, num_envs=2))
    with pytest.raises(UserError, match="The data have no rewards"):  # before the first evaluation
        udrl.read_files(udrl.build(dataclasses.replace(CONFIG, data=("d",)), SPACES))
