"""What foresight uses of numba, whose own decorators have no annotations: a compiled function keeps its signature."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, overload

_Function = TypeVar("_Function", bound=Callable[..., Any])

class config:
    DISABLE_JIT: ClassVar[bool]
    NUMBA_NUM_THREADS: ClassVar[int]

class _Signature: ...

class _Kind:  # calling it with a number converts; with kinds it is the signature of a function
    @overload
    def __call__(self, *arguments: _Kind) -> _Signature: ...
    @overload
    def __call__(self, number: int, /) -> int: ...
    def __getitem__(self, dims: slice | tuple[slice, ...], /) -> _Kind: ...

int64: _Kind
uint8: _Kind

class types:
    boolean: ClassVar[_Kind]
    float32: ClassVar[_Kind]
    int32: ClassVar[_Kind]
    int64: ClassVar[_Kind]
    intp: ClassVar[_Kind]
    uint16: ClassVar[_Kind]
    void: ClassVar[_Kind]
    @staticmethod
    def ExternalFunction(name: str, signature: _Signature, /) -> Callable[..., Any]: ...
    @staticmethod
    def CPointer(kind: _Kind, /) -> _Kind: ...

def carray(pointer: Any, shape: tuple[int, ...], /) -> Any: ...
def prange(stop: int, /) -> range: ...
def set_num_threads(n: int) -> None: ...
@overload
def njit(function: _Function, /) -> _Function: ...
@overload
def njit(
    signature: _Signature = ...,
    /,
    *,
    cache: bool = ...,
    nogil: bool = ...,
    parallel: bool = ...,
    inline: str = ...,
    error_model: str = ...,
    fastmath: bool | set[str] = ...,
) -> Callable[[_Function], _Function]: ...
