"""Acting apart from learning, in one process: lag, order, weights, lost and stale messages, tasks."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foresight.algorithms.policy import a2c, impala, off_policy_ac, ppg, ppo, sac, sac_discrete, trpo
from foresight.algorithms.value import dqn, rainbow
from foresight.envs.base import Episodes
from foresight.envs.control import multi_task
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.runtime import run
from foresight.runtime.config import resolve
from foresight.runtime.distributed import actors, learner, ray_cluster
from foresight.runtime.monitoring import profile
from foresight.runtime.session import Session
from tests.algorithms.policy.small_envs import choice
from tests.algorithms.states import weights
from tests.sabotage import change, sabotaged_by

FIELDS: dict[str, Any] = {"hidden": (16,), "num_envs": 4, "rollout_steps": 8}
IMPALA = impala.Config(steps=640, rollouts_per_update=2, max_lag=0, optimizer="adam", learning_rate=3e-3, **FIELDS)
HELD = dataclasses.replace(IMPALA, steps=320, state_dependent_noise=3, log_std=-2.0)
PPO = ppo.Config(steps=320, minibatches=2, **FIELDS)
A2C = a2c.Config(steps=160, memory="lstm", memory_size=8, **FIELDS)
OFF = off_policy_ac.Config(steps=160, replay_ratio=2, **FIELDS)
REPLAYED: dict[str, Any] = {
    "hidden": (16,), "num_envs": 2, "steps": 120, "learning_starts": 40, "replay_size": 200, "batch_size": 8,
    "max_lag": 0, "learning_rate": 0.03, "train_every": 1,
}  # fmt: skip
WITH_REPLAY = [
    (dqn, dqn.Config(**REPLAYED), "CartPole-v1"),
    (dqn, dqn.Config(**REPLAYED, rollout_steps=3, n_steps=2), "CartPole-v1"),
    (rainbow, rainbow.Config(**REPLAYED, atoms=5), "CartPole-v1"),
    (sac_discrete, sac_discrete.Config(**REPLAYED), "CartPole-v1"),
    (sac, sac.Config(**REPLAYED), "Pendulum-v1"),
    (sac, sac.Config(**REPLAYED, memory="gru", memory_size=8, sequence_length=3, burn_in=2), "Pendulum-v1"),
]


def _fleet(module: Any, config: Any, count: int = 1, env: Any = None, lives: int = 0) -> actors.Inline:
    name = module.__name__.rpartition(".")[2]
    env = env or (lambda: make("CartPole-v1", num_envs=config.num_envs))
    return actors.Inline([actors.Collector(name, dataclasses.asdict(config), env, i, lives) for i in range(count)])


Rows = Iterable[tuple[int, dict[str, float], torch.Tensor]]
_ALONE: dict[str, Rows] = {}


def alone(module: Any, config: Any, task: str, env: Any) -> Rows:
    """Steps, metrics and weights of the run of one process, which is made once: it has no part that a test mutates."""
    key = repr((module.__name__, config, task))
    if key not in _ALONE:
        _ALONE[key] = [(step, m, weights(s)) for step, m, s in module.train(config, env)]
    return _ALONE[key]


def same(apart: Rows, together: Rows) -> None:
    """They are compared as they come: the first difference ends the run."""
    for (step, metrics, moved), (wanted, expected, whole) in zip(apart, together, strict=True):
        assert step == wanted
        assert torch.equal(moved, whole)
        assert metrics["lag"] == 0
        assert {key: metrics[key] for key in expected} == expected


def learned(module: Any, config: Any, fleet: Any, task: str = "CartPole-v1") -> Iterator[tuple[int, Any, Any]]:
    """Steps, metrics and the State of a run with actors."""
    return learner.train(module, config, module.build(config, make(task, num_envs=1).spaces), fleet)


def steps(module: Any, config: Any, fleet: Any, task: str = "CartPole-v1") -> Rows:
    """The same as `alone`, of a run with actors, as it comes."""
    return ((step, m, weights(s)) for step, m, s in learned(module, config, fleet, task))


def _apart(
    module: Any, config: Any, fleet: Any, task: str = "CartPole-v1"
) -> list[tuple[int, dict[str, float], torch.Tensor]]:
    return list(steps(module, config, fleet, task))


def _late(take: Any) -> Any:
    """Weights that are one update old."""
    held: list[Any] = []

    def old(module: Any, state: Any, version: int) -> Any:
        held.append(actors.trees.merge(lambda leaves: leaves[0].copy(), [take(module, state, version).parts]))
        return actors.Weights(version, state.step, held[max(0, len(held) - 2)])

    return old


@sabotaged_by("foresight.runtime.distributed.actors.get_weights", _late)
@sabotaged_by("foresight.runtime.distributed.actors.load_weights", lambda f: lambda state, weights: None)
@pytest.mark.parametrize(
    ("module", "config", "task"),
    [
        (impala, IMPALA, "CartPole-v1"),
        (ppo, PPO, "CartPole-v1"),
        (a2c, A2C, "CartPole-v1"),
        (off_policy_ac, OFF, "CartPole-v1"),
        (impala, HELD, "Pendulum-v1"),
    ],
    ids=["impala", "ppo", "a2c", "off_policy_ac", "impala-gsde"],
)
def test_without_staleness_it_is_the_synchronous_run(module: Any, config: Any, task: str) -> None:
    """One actor in lockstep: bit for bit what `train` does in one process."""
    together = alone(module, config, task, make(task, num_envs=4))
    same(steps(module, config, _fleet(module, config, env=lambda: make(task, num_envs=4)), task), together)


@sabotaged_by("foresight.runtime.distributed.actors.get_weights", _late)
@pytest.mark.parametrize(
    ("module", "config", "task"),
    WITH_REPLAY,
    ids=["dqn", "dqn-unrolls", "rainbow", "sac_discrete", "sac", "sac-memory"],
)
def test_with_a_replay_too_lockstep_is_the_run_of_one_process(
    module: Any, config: Any, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows reach the replay as if its envs were here: the same draws, the same gradient steps, bit for bit."""
    monkeypatch.setattr(module, "REPORT", 50)
    together = alone(module, config, task, make(task, num_envs=2))
    same(steps(module, config, _fleet(module, config, env=lambda: make(task, num_envs=2)), task), together)


