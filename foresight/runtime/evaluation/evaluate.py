"""Evaluation of a State, on environments and seeds that it was not trained on."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foresight.errors import UserError
from foresight.runtime import kinds, legacy
from foresight.runtime.checkpoints.tree import Generator, generators
from foresight.runtime.kinds.kind import Kind

if TYPE_CHECKING:
    from foresight.envs.base import Env
    from foresight.envs.games.game import Game
    from foresight.envs.tabular.mdp import MDP
    from foresight.envs.text.task import TextTask
    from foresight.runtime.catalog import Algorithm, State

    Environment = Env | MDP | TextTask | Game

EVALUATION_SEED = 10_000_019  # the first seed of evaluation, far from the seeds of training
RESERVED = 1_000_000  # seeds from that one on, which training never uses: enough for evaluations of all runs' seeds
LOWER_IS_BETTER = ("error", "per character", "per token")  # the ends of such metrics' names


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`n` results of one kind: their mean and standard deviation (of the results, not of the mean)."""

    metric: str
    mean: float
    std: float
    n: int
    values: tuple[float, ...] = dataclasses.field(default=(), repr=False)
    extra_metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # other metrics of the same policy
    samples: tuple[dict[str, Any], ...] = dataclasses.field(default=(), repr=False, compare=False)  # to be logged

    @classmethod
    def of(cls, metric: str, values: list[float]) -> Evaluation:
        """The evaluation of a list of results. Raises UserError if there are none."""
        if not values:
            raise UserError("No episode or example gave a result, so there is no evaluation.")
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
        return cls(metric, mean, std, len(values), tuple(values))

    @property
    def score(self) -> float:
        """The mean as a score where more is better: the negative of an error; minus infinity without results."""
        if not self.n:
            return -math.inf
        return -self.mean if lower_is_better(self.metric) else self.mean

    def document(self) -> dict[str, Any]:
        """`{"metric", "mean", "std", "n"}` for JSON, and `"extra_metrics"` if there are any; NaN is None."""
        mean, std = (self.mean, self.std) if self.n else (None, None)
        document = {"metric": self.metric, "mean": mean, "std": std, "n": self.n}
        return {**document, "extra_metrics": self.extra_metrics} if self.extra_metrics else document

    @classmethod
    def read(cls, document: dict[str, Any]) -> Evaluation:
        """The evaluation from its `document`."""
        unknown = {} if document["n"] else {"mean": math.nan, "std": math.nan}
        return cls(**{**legacy.evaluation(document), **unknown})

    def __str__(self) -> str:
        if not self.n:
            return f"{self.metric} unknown: the grader could score none of the answers"
        spread = f" ± {self.std:.4g} (standard deviation, n = {self.n})" if self.n > 1 else ""
        return f"{self.metric} {self.mean:.4g}{spread}"


def lower_is_better(metric: str) -> bool:
    """Whether a lower metric is better, as for errors and bits per character."""
    return metric.endswith(LOWER_IS_BETTER)


def training_seed(seed: int, count: int) -> int:
    """The seed to reset `count` environments with in training: `seed`, or one far above where evaluation has it.

    Environment i is reset with `seed` + i. The steps of a resumed run are added to its seed, and so is a million for
    each process of `torchrun`: ten millions of either come to the seeds of evaluation.
    """
    free = seed + count <= EVALUATION_SEED or seed >= EVALUATION_SEED + RESERVED
    return seed if free else seed + 1_000_000_000


def evaluate(
    module: Algorithm, state: State, env: Environment, episodes: int | None = None, seed: int = 0
) -> Evaluation:
    """Evaluate the greedy policy (`explore=False`) in `env`. The State and all random generators are left unchanged.

    - control: the return of exactly `episodes` episodes, from seeds that training does not use;
    - tabular: the exact expected discounted return of the policy from the start distribution (`also`: the
      undiscounted one within the time limit, if there is one);
    - text: the mean reward of greedy completions of the first `episodes` held-out examples (all if None); if the
      task has no grader (its rows are demonstrations or preferences), `module.assess(state, examples)`;
    - game: points per game (1, ½, 0) against the game's `opponent`, half of the games with the first move.

    An algorithm with another criterion has a `measure(state, env)` that returns the metric's name, its value and,
    optionally, a dict of other metrics.

    `env` must not be the training env: its running episodes are lost.
    """
    with preserve_generators(state):
        return _kind(module, env).evaluate(module, state, env, episodes, seed)


def baseline(
    module: Algorithm, state: State, env: Environment, episodes: int | None = None, seed: int = 0
) -> Evaluation:
    """The evaluation that training must beat: of uniformly random actions, or of the untrained State (text, values)."""
    return _kind(module, env).baseline(module, state, env, episodes, seed)


def from_measure(module: Algorithm, state: State, env: Environment) -> Evaluation:
    """The evaluation by an algorithm's own `measure(state, env)`."""
    metric, value, *extra = module.measure(state, env)
    return Evaluation(metric, value, 0.0, 1, (value,), *extra)


def _kind(module: Algorithm, env: Environment) -> Kind[Any]:
    """The algorithm's kind of environment, or "game" if `env` is a game, whatever the algorithm's kind."""
    return kinds.get("game" if hasattr(env, "first_score") else module.KIND)


def snapshot_generators(state: State) -> Callable[[], None]:
    """A function that resets every random generator of `state` to its present state."""
    before = [(generator, _get_state(generator)) for generator in generators(state)]
    stream: Any = getattr(state, "random", None)
    kept = stream.copy() if isinstance(stream, np.ndarray) else None  # `playouts.stream`, changed in place

    def rewind() -> None:
        for generator, bits in before:
            _set_state(generator, bits)
        if kept is not None:
            stream[:] = kept

    return rewind


@contextmanager
def preserve_generators(state: State) -> Iterator[None]:
    """On exit, reset every random generator of `state` and the global ones to their earlier states."""
    rewind = snapshot_generators(state)
    shared = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        with torch.no_grad():
            yield
    finally:
        rewind()
        torch.set_rng_state(shared[0])
        random.setstate(shared[1])
        np.random.set_state(shared[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _get_state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.getstate()


def _set_state(generator: Generator, bits: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(bits)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = bits
    else:
        generator.setstate(bits)
