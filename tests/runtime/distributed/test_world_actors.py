"""Actors for agents with world models: lockstep, the replay, and what acting and learning wait for."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import pytest

from foresight.algorithms.world import dreamer, storm, tdmpc2
from foresight.envs.make import make
from foresight.runtime.distributed import actors
from tests.runtime.distributed.test_actors import alone, learned, same, steps
from tests.sabotage import sabotaged_by

SMALL: dict[str, Any] = {
    "steps": 96, "num_envs": 2, "rollout_steps": 4, "max_lag": 0, "learning_starts": 40, "batch_size": 4,
    "sequence_length": 4, "replay_size": 400, "horizon": 2, "groups": 4, "classes": 4, "units": 8, "layers": 1,
}  # fmt: skip
# A round, two environments times four steps, is one gradient step.
DREAMER = dreamer.Config(**SMALL, train_ratio=2.0, deter=16, hidden=8, blocks=2)
STORM = storm.Config(
    **SMALL,
    train_every=8,
    context=2,
    imagined_batch=8,
    width=8,
    sequence_layers=1,
    heads=2,
    learning_rate=0.03,
    agent_learning_rate=0.03,
)
TDMPC2 = tdmpc2.Config(
    steps=96, num_envs=2, rollout_steps=4, max_lag=0, learning_starts=40, train_every=8, batch_size=4, replay_size=400,
    horizon=2, candidates=8, proposals=2, elites=4, iterations=1, latent_size=8, hidden=8, encoder_hidden=8, bins=11,
)  # fmt: skip
CASES = [(dreamer, DREAMER, "CartPole-v1"), (storm, STORM, "CartPole-v1"), (tdmpc2, TDMPC2, "Pendulum-v1")]
NAMES = [module.__name__.rpartition(".")[2] for module, _, _ in CASES]


def _collectors(module: Any, config: Any, task: str, count: int = 1) -> list[actors.Collector]:
    share = dataclasses.replace(config, num_envs=config.num_envs // count)
    name, envs = module.__name__.rpartition(".")[2], lambda: make(task, num_envs=share.num_envs)
    return [actors.Collector(name, dataclasses.asdict(share), envs, i, 0) for i in range(count)]


@sabotaged_by("foresight.runtime.distributed.actors.load_weights", lambda f: lambda state, weights: None)
@pytest.mark.parametrize(("module", "config", "task"), CASES, ids=NAMES)
def test_without_staleness_it_is_the_run_of_one_process(
    module: Any, config: Any, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One actor in lockstep: the same rows, latents and gradient steps as `train`, bit for bit."""
    monkeypatch.setattr(module, "REPORT", 48)
    together = alone(module, config, task, make(task, num_envs=2))
    assert [step for step, *_ in together] == [48, 96]
    same(steps(module, config, actors.Inline(_collectors(module, config, task)), task), together)


class Eager:
    """A fleet whose actors finish every request at once, and what happened in which order."""

    restarts = 0

    def __init__(self, collectors: list[actors.Collector]) -> None:
        self.size, self.collectors = len(collectors), collectors
        self.answers: deque[actors.Message] = deque()
        self.events: list[tuple[str, Any]] = []

    def request(self, actor: int, order: int, weights: actors.Weights) -> None:
        self.events.append(("request", actor))
        self.answers.append(self.collectors[actor].collect(order, weights))

    def receive(self) -> actors.Message:
        answer = self.answers.popleft()
        self.events.append(("received", answer.actor))
        return answer

    def close(self) -> None:
        pass


def _waits(events: list[tuple[str, Any]], actor: int) -> tuple[list[int], list[int]]:
    """The gradient steps between two requests of an actor, and how many of its requests are open in each of them."""
    between, open_, waits, held = 0, 0, [], []
    for event, who in events:
        if event == "gradient step":
            between += 1
            held.append(open_)
        elif who == actor:
            open_ += 1 if event == "request" else -1
            if event == "request":
                waits.append(between)
                between = 0
    return waits, held


def _without_lag(original: Any) -> Any:
    """Requests only what is trained on next."""

    def in_order(self: Any) -> Any:
        self.limit = 0
        return original(self)

    return in_order


@sabotaged_by("foresight.runtime.distributed.learner._Learner.in_order", _without_lag)
@pytest.mark.parametrize(("module", "config", "task"), CASES, ids=NAMES)
def test_acting_waits_for_one_gradient_step_at_most(
    module: Any, config: Any, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actors that are infinitely fast. While the learner learns, each has its next request already."""
    config = dataclasses.replace(config, max_lag=1)
    fleet, update = Eager(_collectors(module, config, task, 2)), module.update

    def noted(*args: Any) -> Any:
        fleet.events.append(("gradient step", None))
        return update(*args)

    monkeypatch.setattr(module, "update", noted)
    *_, (_, metrics, state) = learned(module, config, fleet, task)
    assert state.gradient_steps > 4 and metrics["lag"] == 1
    first = [event for event, _ in fleet.events].index("gradient step")
    for actor in range(2):
        waits, held = _waits(fleet.events[first:], actor)
        assert set(waits[1:]) == {1} and len(waits) >= 4  # TD-MPC2's first round makes up for the random steps
        begun = sum(1 if event == "request" else -1 for event, who in fleet.events[:first] if who == actor)
        assert begun == 1 and all(one == 0 for one in held)  # relative to those of the beginning


def test_two_actors_store_their_own_environments() -> None:
    """A row's latent is that of acting there, and CartPole's next position follows from its velocity."""
    config = dataclasses.replace(DREAMER, max_lag=2, learning_starts=90)
    *_, (_, _, state) = learned(dreamer, config, Eager(_collectors(dreamer, config, "CartPole-v1", 2)))
    inside = 0
    for stream in state.replay.streams:
        rows, held = stream.storage, len(stream)
        obs, same = rows.obs[0, :held], rows.cut[0, : held - 1] == 0
        assert (obs[:-1, 0] + 0.02 * obs[:-1, 1] - obs[1:, 0])[same].abs().max() < 1e-5
        assert (rows.extras["deter"][0, :held].abs().sum(-1) > 0)[rows.mask[0, :held] > 0].float().mean() > 0.8
        inside += int(same.sum())
    assert inside > 60