def _rows_of(config: dqn.Config, fleet: Any) -> Any:
    state = dqn.build(config, make("CartPole-v1", num_envs=1).spaces)
    *_, (_, metrics, _) = learner.train(dqn, config, state, fleet)
    return metrics, state.replay.storage, len(state.replay) // config.num_envs


def _shuffled(messages: Any) -> Any:
    """Messages in the order in which they happen to come."""
    return lambda self: messages(self)[:: -1 if self.version % 2 else 1]


@sabotaged_by("foresight.runtime.distributed.learner._Learner.in_order", _shuffled)
@pytest.mark.parametrize("max_lag", [0, 2])
def test_in_the_replay_every_stream_is_one_environment(max_lag: int) -> None:
    """Two actors share four envs: at a row that is not cut, CartPole's next position follows from its velocity."""
    config = dqn.Config(**{**REPLAYED, "num_envs": 4, "max_lag": max_lag}, rollout_steps=2)
    share = dataclasses.replace(config, num_envs=2)
    metrics, rows, held = _rows_of(config, _fleet(dqn, share, 2, env=lambda: make("CartPole-v1", num_envs=2)))
    assert metrics["lag"] == max_lag
    assert rows.obs.shape[0] == 4
    obs, inside = rows.obs[:, :held], (rows.cut[:, : held - 1] == 0)
    step = obs[:, :-1, 0] + 0.02 * obs[:, :-1, 1]
    assert inside.sum() > 50
    assert (step - obs[:, 1:, 0])[inside].abs().max() < 1e-5


