"""How good an algorithm's State is, on environments and seeds that it was not trained on."""

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
from foresight.runtime import kinds
from foresight.runtime.checkpoints.tree import Generator, generators
from foresight.runtime.kinds.kind import Kind

if TYPE_CHECKING:
    from foresight.envs.base import Env
    from foresight.envs.games.game import Game
    from foresight.envs.tabular.mdp import MDP
    from foresight.envs.text.task import TextTask
    from foresight.runtime.catalog import Algorithm, State

    Environment = Env | MDP | TextTask | Game

EVALUATION_SEED = 10_000_019  # evaluation seeds start here, far from the seeds of training
FALLS = ("error", "per character", "per token")  # what the metrics end with of which less is better


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`n` results of one kind: their mean and standard deviation (of the results, not of the mean)."""

    metric: str
    mean: float
    std: float
    n: int
    values: tuple[float, ...] = dataclasses.field(default=(), repr=False)
    also: dict[str, float] = dataclasses.field(default_factory=dict)  # other figures of the same policy

    @classmethod
    def of(cls, metric: str, values: list[float]) -> Evaluation:
        """The evaluation of a list of results. Raises UserError if there are none."""
        if not values:
            raise UserError("There was nothing to evaluate on: no episode or example gave a result.")
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
        return cls(metric, mean, std, len(values), tuple(values))

    @property
    def worth(self) -> float:
        """The mean as a score of which more is better: of an error, its negative; of nothing, minus infinity."""
        if not self.n:
            return -math.inf
        return -self.mean if falls(self.metric) else self.mean

    def document(self) -> dict[str, Any]:
        """`{"metric", "mean", "std", "n"}` for JSON, and `"also"` where there are other figures; of nothing None."""
        mean, std = (self.mean, self.std) if self.n else (None, None)
        document = {"metric": self.metric, "mean": mean, "std": std, "n": self.n}
        return {**document, "also": self.also} if self.also else document

    @classmethod
    def read(cls, document: dict[str, Any]) -> Evaluation:
        """What `document` wrote."""
        unknown = {} if document["n"] else {"mean": math.nan, "std": math.nan}
        return cls(**{**document, **unknown})

    def __str__(self) -> str:
        if not self.n:
            return f"{self.metric} unknown: the grader could score none of the answers"
        spread = f" ± {self.std:.4g} ({self.n} of them)" if self.n > 1 else ""
        return f"{self.metric} {self.mean:.4g}{spread}"


def falls(metric: str) -> bool:
    """Whether less of a metric is better, as of errors and of bits a character."""
    return metric.endswith(FALLS)


def evaluate(
    module: Algorithm, state: State, env: Environment, episodes: int | None = None, seed: int = 0
) -> Evaluation:
    """Run the State greedily (`explore=False`) in `env`; the State and all random generators stay as they were.

    - control: the return of exactly `episodes` episodes, from seeds that training does not use;
    - tabular: the exact expected discounted return of its policy from the start distribution (`also`: the
      undiscounted one within the time limit, where there is a limit);
    - text: the mean reward of greedy completions of the first `episodes` held-out examples (all if None); where the
      task grades nothing (its rows are demonstrations or preferences), what `module.assess(state, examples)` returns;
    - game: the points a game (1, ½, 0) against the game's `opponent`, half of the games with the first move.

    An algorithm with another criterion has a `measure(state, env)` that returns its name, the figure and,
    if there are others, a dict of these.

    `env` must not be the training env: its running episodes are lost.
    """
    with undisturbed(state):
        return _kind(module, env).evaluate(module, state, env, episodes, seed)


def baseline(
    module: Algorithm, state: State, env: Environment, episodes: int | None = None, seed: int = 0
) -> Evaluation:
    """What training must beat: uniformly random actions, or the State as it was built (text, predictions)."""
    return _kind(module, env).baseline(module, state, env, episodes, seed)


def measured(module: Algorithm, state: State, env: Environment) -> Evaluation:
    """What an algorithm's own `measure(state, env)` returns."""
    metric, value, *also = module.measure(state, env)
    return Evaluation(metric, value, 0.0, 1, (value,), *also)


def _kind(module: Algorithm, env: Environment) -> Kind[Any]:
    """The algorithm's kind of environment; for a game, also where an algorithm of another kind plays it."""
    return kinds.get("game" if hasattr(env, "first_score") else module.KIND)


def remember(state: State) -> Callable[[], None]:
    """What puts every random generator of `state` back to where it is now."""
    before = [(generator, _peek(generator)) for generator in generators(state)]

    def back() -> None:
        for generator, bits in before:
            _put(generator, bits)

    return back


@contextmanager
def undisturbed(state: State) -> Iterator[None]:
    """Put every random generator of `state`, and the global ones, back to where they were."""
    back = remember(state)
    everywhere = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        with torch.no_grad():
            yield
    finally:
        back()
        torch.set_rng_state(everywhere[0])
        random.setstate(everywhere[1])
        np.random.set_state(everywhere[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _peek(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.getstate()


def _put(generator: Generator, bits: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(bits)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = bits
    else:
        generator.setstate(bits)
