"""Words that several threads of a compiled loop read and write: elements of int64 arrays, by atomic instructions.

A thread that loads what another has stored sees all that the other wrote before.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

# Microseconds of sleep. A thread that waits for one without a core must sleep: it then runs on the core that is free.
sleep = types.ExternalFunction("usleep", types.int32(types.int32))


def _pointer(context: Any, b: Any, signature: Any, args: Any) -> Any:
    return b.gep(context.make_array(signature.args[0])(context, b, args[0]).data, [args[1]])


@intrinsic
def load(typing: Any, words: Any, i: Any) -> Any:
    """words[i]."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(_pointer(context, b, signature, args), "acquire", 8)

    return types.int64(words, types.intp), generate


@intrinsic
def store(typing: Any, words: Any, i: Any, number: Any) -> Any:
    """words[i] = number."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(args[2], _pointer(context, b, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.int64), generate


@intrinsic
def increased(typing: Any, words: Any, i: Any) -> Any:
    """words[i] += 1, and its new value."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        one = context.get_constant(types.int64, 1)
        return b.add(b.atomic_rmw("add", _pointer(context, b, signature, args), one, "acq_rel"), one)

    return types.int64(words, types.intp), generate


@intrinsic
def replaced(typing: Any, words: Any, i: Any, old: Any, new: Any) -> Any:
    """Whether words[i] was `old`, and is `new` now; otherwise it stays as it is."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, b, signature, args)
        return b.extract_value(b.cmpxchg(pointer, args[2], args[3], "acq_rel", "acquire"), 1)

    return types.boolean(words, types.intp, types.int64, types.int64), generate
