"""The learner over actors: requests messages from a fleet, joins them, updates, and counts how stale they were."""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from foresight.data import trees
from foresight.ops import schedules
from foresight.runtime.distributed import actors
from foresight.runtime.distributed.actors import Fleet, Lost, Message, Weights
from foresight.runtime.monitoring import profile
from foresight.training.options import flatten

AHEAD = 2  # messages that an actor may owe, so that it need not wait for the learner's answer
SHOWN = ("lag", "dropped_unrolls")  # shown live, after the algorithm's own METRICS
KEPT = 100  # finished episodes over which a return is a mean


def train(
    module: Any, config: Any, state: Any, fleet: Fleet, times: profile.Profile | None = None
) -> Iterator[tuple[int, dict[str, float], Any]]:
    """An algorithm's `train` whose data come from `fleet`; the State is consistent at every yield.

    Adds to the metrics `lag` (updates between the policy that acted and the one that learns, a mean over messages),
    `return/TASK` where there are several tasks, `dropped_unrolls` (of dead actors), `stale_unrolls` (older than
    `max_lag`) and `actor_restarts`.
    """
    learner, report = _Learner(module, config, state, fleet, times or profile.Profile()), getattr(module, "REPORT", 1)
    metrics: dict[str, float] = {}
    try:
        while state.step < config.steps:
            before = state.step
            metrics = {**metrics, **learner.turn()}  # a turn may be without an update
            if schedules.passed(before, state.step, report) or state.step >= config.steps:
                yield state.step, metrics, state
    finally:
        fleet.close()


class _Learner:
    def __init__(self, module: Any, config: Any, state: Any, fleet: Fleet, times: profile.Profile) -> None:
        self.module, self.config, self.state, self.fleet, self.times = module, config, state, fleet, times
        values = flatten(config)
        self.limit: int | None = values.get("max_lag", 0)
        self.need: int = values.get("rollouts_per_update", fleet.size)
        self.shared = "rollouts_per_update" not in values
        self.learn = getattr(module, "learn", None)
        self.restart = getattr(module, "restart", None)
        self.annealed = self.learn is None and "progress" in inspect.signature(module.update).parameters
        self.version = self.order = self.dropped = self.stale = 0
        self.owed: dict[int, int] = {}  # the actor of every request that is under way
        self.lines: list[deque[int]] = [deque() for _ in range(fleet.size)]  # orders that each actor is to answer
        self.came: dict[int, Message] = {}  # answers that wait for those of other actors
        self.weights: Weights | None = None
        self.episodes: dict[str, deque[tuple[float, int]]] = {}
        self.counts: Counter[str] = Counter()

    def turn(self) -> dict[str, float]:
        """Receive messages, make one update; returns its metrics."""
        state, progress = self.state, self.state.step / self.config.steps
        messages = self.abreast() if self.shared else self.lockstep() if self.limit == 0 else self.gather()
        lag = sum(self.version - message.version for message in messages) / len(messages)
        device = next(iter(getattr(state, actors.acting(self.module, state)[0]).parameters())).device
        batch = trees.merge(lambda leaves: _join(leaves, device), [message.content for message in messages])
        if self.restart is not None and any(message.fresh for message in messages):
            self.restart(state)
        state.step += sum(message.steps for message in messages)
        if self.learn is not None:
            metrics = self.learn(state, batch)
        else:
            metrics = self.module.update(state, batch, progress) if self.annealed else self.module.update(state, batch)
        self.version += 1
        self.weights = None
        return {**metrics, **self.returns(), "lag": lag, **self.faults()}

    def abreast(self) -> list[Message]:
        """The next message of each actor, in their order; each is asked for `max_lag` more in advance."""
        ahead = self.limit or 0
        for _ in range(1 + ahead):
            for actor, line in enumerate(self.lines):
                if len(line) <= ahead:
                    self.queue(actor)
        while not all(line[0] in self.came for line in self.lines):
            answer = self.receive()
            if isinstance(answer, Lost):
                self.lines[answer.actor].remove(answer.order)
                self.queue(answer.actor)
            else:
                self.came[answer.order] = answer
        return [self.came.pop(line.popleft()) for line in self.lines]

    def queue(self, actor: int) -> None:
        self.lines[actor].append(self.order)
        self.request(actor)

    def lockstep(self) -> list[Message]:
        """One request to each actor in turn until there are enough; the answers in the order of the requests."""
        for i in range(self.need):
            self.request(i % self.fleet.size)
        came: dict[int, Message] = {}
        while self.owed:
            answer = self.receive()
            if isinstance(answer, Lost):
                self.request(answer.actor)
            else:
                came[answer.order] = answer
        return [came[order] for order in sorted(came)]

    def gather(self) -> list[Message]:
        """Whatever comes first; every actor is kept busy."""
        messages: list[Message] = []
        while True:
            owing = Counter(self.owed.values())
            for actor in range(self.fleet.size):
                for _ in range(AHEAD - owing[actor]):
                    self.request(actor)
            if len(messages) == self.need:
                return messages
            answer = self.receive()
            if isinstance(answer, Lost):
                continue
            if self.limit is not None and self.version - answer.version > self.limit:
                self.stale += 1
            else:
                messages.append(answer)
            if len(messages) == self.need:
                return messages  # its actor is asked again after the update, with newer weights

    def request(self, actor: int) -> None:
        if self.weights is None:
            self.weights = actors.take(self.module, self.state, self.version)
        self.fleet.request(actor, self.order, self.weights)
        self.owed[self.order] = actor
        self.order += 1

    def receive(self) -> Message | Lost:
        began = perf_counter()
        answer = self.fleet.receive()
        self.times.add("waiting", perf_counter() - began)
        self.owed.pop(answer.order)
        if isinstance(answer, Lost):
            self.dropped += 1
            return answer
        for section, seconds in answer.seconds.items():
            self.times.add(section, seconds)
        for task, total, length in answer.episodes:
            self.episodes.setdefault(task, deque(maxlen=KEPT)).append((total, length))
            if hasattr(self.state, "episodes"):
                self.state.episodes.note({"episode_return": [total], "episode_length": [length]})
        return answer

    def returns(self) -> dict[str, float]:
        """Means over the last episodes: of all tasks together, and of each where there are several."""
        ended = [episode for kept in self.episodes.values() for episode in kept]
        if not ended:
            return {}
        metrics = {"return": _mean([r for r, _ in ended]), "length": _mean([n for _, n in ended])}
        if len(self.episodes) > 1:
            metrics |= {f"return/{task}": _mean([r for r, _ in kept]) for task, kept in sorted(self.episodes.items())}
        return metrics

    def faults(self) -> dict[str, float]:
        return {
            "dropped_unrolls": float(self.dropped),
            "stale_unrolls": float(self.stale),
            "actor_restarts": float(self.fleet.restarts),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _join(leaves: Sequence[Any], device: torch.device) -> Any:
    if not isinstance(leaves[0], np.ndarray):
        return leaves[0]
    if len(leaves) > 1:
        return torch.from_numpy(np.concatenate(leaves)).to(device)
    return actors.to_tensor(leaves[0]).to(device)
