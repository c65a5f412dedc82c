"""The machine of a run: devices, threads, memory and the global random generators."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from foresight.errors import UserError

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # mallopt's options in malloc.h
POOL_AT_START, POOL = 1 << 20, 1 << 25  # bytes: smaller tensors come from the pool, in the first step and after it


def pick_device(name: str, gpu: bool = True) -> str:
    """The device for a run. "auto" is CUDA if there is one and `gpu` is true, otherwise the CPU.

    MPS has no float64 and is never chosen automatically. Raises UserError for a device that this machine lacks.
    """
    if name == "auto":
        return "cuda" if gpu and torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"The device '{name}' cannot be used here: {reason}. Use --device auto.") from error
    if torch.device(name).type == "meta":
        raise UserError("The device 'meta' cannot be used here: it holds no numbers. Use --device auto.")
    return name


def device_of(state: object) -> torch.device:
    """The device of the State's modules, or of its first generator or tensor if it has no modules."""
    parts = list(getattr(state, "__dict__", {}).values())
    for part in parts:
        if isinstance(part, torch.nn.Module):
            for weight in part.parameters():
                return weight.device
    others = (part.device for part in parts if isinstance(part, torch.Generator | torch.Tensor))
    return next(others, torch.device("cpu"))


def require_float32() -> None:
    """Raise UserError if new tensors would have another dtype than the observations, by torch's default dtype."""
    if torch.get_default_dtype() != torch.float32:
        raise UserError(
            f"The default dtype of torch is {torch.get_default_dtype()}, and networks here have float32: call "
            "torch.set_default_dtype(torch.float32) first."
        )


def seed_everything(seed: int) -> None:
    """Seed the global generators, for code (dropout, initialization) that takes no generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def global_rng() -> dict[str, Any]:
    """The states of the global generators, for `set_global_rng`."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": np.random.get_state()}


def set_global_rng(bits: dict[str, Any]) -> None:
    """Restore the states that `global_rng` returned (CUDA's only if the number of devices is the same)."""
    torch.set_rng_state(bits["torch"])
    random.setstate(bits["python"])
    np.random.set_state(bits["numpy"])
    if bits["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(bits["cuda"]):
        torch.cuda.set_rng_state_all(bits["cuda"])


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run with `count` torch threads (the Config field `threads`); None or 0 keeps torch's own choice."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count:
            torch.set_num_threads(before)


def peak_gib(usage: resource.struct_rusage | None = None) -> float:
    """GiB of resident memory at the peak of `usage`, by default of this process. macOS counts bytes, others KiB."""
    usage = resource.getrusage(resource.RUSAGE_SELF) if usage is None else usage
    return usage.ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def configure_malloc(limit: int) -> None:
    """Have the C library keep freed tensors below `limit` bytes in one pool for reuse. Only glibc supports this.

    By default every large tensor is newly requested from the system, and a training step spends much of its time on
    page faults; each thread also has its own pool, so memory that autograd's thread frees is not reused.
    A tensor of `limit` bytes or more gets its own pages and leaves no hole in the pool.
    """
    # oneDNN caches compiled code by shape. Token batches have thousands of shapes: cache fewer.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in ((MMAP_THRESHOLD, limit), (TRIM_THRESHOLD, (1 << 31) - 1), (ARENA_MAX, 1)):
            mallopt(option, value)


def trim_malloc() -> None:
    """Return freed memory to the system: the pool of `configure_malloc` otherwise grows by fragmentation."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
