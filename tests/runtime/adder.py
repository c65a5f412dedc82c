"""ADDER: least squares on two addends by Adam, the smallest real algorithm. Minimize E[(w·(a, b) + c − (a + b))²].

Used by the tests of the runtime: every kind of generator, a module, an optimizer and a schedule are in its State.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

KIND = "text"
UNIT = "updates"
METRICS = ("reward", "loss")


@dataclass(frozen=True)
class Config:
    """Numbers of the adder."""

    steps: int = 40  # updates
    seed: int = 0
    learning_rate: float = 0.05  # of Adam
    batch: int = 8  # examples an update
    decay: float | None = None  # a step's factor on the learning rate
    layers: tuple[int, ...] = ()  # hidden layers
    bias: bool = True  # whether there is a constant
    poison: int = -1  # the step whose loss is NaN
    rot: int = -1  # the step at which a weight becomes NaN
    pause: float = 0.0  # seconds that an update sleeps
    log_samples: bool = False


@dataclass
class State:
    """Everything that changes."""

    config: Config
    network: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    generator: torch.Generator
    numpy: np.random.Generator
    python: random.Random
    recent: list[float] = field(default_factory=list)
    step: int = 0


def build(config: Config, spaces: Any, device: str = "cpu") -> State:
    sizes = (2, *config.layers, 1)
    layers = [nn.Linear(a, b, bias=config.bias) for a, b in itertools.pairwise(sizes)]
    network = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, config.decay or 1.0)
    generator = torch.Generator().manual_seed(config.seed)
    return State(
        config, network, optimizer, schedule, generator, np.random.default_rng(config.seed), random.Random(config.seed)
    )


def numbers(examples: Any) -> torch.Tensor:
    texts = [example if isinstance(example, str) else example.question for example in examples]
    return torch.tensor([[float(word) for word in re.findall(r"\d+", text)] for text in texts]) / 10


def act(state: State, obs: Any, carry: None = None, explore: bool = False) -> tuple[list[str], dict[str, Any], None]:
    if not explore:
        torch.rand(3, generator=state.generator)  # careless: an evaluation must not change what training draws
        torch.rand(3)
    return [str(round(value)) for value in (state.network(numbers(obs))[:, 0] * 10).tolist()], {}, None


def train(config: Config, env: Any, state: State | None = None, device: str = "cpu") -> Iterator[Any]:
    state = build(config, env.spaces, device) if state is None else state
    while state.step < config.steps:
        chosen = torch.randint(len(env.train), (config.batch,), generator=state.generator).tolist()
        chosen[0] = int(state.numpy.integers(len(env.train)))
        chosen[1] = state.python.randrange(len(env.train))
        chosen[2] = int(torch.randint(len(env.train), ()))  # the global generator, as careless code uses it
        examples = [env.train[i] for i in chosen]
        wanted = torch.tensor([float(example.answer) for example in examples]) / 10
        error = ((state.network(numbers(examples))[:, 0] - wanted) ** 2).mean()
        state.optimizer.zero_grad()
        error.backward()
        state.optimizer.step()
        state.schedule.step()
        state.step += 1
        state.recent = [*state.recent, error.item()][-5:]
        time.sleep(config.pause)
        if state.step == config.rot:
            with torch.no_grad():
                next(state.network.parameters())[0] = math.inf
        metrics: dict[str, Any] = {"loss": math.nan if state.step == config.poison else error.item()}
        if config.log_samples:
            metrics["samples"] = [{"prompt": examples[0].question, "completion": "?", "reward": 0.0}]
        yield state.step, metrics, state
