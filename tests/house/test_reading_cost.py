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
from foresight.ops.fused import losses as fused


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
    "ops/fused/losses.py": "def squared(x, y):\n    return 0\n",
    "ops/unused.py": "def f():\n    return 0\n",
}


def nothing_is_compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node: False


def a_line_is_forgotten(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node: node.end_lineno - node.lineno


@sabotaged_by("tests.house.reading_cost._is_compiled", nothing_is_compiled)
@sabotaged_by("tests.house.reading_cost._length", a_line_is_forgotten)
def test_the_lines_of_a_made_up_package() -> None:
    assert reading_cost.Package(FILES).reached("algorithms/value/a.py") == {
        "algorithms/value/a.py": 3 + 2,
        "nets/mlp.py": 5 + 2 + 2,
        "ops/losses.py": 5,
    }


REPLAY = '''"""R."""
from typing import Protocol


class Env(Protocol):
    def step(self, action): ...


class Game:
    def step(self, action):
        return action


class Replay:
    rows: dict[str, "Row"]

    def __init__(self, size: int):
        self.counts: dict[str, int] = {}
        self.counts.update(size=size)

    def update(self, priorities):
        return priorities

    def sample(self, n: int) -> "Row":
        return self.rows["x"]


class Row:
    def __init__(self, x):
        self.x = x

    def mean(self):
        return self.x


def sample(n):
    return n
'''  # Env 1 + 1, Game 1 + 2, Replay 5 + 3 + 2 + 2, Row 2 + 2 + 2, sample 2


def lines(train: str) -> int:
    """What `train` of an algorithm with this body reaches in `REPLAY`."""
    head = "import torch\nfrom typing import Any\nfrom foresight.data import replay\n"
    head += "from foresight.data.replay import Env, Game, Replay, Row, sample\n"
    files = {"algorithms/value/a.py": f"{head}\n\n{train}\n", "data/replay.py": REPLAY}
    return reading_cost.Package(files).reached("algorithms/value/a.py").get("data/replay.py", 0)


def all_alike(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: reading_cost.UNKNOWN


def nothing_is_known(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: reading_cost.FOREIGN


def no_protocols(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, cls, other: cls == other


@sabotaged_by("tests.house.reading_cost.Package.kind", all_alike, nothing_is_known)
@sabotaged_by("tests.house.reading_cost.Package.implements", no_protocols)
def test_a_method_counts_only_where_it_is_read_off_a_value_of_its_class() -> None:
    for body, count in [
        ("def train(replay: Replay):\n    replay.update(1)", 5 + 2 + 2),  # not __init__; Row stands in a field
        ("def train(replay: Replay):\n    seen = {}\n    seen.update(a=1)", 5 + 2),
        ("def train(replay: Replay):\n    torch.ones(3).sample(1)", 5 + 2),
        ("def train(replay: Replay, seen: Any):\n    seen.update(1)", 5 + 2 + 2),  # nothing tells what `seen` is
        ("def train():\n    made = Replay(3)\n    return made", 5 + 3 + 2),  # whose own dict is updated
        ("def train(replay: Replay):\n    return replay.sample(2).mean()", 5 + 2 + 2 + 2),
        ("def train(replay: Replay):\n    for name, row in replay.rows.items():\n        row.mean()", 5 + 2 + 2),
        ("def train(rows: list[Row] | None):\n    return [row.mean() for row in rows]", 2 + 2),
        ("def train(pair: tuple[Row, dict]):\n    row, other = pair\n    other.mean()", 2),
        ("def train(env: Env):\n    env.step(1)", 1 + 1),
        ("def train(env: Env):\n    env = Game()\n    env.step(1)", 1 + 1 + 1 + 2),  # which implements it
        ("def train(env: Any):\n    isinstance(env, Row)", 2),
        ("def train(n):\n    return sample(n)", 2),
        ("def train(n):\n    return replay.sample(n)", 2),
        ("def train(sample):\n    return sample(3)", 0),  # its own argument
        ("def train(n):\n    return {'sample': n}", 0),
    ]:
        assert lines(body) == count, body


def test_only_files_of_more_than_a_few_lines_are_counted() -> None:
    def cost(**changed: str) -> tuple[int, int]:
        return reading_cost.cost("algorithms/value/a.py", reading_cost.Package({**FILES, **changed}))

    long = ALGORITHM.replace("    network = MLP(3)\n", "    network = MLP(3)\n" + "    env.step()\n" * 16)
    assert cost() == (0, 19)
    assert cost(**{"algorithms/value/a.py": long}) == (1, 35)
    assert reading_cost.table(FILES).splitlines()[-1] == "| `value/a` | 0 | 19 |"
    assert reading_cost.missed(FILES) == "All 1 algorithms meet the aim."


def test_by_how_much_the_aim_is_missed() -> None:
    def longer(lines: int) -> str:
        return ALGORITHM.replace("    network = MLP(3)\n", "    network = MLP(3)\n" + "    env.step()\n" * lines)

    files = {**FILES, "algorithms/value/b.py": longer(1_281), "algorithms/value/c.py": longer(1_481)}
    assert reading_cost.missed(files) == (
        "1 of 3 algorithms meet the aim. The others miss it by 0 files and 300 lines at the median, and by 0 files and "
        "300 lines at most."
    )


def test_contributing_lists_every_algorithm() -> None:
    """Not that the numbers are the newest, or every edit of a shared function would have to renew them."""
    page = (rules.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.partition(reading_cost.BEGIN)[2].partition(reading_cost.END)[0]
    listed = re.findall(r"^\| `([\w/]+)` \| \d+ \| [\d,]+ \|$", table, re.MULTILINE)
    files = [p.removeprefix("algorithms/").removesuffix(".py") for p in rules.algorithm_files()]
    assert listed == sorted(files), "run: python -m tests.house.reading_cost"