@sabotaged_by("foresight.algorithms.value.dqn.restart", lambda f: lambda state: None)
def test_a_successor_of_a_dead_actor_begins_new_episodes_in_the_replay() -> None:
    """No transition leads from the environment of one that died to that of another that took its place."""
    config = dqn.Config(**{**REPLAYED, "max_lag": 1})
    inner = _fleet(dqn, config, env=lambda: make("CartPole-v1", num_envs=2))
    fleet = Reborn(inner, 25, lambda: _fleet(dqn, config, env=lambda: make("CartPole-v1", num_envs=2), lives=1))
    metrics, rows, held = _rows_of(config, fleet)
    assert metrics["dropped_unrolls"] == metrics["actor_restarts"] == 2
    obs, inside = rows.obs[:, :held], rows.cut[:, : held - 1] == 0
    assert (obs[:, :-1, 0] + 0.02 * obs[:, :-1, 1] - obs[:, 1:, 0])[inside].abs().max() < 1e-5


@sabotaged_by("foresight.runtime.distributed.actors.get_weights", change("version", lambda v: 0, label="never_counts"))
def test_lag_counts_the_updates_between_acting_and_learning() -> None:
    """Three actors that owe two messages each, one message an update: the seventh is five updates old."""
    config = dataclasses.replace(IMPALA, rollouts_per_update=1, max_lag=None)
    lags = [metrics["lag"] for _, metrics, _ in _apart(impala, config, _fleet(impala, config, 3))]
    assert lags[:8] == [0, 1, 2, 3, 4, 5, 5, 5]
    assert set(lags[8:]) == {5}


def test_messages_older_than_max_lag_are_dropped_and_counted() -> None:
    config = dataclasses.replace(IMPALA, rollouts_per_update=1, max_lag=2)
    seen = _apart(impala, config, _fleet(impala, config, 3))
    assert max(metrics["lag"] for _, metrics, _ in seen) <= 2
    assert seen[-1][1]["stale_unrolls"] > 0
    assert [step for step, _, _ in seen] == list(range(32, 641, 32))  # only what was trained on counts


class Mortal:
    """A fleet whose actors lose the requests with the numbers `dies`."""

    def __init__(self, inner: actors.Inline, dies: set[int]) -> None:
        self.inner, self.dies, self.size, self.restarts = inner, dies, inner.size, 0
        self.lost: deque[actors.LostMessage] = deque()
        self.closed = False

    def request(self, actor: int, order: int, weights: actors.Weights) -> None:
        if order in self.dies:
            self.lost.append(actors.LostMessage(actor, order))
            self.restarts += 1
        else:
            self.inner.request(actor, order, weights)

    def receive(self) -> actors.Message | actors.LostMessage:
        return self.lost.popleft() if self.lost else self.inner.receive()

    def close(self) -> None:
        self.closed = True


class Reborn:
    """A fleet of one actor that dies at the request `when`, with all that it was asked before, and is replaced."""

    size = 1

    def __init__(self, inner: actors.Inline, when: int, another: Any) -> None:
        self.inner, self.when, self.another, self.restarts = inner, when, another, 0
        self.lost: deque[actors.LostMessage] = deque()

    def request(self, actor: int, order: int, weights: actors.Weights) -> None:
        self.inner.request(actor, order, weights)
        if order == self.when:
            orders = [asked for _, asked, _ in self.inner._requests]
            self.lost.extend(actors.LostMessage(actor, asked) for asked in orders)
            self.restarts = len(orders)
            self.inner = self.another()

    def receive(self) -> actors.Message | actors.LostMessage:
        return self.lost.popleft() if self.lost else self.inner.receive()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("max_lag", [0, None])
def test_a_lost_message_is_counted_and_requested_again(max_lag: int | None) -> None:
    config = dataclasses.replace(IMPALA, max_lag=max_lag)
    fleet = Mortal(_fleet(impala, config, 2), {1, 2, 7})
    seen = _apart(impala, config, fleet)
    assert seen[-1][0] == 640
    assert seen[-1][1]["dropped_unrolls"] == seen[-1][1]["actor_restarts"] == 3
    assert fleet.closed


