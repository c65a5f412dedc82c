"""The compiled loops: kept for the next process, and compiled again when their source has changed."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from foresight.algorithms.tabular import q_learning
from foresight.envs.tabular import grid
from tests.sabotage import sabotaged_by

FILE = """
from foresight.training import tabular_kernels

@tabular_kernels.compiled
def target(x):
    return x + {number}

@tabular_kernels.compiled
def act_and_update(*args):
    return twice(target, args)

@tabular_kernels.compiled
def twice(target, args):
    return target(2.0 * args[0])
"""


NUMBER = itertools.count()


def load(path: Path | str) -> Any:
    """The file as another process sees it: nothing in it is compiled yet."""
    spec = importlib.util.spec_from_file_location(f"loaded_{next(NUMBER)}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up, and so does numba
    spec.loader.exec_module(module)
    return module


def from_cache(function: Any) -> bool:
    """Whether all that was called of a compiled function had been compiled before."""
    stats = function.stats
    return not stats.cache_misses and sum(stats.cache_hits.values()) > 0


def test_the_next_process_does_not_compile_again() -> None:
    mdp = grid.make("GridWorld4x4")
    first, again = q_learning, load(q_learning.__file__)
    assert again.act_and_update is not first.act_and_update
    for module in (first, again):
        *_, (_, _, state) = module.train(module.Config(steps=200), mdp)
    assert from_cache(again.act_and_update)
    assert state.step == 200


@sabotaged_by("foresight.training.tabular_kernels._source", lambda _: lambda: "the same")
def test_what_has_changed_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE.format(number=1))
    module = load(path)
    assert module.act_and_update(3.0) == 7.0 and not from_cache(module.act_and_update)
    module = load(path)
    assert module.act_and_update(3.0) == 7.0 and from_cache(module.act_and_update)
    path.write_text(FILE.format(number=10))  # the target, which `act_and_update` has compiled into itself
    module = load(path)
    assert module.act_and_update(3.0) == 16.0 and not from_cache(module.act_and_update)
    source = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda module: source(module) + "# another loop")
    module = load(path)
    assert module.act_and_update(3.0) == 16.0 and not from_cache(module.act_and_update)
