"""States of language algorithms on a tiny random model, each built once a process."""

from __future__ import annotations

import copy
import functools
from types import ModuleType
from typing import Any

from foresight.training.options import build_config


def fresh(module: ModuleType, **fields: Any) -> Any:
    """A state as `module.build` makes it from these fields: a copy, which takes a sixth of the time of loading.

    What a test changes in it no other test sees. Not for a test of what happens in `build`.
    """
    return copy.deepcopy(_built(module, tuple(sorted(fields.items()))))


@functools.cache
def _built(module: ModuleType, fields: tuple[tuple[str, Any], ...]) -> Any:
    return module.build(build_config(module.Config, **dict(fields)))
