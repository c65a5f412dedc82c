"""Where the time of a run goes: environment, inference (the rest of acting), learning, waiting.

What an environment does inside a compiled loop that acts too is inference.
Tabular runs have two sections: learning, and loop (acting, the environment and, in a compiled loop, also learning).
Text runs have sampling, grading, learning, and other, which is the rest: reading data, preparing batches. The sampling
of conversations includes what their environments take to answer.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor

from foresight.data.text import TokenBatch
from foresight.data.trajectory import Tree
from foresight.envs.base import Env, Feedback, Unrolled
from foresight.runtime import legacy
from foresight.runtime.evaluation import evaluate

Item = TypeVar("Item")

SECTIONS = (
    "environment", "inference", "learning", "waiting", "actors_waiting", "loop", "sampling", "grading", "other"
)  # fmt: skip
LANGUAGE = ("sampling", "grading", "learning")  # shown for every text run, also if one takes no time
RATES = ("completions_per_second", "tokens_per_second")


class TimedEnv:
    """An `Env` that measures the seconds in its `step`, at a cost of a quarter of a microsecond.

    Every run trains in one, so it also keeps the seeds of evaluation out of training (`evaluate.training_seed`).
    With `episodes` it also stores `(task, return, length)` of every finished episode until `pop_episodes`.
    """

    def __init__(self, env: Env, episodes: bool = False) -> None:
        self.env, self.name, self.num_envs, self.spaces = env, env.name, env.num_envs, env.spaces
        self.seconds = 0.0
        self._step, self._episodes = env.step, episodes
        self._ended: list[tuple[str, float, int]] = []
        if inspect.getattr_static(env, "unroll", None) is not None:
            self.unroll = self._unroll

    def reset(self, seed: int) -> Tree:
        """Reset all envs; equal seeds give equal episodes. Returns obs `[B, ...]`."""
        return self.env.reset(evaluate.training_seed(seed, self.num_envs))

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B, ...]` in every env."""
        began = perf_counter()
        feedback = self._step(action)
        self.seconds += perf_counter() - began
        if self._episodes and "episode_return" in feedback.info:
            self._store(feedback.info)
        return feedback

    def render(self) -> Any:
        """One RGB frame of env 0, `[height, width, 3]` uint8, or None if it cannot be rendered."""
        return self.env.render()

    def close(self) -> None:
        """Free what the engine holds."""
        self.env.close()

    def pop_episodes(self) -> list[tuple[str, float, int]]:
        """The episodes that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # while the object is being copied
            raise AttributeError(name)
        return getattr(self.env, name)

    def _unroll(self, *given: Any) -> Unrolled | None:
        found: Unrolled | None = self.env.unroll(*given)  # type: ignore[attr-defined]
        if self._episodes and found is not None and "episode_return" in found.info:
            self._store(found.info)
        return found

    def _store(self, info: dict[str, Any]) -> None:
        returns, lengths = info["episode_return"], info["episode_length"]
        tasks = info.get("episode_task") or [self.name] * len(returns)
        self._ended += zip(tasks, map(float, returns), map(int, lengths), strict=True)


class Profile:
    """Seconds by section since the start. `shares` and `throughput` are over the time since the last call."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float, legacy.sections(seconds or {}))
        self._before = dict(self.seconds)
        self._counts: dict[str, tuple[int, int]] = {}  # completions and tokens: sampled, learned

    def add(self, section: str, seconds: float) -> None:
        """Add `seconds` to `section`."""
        self.seconds[section] += seconds

    def count(self, section: str, completions: int, tokens: int) -> None:
        """Count completions, and their tokens, that were sampled or trained on."""
        before = self._counts.get(section, (0, 0))
        self._counts[section] = before[0] + completions, before[1] + tokens

    def total(self) -> float:
        """The seconds of all sections."""
        return sum(self.seconds.values())

    def shares(self) -> dict[str, float]:
        """`profile/SECTION`: the share of each section in the time since the last call."""
        return self._shares(self._spent())

    def throughput(self) -> dict[str, float]:
        """`shares` and `RATES`: completions and tokens sampled a second (trained on, if none are sampled).

        The seconds are those of all sections since the last call, with those in which nothing is sampled.
        """
        spent, sizes = self._spent(), self._counts
        total, self._counts = sum(spent.values()), {}
        counts = sizes.get("sampling") or sizes.get("learning") or ()
        rates = {name: count / total for name, count in zip(RATES, counts, strict=False)} if total > 0 else {}
        return {**self._shares(spent), **rates}

    def _spent(self) -> dict[str, float]:
        spent = {name: total - self._before.get(name, 0.0) for name, total in self.seconds.items()}
        self._before = dict(self.seconds)
        return spent

    @staticmethod
    def _shares(spent: dict[str, float]) -> dict[str, float]:
        total = sum(spent.values())
        return {f"profile/{name}": seconds / total for name, seconds in spent.items()} if total > 0 else {}

    def document(self) -> dict[str, float]:
        """Seconds by section for JSON. Those of actors are summed over actors and may exceed the run's seconds."""
        return {name: round(self.seconds[name], 3) for name in SECTIONS if name in self.seconds}


