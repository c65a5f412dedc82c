"""The machine under a run: devices, threads and the global random generators."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from foresight.errors import UserError

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # the names of mallopt's options in malloc.h


def pick_device(wanted: str, gpu: bool = True) -> str:
    """The device for a run. "auto" is CUDA if there is one and `gpu` is true, otherwise the CPU.

    MPS has no float64 and must be asked for. Raises UserError for one that this machine does not have.
    """
    if wanted == "auto":
        return "cuda" if gpu and torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"The device '{wanted}' cannot be used here ({reason}). Use --device auto.") from error
    return wanted


def device_of(state: object) -> torch.device:
    """Where the State's modules live (its first generator or tensor, if it has no modules)."""
    parts = list(vars(state).values())
    for part in parts:
        if isinstance(part, torch.nn.Module):
            for weight in part.parameters():
                return weight.device
    others = (part.device for part in parts if isinstance(part, torch.Generator | torch.Tensor))
    return next(others, torch.device("cpu"))


def seed_everything(seed: int) -> None:
    """Seed the global generators too, for code (dropout, initialization) that knows no other."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def global_rng() -> dict[str, Any]:
    """The global generators, for `set_global_rng`."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": np.random.get_state()}


def set_global_rng(bits: dict[str, Any]) -> None:
    """Put the global generators where `global_rng` found them (CUDA's, if there are as many devices)."""
    torch.set_rng_state(bits["torch"])
    random.setstate(bits["python"])
    np.random.set_state(bits["numpy"])
    if bits["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(bits["cuda"]):
        torch.cuda.set_rng_state_all(bits["cuda"])


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Torch's threads as a Config with a field `threads` asks; torch's own choice for None or 0."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count:
            torch.set_num_threads(before)


def keep_memory(pieces: int) -> None:
    """Have the C library keep freed tensors below `pieces` bytes for the next use, in one pool. Only glibc can.

    By default every large tensor is fetched from the system anew, so that a training step spends a good part of its
    time on page faults; and each thread has a pool of its own, so that what autograd's thread frees lies idle.
    What is as large as `pieces` gets pages of its own and leaves no hole in the pool.
    """
    # oneDNN keeps the code that it makes for every shape. Rows of tokens are of a thousand shapes: keep fewer.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in ((MMAP_THRESHOLD, pieces), (TRIM_THRESHOLD, (1 << 31) - 1), (ARENA_MAX, 1)):
            mallopt(option, value)


def return_memory() -> None:
    """Give freed memory back to the system: what `keep_memory` keeps grows with every gap between uses."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