def test_lockstep_with_a_lost_message_learns_the_same() -> None:
    """An actor that answers late, or whose place another takes before it began, changes nothing but the clock."""
    one = _apart(impala, IMPALA, _fleet(impala, IMPALA))
    other = _apart(impala, IMPALA, Mortal(_fleet(impala, IMPALA), {0, 5}))
    assert torch.equal(one[-1][2], other[-1][2])


def test_actors_differ_and_another_life_differs_too() -> None:
    """No two actors, and no actor and its successor, see the same environments or draw the same actions."""
    state = impala.build(IMPALA, make("CartPole-v1", num_envs=1).spaces)
    weights = actors.get_weights(impala, state, 0)
    first, second = _fleet(impala, IMPALA, 2)._collectors
    reborn = _fleet(impala, IMPALA, 1, lives=1)._collectors[0]
    seen = [c.collect(0, weights).content.trajectory.obs[:, 0].tolist() for c in (first, second, reborn)]
    assert seen[0] != seen[1] != seen[2] != seen[0]


def test_after_a_resume_the_actors_draw_other_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They build States of their own: with the same seed they would explore as in the run's beginning."""
    drawn = []

    def inline(name: str, fields: dict[str, Any], envs: Any, *_: Any, **__: Any) -> actors.Inline:
        collector = actors.Collector(name, fields, envs, 0, 0)
        drawn.append(torch.rand(4, generator=collector._state.generator).tolist())
        return actors.Inline([collector])

    monkeypatch.setattr(ray_cluster, "Fleet", inline)
    config, out = dataclasses.replace(IMPALA, rollouts_per_update=1, steps=32), tmp_path / "run"
    run.train("impala", env="CartPole-v1", config=config, actors=1, out=out, evaluation_episodes=1, show=False)
    run.resume(out, 64, show=False)
    assert len(drawn) == 2 and drawn[0] != drawn[1]


def _tasks() -> multi_task.MultiTask:
    """CartPole, and CartPole with little time."""
    long, short = make("CartPole-v1", num_envs=2), make("CartPole-v1", num_envs=2, time_limit=5)
    short.name = "Short"
    return multi_task.MultiTask([long, short])


def test_several_tasks_report_their_returns() -> None:
    config = dataclasses.replace(IMPALA, steps=1600, rollouts_per_update=1)
    *_, (_, metrics, _) = _apart(impala, config, _fleet(impala, config, env=_tasks))
    assert metrics["return/Short"] == 5 < metrics["return/CartPole-v1"]
    assert 5 < metrics["return"] < metrics["return/CartPole-v1"]


def test_actors_share_the_envs_of_an_on_policy_algorithm() -> None:
    """Two actors with half of the environments each give PPO the batch that it was configured for."""
    resolved = resolve.resolve("ppo", env="CartPole-v1", given={**FIELDS, "minibatches": 2, "steps": 320}, actors=2)
    fields, envs = actors.plan(resolved, 2)
    assert fields["num_envs"] == 2 and envs().num_envs == 2
    fleet = actors.Inline([actors.Collector("ppo", fields, envs, i, 0) for i in range(2)])
    seen = _apart(ppo, PPO, fleet)
    assert [step for step, _, _ in seen] == list(range(32, 321, 32))
    assert all(metrics["lag"] == 0 for _, metrics, _ in seen)


def test_actors_of_a_memory_need_no_sequence_for_each_minibatch() -> None:
    """Minibatches of four whole sequences are the learner's; each of two actors has two environments."""
    fields = {"steps": 64, "minibatches": 4, "memory": "gru", "memory_size": 8}
    resolved = resolve.resolve("ppo", env="CartPole-v1", given={**FIELDS, **fields}, actors=2)
    own, envs = actors.plan(resolved, 2)
    fleet = actors.Inline([actors.Collector("ppo", own, envs, i, 0) for i in range(2)])
    seen = _apart(ppo, dataclasses.replace(PPO, **fields), fleet)
    assert [step for step, _, _ in seen] == [32, 64]


