"""bfloat16 in compiled loops: numpy has no such dtype, so that a loop is given the bits of numbers."""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor


def numbers(x: Tensor) -> NDArray[Any]:
    """A tensor on the CPU for a compiled loop, without gradient: float32 as it is, bfloat16 as its bits."""
    found: NDArray[Any] = x.detach().view(torch.uint16 if x.dtype == torch.bfloat16 else x.dtype).numpy()
    return found


@intrinsic
def wide(context: Any, x: Any) -> Any:
    """The float32 of the bits of a bfloat16; a float32 is itself."""

    def generate(_: Any, b: Any, __: Any, args: Any) -> Any:
        if x == types.float32:
            return args[0]
        word = ir.IntType(32)
        return b.bitcast(b.shl(b.zext(args[0], word), ir.Constant(word, 16)), ir.FloatType())

    return types.float32(x), generate


def _narrow(b: Any, x: Any) -> Any:
    word = ir.IntType(32)
    x = b.bitcast(x, word)
    odd = b.and_(b.lshr(x, ir.Constant(word, 16)), ir.Constant(word, 1))
    x = b.add(x, b.add(odd, ir.Constant(word, 0x7FFF)))
    return b.trunc(b.lshr(x, ir.Constant(word, 16)), ir.IntType(16))


@intrinsic
def narrow(context: Any, x: Any) -> Any:
    """The bits of the bfloat16 nearest to a float32, even where two are."""
    return types.uint16(types.float32), lambda _, b, __, args: _narrow(b, args[0])


@intrinsic
def narrow_as(context: Any, x: Any, kind: Any) -> Any:
    """A float32 as numbers of `kind` are: itself, or `narrow` of it."""

    def generate(_: Any, b: Any, __: Any, args: Any) -> Any:
        return args[0] if kind == types.float32 else _narrow(b, args[0])

    return kind(types.float32, kind), generate
