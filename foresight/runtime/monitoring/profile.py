"""Where the time of a run goes: environment, inference (all else that acting costs), learning, waiting.

Tabular runs have two: learning, and walking (acting, the environment and, in a compiled loop, learning too).
Language has sampling, grading and learning, and other, which is all between them: reading data, preparing batches.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor

from foresight.data.trajectory import Tree
from foresight.envs.base import Env, Feedback

Item = TypeVar("Item")

SECTIONS = (
    "environment", "inference", "learning", "waiting", "actors_waiting", "walking", "sampling", "grading", "other"
)  # fmt: skip
LANGUAGE = ("sampling", "grading", "learning")  # which every language run shows, one that takes no time among them
PACE = ("completions_per_second", "tokens_per_second")


class Watch:
    """An `Env` that measures the seconds in its `step` (at a cost of a quarter of a microsecond) and nothing else.

    With `episodes` it also keeps `(task, return, length)` of every episode that ends, until they are `taken`.
    """

    def __init__(self, env: Env, episodes: bool = False) -> None:
        self.env, self.name, self.num_envs, self.spaces = env, env.name, env.num_envs, env.spaces
        self.seconds = 0.0
        self._step, self._episodes = env.step, episodes
        self._ended: list[tuple[str, float, int]] = []

    def reset(self, seed: int) -> Tree:
        """Reset all envs; equal seeds give equal episodes. Returns obs `[B, ...]`."""
        return self.env.reset(seed)

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B, ...]` in every env."""
        began = perf_counter()
        feedback = self._step(action)
        self.seconds += perf_counter() - began
        if self._episodes and "episode_return" in feedback.info:
            self._keep(feedback.info)
        return feedback

    def render(self) -> Any:
        """One RGB frame of env 0, `[height, width, 3]` uint8, or None if it cannot be rendered."""
        return self.env.render()

    def close(self) -> None:
        """Free what the engine holds."""
        self.env.close()

    def taken(self) -> list[tuple[str, float, int]]:
        """The episodes that ended since this was last asked."""
        ended, self._ended = self._ended, []
        return ended

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.env, name)

    def _keep(self, info: dict[str, Any]) -> None:
        returns, lengths = info["episode_return"], info["episode_length"]
        tasks = info.get("episode_task") or [self.name] * len(returns)
        self._ended += zip(tasks, map(float, returns), map(int, lengths), strict=True)


class Profile:
    """Seconds by section, as they add up; `shares` are those of the time since the last look, and so is `pace`."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float, seconds or {})
        self._before = dict(self.seconds)
        self._written: dict[str, tuple[int, int]] = {}  # completions and tokens: sampled, learned

    def add(self, section: str, seconds: float) -> None:
        """Count `seconds` to `section`."""
        self.seconds[section] += seconds

    def count(self, section: str, completions: int, tokens: int) -> None:
        """Count completions, and the tokens in them, that were sampled or learned."""
        before = self._written.get(section, (0, 0))
        self._written[section] = before[0] + completions, before[1] + tokens

    def total(self) -> float:
        """The seconds of all sections."""
        return sum(self.seconds.values())

    def shares(self) -> dict[str, float]:
        """`profile/SECTION`: the share of each section that took any time since the last call."""
        return self._shares(self._spent())

    def pace(self) -> dict[str, float]:
        """`shares` and `PACE`: what was sampled in a second, or learned where nothing was sampled, since the last call.

        The seconds are those of all sections: a step of learning, in which nothing is sampled, counts.
        """
        spent, written = self._spent(), self._written
        whole, self._written = sum(spent.values()), {}
        counts = written.get("sampling") or written.get("learning") or ()
        rates = {name: count / whole for name, count in zip(PACE, counts, strict=False)} if whole > 0 else {}
        return {**self._shares(spent), **rates}

    def _spent(self) -> dict[str, float]:
        spent = {name: total - self._before.get(name, 0.0) for name, total in self.seconds.items()}
        self._before = dict(self.seconds)
        return spent

    @staticmethod
    def _shares(spent: dict[str, float]) -> dict[str, float]:
        whole = sum(spent.values())
        return {f"profile/{name}": seconds / whole for name, seconds in spent.items()} if whole > 0 else {}

    def document(self) -> dict[str, float]:
        """Seconds by section for JSON. Sections of actors are sums over them, so they may exceed the run's seconds."""
        return {name: round(self.seconds[name], 3) for name in SECTIONS if name in self.seconds}


@contextmanager
def timed(
    module: object, name: str, section: str, profile: Profile, counted: Callable[..., tuple[int, int]] | None = None
) -> Iterator[None]:
    """Count the seconds in the function `name` of a module or class to a section, wherever it is called from.

    `counted(result, *arguments)` says how many completions, and tokens in them, a call was about.
    """
    plain = getattr(module, name, None)
    if plain is None:  # tabular TD has a compiled loop instead, an algorithm of the user need not have it
        yield
        return

    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            result = plain(*args, **kwargs)
        finally:
            profile.add(section, perf_counter() - began)
        if counted is not None:
            profile.count(section, *counted(result, *args))
        return result

    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, plain)


def learning(module: object, profile: Profile) -> AbstractContextManager[None]:
    """Count the seconds in the `update` of an algorithm's module."""
    return timed(module, "update", "learning", profile)


@contextmanager
def language(module: object, profile: Profile) -> Iterator[None]:
    """Count the seconds that a language algorithm samples, grades and learns, and what it samples and learns.

    The algorithm's own `score`, if it has one, counts as grading.
    """
    from foresight.envs.text.task import TextTask  # late: only language models sample
    from foresight.planning.generation import rollout

    for section in LANGUAGE:
        profile.add(section, 0.0)
    with ExitStack() as stack:
        stack.enter_context(timed(module, "update", "learning", profile, _learned))
        stack.enter_context(timed(rollout, "complete", "sampling", profile, lambda batch, *_: _size(batch.length)))
        stack.enter_context(timed(TextTask, "reward", "grading", profile))
        stack.enter_context(timed(module, "score", "grading", profile))
        yield


def _learned(_: object, state: object, batch: object, lengths: object = None, *__: object) -> tuple[int, int]:
    """The size of what an `update` was given: a TokenBatch or, as `pretrain` is, texts and their lengths."""
    known = getattr(batch, "length", lengths)
    return _size(known) if isinstance(known, Tensor) else (0, 0)


def _size(lengths: Tensor) -> tuple[int, int]:
    return lengths.numel(), int(lengths.sum())


def steps(
    steps: Iterator[Item],
    times: Profile,
    spend: Callable[[float], None],
    watched: Watch | None = None,
    rest: str | None = None,
) -> Iterator[Item]:
    """The same steps; `spend` receives the seconds of each. Those of no other section are added to section `rest`."""
    while True:
        known = times.total()
        before, outside = perf_counter(), watched.seconds if watched else 0.0
        item = next(steps, None)
        spent = perf_counter() - before
        spend(spent)
        if watched:
            times.add("environment", watched.seconds - outside)
        if rest is not None:
            times.add(rest, max(spent - (times.total() - known), 0.0))
        if item is None:
            return
        yield item