@pytest.mark.parametrize("module", [a2c, ppg, ppo, trpo], ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_learner_scales_the_rewards_of_all_actors(module: Any) -> None:
    config = module.Config(steps=32, num_envs=2, rollout_steps=8, hidden=(4,), normalize_reward=True)
    state = module.build(config, make("CartPole-v1", num_envs=1).spaces)
    state.reward_scaler.running.fill_(1e6)  # of episodes that a resume does not continue
    fleet = _fleet(module, dataclasses.replace(config, num_envs=1), 2)
    *_, (step, _, _) = learner.train(module, config, state, fleet)
    assert step == state.reward_scaler.moments.count == 32
    assert state.reward_scaler.moments.mean < 32


@pytest.mark.parametrize(
    ("name", "env", "count", "text"),
    [
        ("ppo", "CartPole-v1", 3, "num_envs is 8, not a multiple of 3"),
        ("ppo", "CartPole-v1", 0, "at least 1"),
        ("value_iteration", "GridWorld8x8", 2, "does not support actors; .*impala"),
        ("reinforce", "CartPole-v1", 1, "does not support actors; .*off_policy_ac"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_with_the_reason(name: str, env: str, count: int, text: str) -> None:
    resolved = resolve.resolve(name, env=env, actors=count, given={"num_envs": 8} if name == "ppo" else {})
    with pytest.raises(UserError, match=text):
        actors.plan(resolved, count)


def test_ray_needs_actors() -> None:
    with pytest.raises(UserError, match="--actors"):
        resolve.resolve("impala", env="CartPole-v1", ray="somewhere:6379")


def test_the_watch_counts_time_and_episodes_and_changes_nothing() -> None:
    plain, watched = choice(), profile.TimedEnv(choice(), episodes=True)
    assert torch.equal(plain.reset(0), watched.reset(0))
    action = torch.arange(8) % 4
    expected, came = plain.step(action), watched.step(action)
    assert torch.equal(came.reward, expected.reward)
    assert watched.seconds > 0 and watched._context is watched.env._context
    assert watched.pop_episodes() == [("Bandit", 1.0, 1)] * 8
    assert watched.pop_episodes() == []


def test_the_watch_sees_the_episodes_of_a_compiled_rollout() -> None:
    watched = profile.TimedEnv(make("CartPole-v1", num_envs=2), episodes=True)
    state, seen = impala.build(impala.Config(num_envs=2, rollout_steps=100), watched.spaces), Episodes()
    state.episodes = seen
    rollout, *_ = impala.rollout(state, watched, watched.reset(0))
    assert watched.seconds == 0  # nothing was stepped
    ended = watched.pop_episodes()
    assert ended == [("CartPole-v1", r, n) for r, n in zip(seen.returns, seen.lengths, strict=True)] and len(ended) > 2
    assert rollout.trajectory.logprob.shape == (2, 100)


def test_a_profile_adds_up() -> None:
    times = profile.Profile({"learning": 10.0})
    times.add("learning", 1.0)
    times.add("environment", 3.0)
    assert times.shares() == {"profile/learning": 0.25, "profile/environment": 0.75}
    assert times.shares() == {}
    assert times.document() == {"environment": 3.0, "learning": 11.0}


@pytest.mark.parametrize("name", ["impala", "ppo", "a2c", "dqn", "rainbow", "sac", "sac_discrete"])
def test_lag_and_lost_unrolls_are_on_the_screen(name: str, tmp_path: Path) -> None:
    task = "Pendulum-v1" if name == "sac" else "CartPole-v1"
    for count in (0, 1):
        resolved = resolve.resolve(name, env=task, actors=count)
        shown = Session(tmp_path, resolved, False, False, ()).progress.metrics
        assert shown[0] == "return" and len(set(shown)) == len(shown)
        assert ({"lag", "dropped_unrolls"} <= set(shown)) == bool(count)
    config = ppo.Config(**{**dataclasses.asdict(PPO), "steps": 32})
    (_, metrics, _), *_ = _apart(ppo, config, _fleet(ppo, config))
    assert {"lag", "dropped_unrolls"} <= metrics.keys()