@contextmanager
def timed(
    module: object, name: str, section: str, profile: Profile, count: Callable[..., tuple[int, int]] | None = None
) -> Iterator[None]:
    """Add the time spent in the function `name` of a module or class to a section, wherever it is called from.

    `count(result, *arguments)` returns the completions of a call, and the tokens in them.
    """
    original = getattr(module, name, None)
    if original is None:  # tabular TD has a compiled loop instead; a user's algorithm may lack it
        yield
        return

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            result = original(*args, **kwargs)
        finally:
            profile.add(section, perf_counter() - began)
        if count is not None:
            profile.count(section, *count(result, *args))
        return result

    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


def time_updates(module: object, profile: Profile) -> AbstractContextManager[None]:
    """Time the `update` of an algorithm's module as learning."""
    return timed(module, "update", "learning", profile)


@contextmanager
def time_language(module: object, profile: Profile) -> Iterator[None]:
    """Time and count what a text algorithm samples, grades and trains on.

    The algorithm's own `score`, if it has one, counts as grading.
    """
    from foresight.envs.text.task import TextTask  # late: only text algorithms sample
    from foresight.planning.generation import rollout

    for section in LANGUAGE:
        profile.add(section, 0.0)
    with ExitStack() as stack:
        stack.enter_context(timed(module, "update", "learning", profile, _update_size))
        stack.enter_context(timed(rollout, "complete", "sampling", profile, lambda batch, *_: _sampled(batch)))
        stack.enter_context(timed(rollout, "converse", "sampling", profile, lambda found, *_: _sampled(found.batch)))
        stack.enter_context(timed(TextTask, "reward", "grading", profile))
        stack.enter_context(timed(module, "score", "grading", profile))
        yield


def _sampled(batch: TokenBatch) -> tuple[int, int]:
    """Its completions, and their tokens without those of an environment."""
    return batch.length.numel(), int(batch.mask.sum())


def _update_size(_: object, state: object, batch: object, lengths: object = None, *__: object) -> tuple[int, int]:
    """The size of the batch of an `update`: a TokenBatch or, in `pretrain`, texts and their lengths."""
    known = getattr(batch, "length", lengths)
    return (known.numel(), int(known.sum())) if isinstance(known, Tensor) else (0, 0)


def time_steps(
    steps: Iterator[Item],
    times: Profile,
    add_seconds: Callable[[float], None],
    env: TimedEnv | None = None,
    rest: str | None = None,
) -> Iterator[Item]:
    """The same steps. `add_seconds` receives the time of each; the time of no other section goes to section `rest`."""
    while True:
        known = times.total()
        began, before_env = perf_counter(), env.seconds if env else 0.0
        item = next(steps, None)
        spent = perf_counter() - began
        add_seconds(spent)
        if env:
            times.add("environment", env.seconds - before_env)
        if rest is not None:
            times.add(rest, max(spent - (times.total() - known), 0.0))
        if item is None:
            return
        yield item
