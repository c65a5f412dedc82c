"""The dtype of matrix products: float32, or bfloat16 where the processor is faster in it."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foresight import errors

PRECISIONS = ("auto", "float32", "bfloat16")


def dtype(precision: str, device: torch.device | str) -> torch.dtype | None:
    """The autocast dtype, or None for float32; "auto" is the faster of the two on the device.

    Raises UserError for an unknown precision.
    """
    if precision not in PRECISIONS:
        raise errors.unknown("precision", precision, PRECISIONS)
    halved = precision == "bfloat16" or (precision == "auto" and fast_bfloat16(device))
    return torch.bfloat16 if halved else None


def fast_bfloat16(device: torch.device | str) -> bool:
    """Whether the device multiplies bfloat16 faster than float32."""
    if torch.device(device).type == "cpu":
        return bool(torch.backends.cpu.get_cpu_capability().startswith("AVX512")) and _has_flag("avx512_bf16")
    return torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which matrix products on `device` have this precision; see `dtype`, also for errors."""
    kind = dtype(precision, device)
    if kind is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()  # a context of torch takes as long as a small product
    return torch.autocast(device.type, kind, enabled=kind is not None)


def recording(device: torch.device) -> bool:
    """Whether a CUDA graph is recorded on `device` now: nothing is computed yet, so no value can be looked at."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _has_flag(flag: str) -> bool:
    try:
        return flag in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def compiled(*tensors: Tensor) -> bool:
    """Whether compiled loops can stand in for torch: all are float32 on a CPU, and nothing asks for less precision."""
    if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # torch's; numba code cannot be traced
        return False
    return all(x.is_cpu and x.dtype == torch.float32 for x in tensors)
