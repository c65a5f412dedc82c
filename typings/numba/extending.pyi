"""What foresight uses of numba's extensions: functions that write their own LLVM instructions."""

from collections.abc import Callable
from typing import Any

def intrinsic(function: Callable[..., Any], /) -> Callable[..., Any]: ...
