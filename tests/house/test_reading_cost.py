"""The reading-cost tool on a made-up package of known files and lines, and its table in CONTRIBUTING.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.house import reading_cost, rules
from tests.sabotage import sabotaged_by

ALGORITHM = '''"""A: a paper, 2020."""
from foresight.nets.mlp import MLP
from foresight.ops import losses, unused


def act(state, obs):
    return state.network.forward(obs)


def train(config, env):
    network = MLP(3)
    yield helper(network)


def helper(network):
    return losses.squared(network.predict(1), 2)


def never_reached():
    return unused.f()
'''  # train: 3 lines, helper: 2

MLP = '''"""M."""


class MLP:
    """An MLP."""

    def __init__(self, size):
        self.size = size

    def predict(self, x):
        return x

    def never_read(self, x):
        return x
'''  # the class: 11 lines, 5 without its methods; __init__ and predict: 2 each

LOSSES = '''"""L."""
from numba import njit
from foresight.ops import fused


def squared(x, y):
    # The same as the compiled twin.
    if x is None:
        return twin(x, y)
    return fused.squared(x, y)


@njit(cache=True)
def twin(x, y):
    return (x - y) ** 2
'''  # squared: 5 lines; twin is compiled

FILES = {
    "algorithms/value/a.py": ALGORITHM,
    "nets/mlp.py": MLP,
    "ops/losses.py": LOSSES,
    "ops/fused.py": "def squared(x, y):\n    return 0\n",
    "ops/unused.py": "def f():\n    return 0\n",
}


def nothing_is_compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node: False


def a_line_is_forgotten(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node: node.end_lineno - node.lineno


@sabotaged_by("tests.house.reading_cost._is_compiled", nothing_is_compiled)
@sabotaged_by("tests.house.reading_cost._length", a_line_is_forgotten)
def test_the_lines_of_a_made_up_package() -> None:
    reading_cost._read.cache_clear()
    try:
        assert reading_cost.reached("algorithms/value/a.py", FILES) == {
            "algorithms/value/a.py": 3 + 2,
            "nets/mlp.py": 5 + 2 + 2,
            "ops/losses.py": 5,
        }
    finally:
        reading_cost._read.cache_clear()


def test_only_files_of_more_than_a_few_lines_are_counted() -> None:
    long = ALGORITHM.replace("    network = MLP(3)\n", "    network = MLP(3)\n" + "    env.step()\n" * 16)
    assert reading_cost.cost("algorithms/value/a.py", FILES) == (0, 19)
    assert reading_cost.cost("algorithms/value/a.py", {**FILES, "algorithms/value/a.py": long}) == (1, 35)
    assert reading_cost.table(FILES).splitlines()[-1] == "| `value/a` | 0 | 19 |"


def test_contributing_lists_every_algorithm() -> None:
    """Not that the numbers are the newest, or every edit of a shared function would have to renew them."""
    page = (rules.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.partition(reading_cost.BEGIN)[2].partition(reading_cost.END)[0]
    listed = re.findall(r"^\| `([\w/]+)` \| \d+ \| [\d,]+ \|$", table, re.MULTILINE)
    files = [p.removeprefix("algorithms/").removesuffix(".py") for p in rules.algorithm_files()]
    assert listed == sorted(files), "run: python -m tests.house.reading_cost"
