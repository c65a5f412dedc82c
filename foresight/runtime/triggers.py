"""What triggers work other than training: intervals, and signals from the user."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Every:
    """Whether `now` has passed a multiple of `interval` since the last call.

    `now` counts anything, such as steps, or seconds since the start. It is a multiple of the interval, not the
    time since the last trigger, so that a resumed run triggers at the same steps as an uninterrupted one. An
    interval of 0 always triggers, None never.
    """

    def __init__(self, interval: float | None, start: float = 0) -> None:
        self.interval, self._last = interval, start

    def __call__(self, now: float) -> bool:
        """Whether the interval has passed."""
        if not self.interval:
            return self.interval is not None
        due = now // self.interval > self._last // self.interval
        self._last = now
        return due


class Interruption:
    """Delays Ctrl-C (and SIGTERM) until the State is consistent: sets `signal`, and the loop stops after its step.

    A second Ctrl-C raises KeyboardInterrupt at once. Outside the main thread, where Python delivers no
    signals, this does nothing.
    """

    def __init__(self, report: Callable[[str], Any]) -> None:
        self.signal = 0
        self._report = report
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
        with contextlib.suppress(RuntimeError):  # the signal may interrupt a write to the terminal
            self._report("stopping after this step and saving; press Ctrl-C again to stop at once")
