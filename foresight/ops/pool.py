"""The threads of compiled loops: numba's. All loops share them, and their count is that of torch or smaller."""

from __future__ import annotations

import contextlib
import functools
import threading
from contextlib import AbstractContextManager

import numba
import torch

LOCK = threading.Lock()  # held while several threads run a loop: not all of numba's layers allow two at once
_set = threading.local()


@functools.cache
def start() -> None:
    """Start the threads, and leave torch's count as it is: numba changes that of OpenMP, which may be torch's too.

    Needed before a compiled loop that is linked with one in threads: read from the cache, it does not do so itself.
    """
    count = torch.get_num_threads()
    numba.get_num_threads()  # type: ignore[attr-defined]  # it is exported late
    torch.set_num_threads(count)


def share(wanted: int | None = None) -> int:
    """Have loops of this Python thread use `wanted` threads, by default torch's; returns how many there are."""
    start()
    count: int = max(1, min(wanted or torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    if getattr(_set, "count", 0) != count:  # a call takes as long as a small product
        numba.set_num_threads(count)
        _set.count = count
    return count


def alone(threads: int) -> AbstractContextManager[object]:
    """The context of a loop in so many threads."""
    return LOCK if threads > 1 else contextlib.nullcontext()
