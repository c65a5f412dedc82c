"""The learner over actors: requests messages from a fleet, concatenates them, and trains on them."""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from foresight.data import trees
from foresight.ops import schedules
from foresight.runtime.catalog import Algorithm, State, Steps
from foresight.runtime.distributed import actors
from foresight.runtime.distributed.actors import Fleet, LostMessage, Message, Weights
from foresight.runtime.monitoring import profile
from foresight.training.options import flatten

PENDING = 2  # requests per actor in flight, so that it need not wait for the learner
SHOWN = ("lag", "dropped_unrolls")  # shown live, after the algorithm's own METRICS
RECENT = 100  # finished episodes whose mean return is reported


def train(module: Algorithm, config: Any, state: State, fleet: Fleet, times: profile.Profile | None = None) -> Steps:
    """An algorithm's `train` on data from `fleet`; the State is consistent at every yield.

    Adds the metrics `lag` (updates between the policy that acted and the one that is trained, a mean over messages),
    `return/TASK` if there are several tasks, `dropped_unrolls` (of dead actors), `stale_unrolls` (older than `max_lag`)
    and `actor_restarts`.
    """
    learner, report = _Learner(module, config, state, fleet, times or profile.Profile()), getattr(module, "REPORT", 1)
    metrics: dict[str, float] = {}
    try:
        while state.step < config.steps:
            before = state.step
            metrics = {**metrics, **learner.step()}  # a step may make no update
            if schedules.passed(before, state.step, report) or state.step >= config.steps:
                yield state.step, metrics, state
    finally:
        fleet.close()


class _Learner:
    def __init__(self, module: Algorithm, config: Any, state: State, fleet: Fleet, times: profile.Profile) -> None:
        self.module, self.config, self.state, self.fleet, self.times = module, config, state, fleet, times
        values = flatten(config)
        self.limit: int | None = values.get("max_lag", 0)
        self.need: int = values.get("rollouts_per_update", fleet.size)
        self.shared = "rollouts_per_update" not in values
        self.learn = getattr(module, "learn", None)
        self.restart = getattr(module, "restart", None)
        self.annealed = self.learn is None and "progress" in inspect.signature(module.update).parameters
        self.version = self.order = self.dropped = self.stale = 0
        self.pending: dict[int, int] = {}  # the actor of every request in flight
        self.queues: list[deque[int]] = [deque() for _ in range(fleet.size)]  # the requests in flight of each actor
        self.received: dict[int, Message] = {}  # answers that wait for those of other actors
        self.weights: Weights | None = None
        self.episodes: dict[str, deque[tuple[float, int]]] = {}
        self.counts: Counter[str] = Counter()

    def step(self) -> dict[str, float]:
        """Receive messages and make one update; returns its metrics."""
        state, progress = self.state, self.state.step / self.config.steps
        messages = self.in_order() if self.shared else self.lockstep() if self.limit == 0 else self.gather()
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

    def in_order(self) -> list[Message]:
        """The next message of each actor, in the order of the actors. `max_lag` more of each are requested ahead."""
        ahead = self.limit or 0
        for _ in range(1 + ahead):
            for actor, requests in enumerate(self.queues):
                if len(requests) <= ahead:
                    self.queue(actor)
        while not all(requests[0] in self.received for requests in self.queues):
            answer = self.receive()
            if isinstance(answer, LostMessage):
                self.queues[answer.actor].remove(answer.order)
                self.queue(answer.actor)
            else:
                self.received[answer.order] = answer
        return [self.received.pop(requests.popleft()) for requests in self.queues]

    def queue(self, actor: int) -> None:
        self.queues[actor].append(self.order)
        self.request(actor)

    def lockstep(self) -> list[Message]:
        """One request to each actor in turn until there are enough; answers in the order of the requests."""
        for i in range(self.need):
            self.request(i % self.fleet.size)
        received: dict[int, Message] = {}
        while self.pending:
            answer = self.receive()
            if isinstance(answer, LostMessage):
                self.request(answer.actor)
            else:
                received[answer.order] = answer
        return [received[order] for order in sorted(received)]

    def gather(self) -> list[Message]:
        """The first messages to arrive, of any actor. Every actor is kept busy."""
        messages: list[Message] = []
        while True:
            in_flight = Counter(self.pending.values())
            for actor in range(self.fleet.size):
                for _ in range(PENDING - in_flight[actor]):
                    self.request(actor)
            if len(messages) == self.need:
                return messages
            answer = self.receive()
            if isinstance(answer, LostMessage):
                continue
            if self.limit is not None and self.version - answer.version > self.limit:
                self.stale += 1
            else:
                messages.append(answer)
            if len(messages) == self.need:
                return messages  # its actor gets a request after the update, with newer weights

    def request(self, actor: int) -> None:
        if self.weights is None:
            self.weights = actors.get_weights(self.module, self.state, self.version)
        self.fleet.request(actor, self.order, self.weights)
        self.pending[self.order] = actor
        self.order += 1

    def receive(self) -> Message | LostMessage:
        began = perf_counter()
        answer = self.fleet.receive()
        self.times.add("waiting", perf_counter() - began)
        self.pending.pop(answer.order)
        if isinstance(answer, LostMessage):
            self.dropped += 1
            return answer
        for section, seconds in answer.seconds.items():
            self.times.add(section, seconds)
        for task, total, length in answer.episodes:
            self.episodes.setdefault(task, deque(maxlen=RECENT)).append((total, length))
            if hasattr(self.state, "episodes"):
                self.state.episodes.note({"episode_return": [total], "episode_length": [length]})
        return answer

    def returns(self) -> dict[str, float]:
        """Means over recent episodes: of all tasks, and of each if there are several."""
        ended = [episode for recent in self.episodes.values() for episode in recent]
        if not ended:
            return {}
        metrics = {"return": _mean([r for r, _ in ended]), "length": _mean([n for _, n in ended])}
        if len(self.episodes) > 1:
            metrics |= {
                f"return/{task}": _mean([r for r, _ in recent]) for task, recent in sorted(self.episodes.items())
            }
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
