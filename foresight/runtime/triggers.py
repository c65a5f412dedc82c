"""When to do things beside training."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Every:
    """True whenever `now` has passed a multiple of `interval` since it was last asked.

    `now` counts anything: steps, or seconds since the start. Multiples, and not "so long after the last
    time", so that a resumed run does things at the same steps as one that was never stopped. An
    interval of 0 is always true, None never.
    """

    def __init__(self, interval: float | None, start: float = 0) -> None:
        self.interval, self._last = interval, start

    def __call__(self, now: float) -> bool:
        """Whether it is time."""
        if not self.interval:
            return self.interval is not None
        due = now // self.interval > self._last // self.interval
        self._last = now
        return due


class Interruption:
    """Lets Ctrl-C (and SIGTERM) wait until the State is whole: `signal` is set, and the loop stops at the next step.

    A second Ctrl-C raises KeyboardInterrupt at once. Outside the main thread, where Python delivers no
    signals, this does nothing.
    """

    def __init__(self, say: Callable[[str], Any]) -> None:
        self.signal = 0
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        with contextlib.suppress(RuntimeError):  # the signal may have come in the middle of a write to the terminal
            self._say("stopping after this step and saving; once more stops at once")
