"""Where the time of a run goes: environment, inference (all else that acting costs), learning, waiting.

Tables have two sections: learning, and walking, which is acting, the world and, in one compiled loop, learning too.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from torch import Tensor

SECTIONS = ("environment", "inference", "learning", "waiting", "actors_waiting", "walking")


class Watch:
    """An `Env` that measures the seconds in its `step` (at a cost of a quarter of a microsecond) and nothing else.

    With `episodes` it also keeps `(task, return, length)` of every episode that ends, until they are `taken`.
    """

    def __init__(self, env: Any, episodes: bool = False) -> None:
        self.env, self.name, self.num_envs, self.spaces = env, env.name, env.num_envs, env.spaces
        self.seconds = 0.0
        self._step, self._episodes = env.step, episodes
        self._ended: list[tuple[str, float, int]] = []

    def reset(self, seed: int) -> Any:
        """Start all worlds; equal seeds give equal episodes. Returns obs `[B, ...]`."""
        return self.env.reset(seed)

    def step(self, action: Tensor) -> Any:
        """Take `action` `[B, ...]` in every world."""
        began = perf_counter()
        feedback = self._step(action)
        self.seconds += perf_counter() - began
        if self._episodes and "episode_return" in feedback.info:
            self._keep(feedback.info)
        return feedback

    def render(self) -> Any:
        """One RGB frame of world 0, `[height, width, 3]` uint8, or None where the world cannot be drawn."""
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
    """Seconds by section, as they add up; `shares` are those of the time since the last look."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float, seconds or {})
        self._before = dict(self.seconds)

    def add(self, section: str, seconds: float) -> None:
        """Count `seconds` to `section`."""
        self.seconds[section] += seconds

    def shares(self) -> dict[str, float]:
        """`profile/SECTION`: the share of each section that took any time since the last call."""
        spent = {name: total - self._before.get(name, 0.0) for name, total in self.seconds.items()}
        self._before = dict(self.seconds)
        whole = sum(spent.values())
        return {f"profile/{name}": seconds / whole for name, seconds in spent.items()} if whole > 0 else {}

    def document(self) -> dict[str, float]:
        """Seconds by section for JSON. Sections of actors are sums over them, so they may exceed the run's seconds."""
        return {name: round(self.seconds[name], 3) for name in SECTIONS if name in self.seconds}


@contextmanager
def learning(module: Any, profile: Profile) -> Iterator[None]:
    """Count the seconds in the `update` of an algorithm's module, wherever it is called from."""
    plain = module.update

    @functools.wraps(plain)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            profile.add("learning", perf_counter() - began)

    module.update = timed
    try:
        yield
    finally:
        module.update = plain
