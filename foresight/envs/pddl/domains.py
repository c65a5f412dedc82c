"""The seven domains of Silver et al. (2024, arXiv 2305.11014), and generators of their problems.

The generators are this library's own; their ranges for training and evaluation tasks are the published ones. Every
problem is solvable. Domains by the names in the paper: Delivery, Ferry, Forest, Gripper, Heavy, Miconic, Spanner.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from foresight.envs.pddl.parse import domain_from, read
from foresight.envs.pddl.task import Atom, Domain, Problem
from foresight.errors import UserError, unknown

FOLDER = Path(__file__).with_name("domains")
Objects = dict[str, str]
Parts = tuple[Objects, set[Atom], list[Atom]]
Range = tuple[int, int]  # both ends are included

# Arguments of each generator, for training tasks and for evaluation tasks (the paper's repository, `llm-genplan`).
TRAIN: dict[str, dict[str, Range]] = {
    "delivery": {"locations": (5, 9), "wanted": (2, 4)},
    "ferry": {"locations": (10, 15), "cars": (3, 5)},
    "forest": {"side": (8, 9)},
    "gripper": {"balls": (5, 10), "rooms": (15, 20), "goals": (2, 5)},
    "heavy": {"items": (3, 10)},
    "miconic": {"floors": (5, 10), "passengers": (1, 5), "buildings": (1, 2)},
    "spanner": {"spanners": (3, 5), "nuts": (3, 5), "locations": (3, 5)},
}
TEST: dict[str, dict[str, Range]] = {
    "delivery": {"locations": (30, 39), "wanted": (20, 29)},
    "ferry": {"locations": (20, 30), "cars": (10, 20)},
    "forest": {"side": (10, 11)},
    "gripper": {"balls": (20, 30), "rooms": (40, 50), "goals": (10, 20)},
    "heavy": {"items": (100, 250)},
    "miconic": {"floors": (10, 20), "passengers": (1, 10), "buildings": (1, 5)},
    "spanner": {"spanners": (10, 20), "nuts": (10, 20), "locations": (20, 30)},
}
NAMES = tuple(TEST)
GRIPPERS = 2
LARGEST = 1_000  # size: a forest has a million cells


@functools.cache
def domain(name: str) -> Domain:
    """One of the seven domains. Raises UserError for another name."""
    if name not in NAMES:
        raise unknown("domain", name, NAMES)
    return domain_from(read(FOLDER / f"{name}.pddl"), f"{name}.pddl")


def problem(name: str, sizes: Mapping[str, int], rng: np.random.Generator) -> Problem:
    """A random problem of these sizes, the arguments of the domain's generator. Raises UserError for bad sizes."""
    made = domain(name)
    wanted = TEST[name]
    if set(sizes) != set(wanted):
        raise UserError(f"A problem of {name} has the sizes {', '.join(wanted)}, not {', '.join(sizes)}.")
    if bad := [f"{key}={value}" for key, value in sizes.items() if value < 1]:
        raise UserError(f"Sizes must be at least 1, not {', '.join(bad)}.")
    objects, init, goal = GENERATORS[name](rng, **sizes)
    title = "-".join((name, *(f"{value}" for value in sizes.values())))
    return Problem(title, made, objects, frozenset(init), tuple(goal))


def tasks(name: str, count: int, seed: int, ranges: Mapping[str, Mapping[str, Range]] = TEST) -> list[Problem]:
    """`count` problems with sizes drawn uniformly from `ranges`; equal seeds give equal problems."""
    domain(name)
    rng = np.random.default_rng([seed, NAMES.index(name)])
    found = []
    for _ in range(count):
        sizes = {key: int(rng.integers(low, high + 1)) for key, (low, high) in ranges[name].items()}
        found.append(problem(name, sizes, rng))
    return found


def of_size(name: str, n: int, seed: int = 0) -> Problem:
    """A problem in which everything grows with `n`: about n balls in n rooms, an n × n forest, n items, and so on."""
    domain(name)
    if n < 2:
        raise UserError(f"The size of a problem must be at least 2, not {n}: for example pddl:{name}-2.")
    if n > LARGEST:
        raise UserError(f"The size of a problem must be at most {LARGEST:,}, not {n:,}: for example pddl:{name}-20.")
    sizes = {
        "delivery": {"locations": n + 1, "wanted": (n + 1) // 2},
        "ferry": {"locations": n, "cars": n},
        "forest": {"side": n},
        "gripper": {"balls": n, "rooms": n, "goals": n},
        "heavy": {"items": n},
        "miconic": {"floors": n, "passengers": (n + 1) // 2, "buildings": 1 + n // 10},
        "spanner": {"spanners": n, "nuts": n, "locations": n},
    }[name]
    return problem(name, sizes, np.random.default_rng([seed, n]))


def _names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def _delivery(rng: np.random.Generator, locations: int, wanted: int) -> Parts:
    """As many papers as wanting locations. Home and they are safe; of the others, each second one is a trap."""
    places, papers = _names("loc", locations), _names("paper", min(wanted, locations - 1))
    order = [places[i] for i in rng.permutation(locations)]
    home, wanting, others = order[0], order[1 : 1 + len(papers)], order[1 + len(papers) :]
    init: set[Atom] = {("at", home), ("home", home), ("safe", home)}
    init |= {("unpacked", paper) for paper in papers}
    init |= {(what, place) for place in wanting for what in ("wants", "safe")}
    init |= {("safe", place) for place in others if rng.random() < 0.5}
    objects = dict.fromkeys(places, "location") | {paper: "paper" for paper in papers}
    return objects, init, [("satisfied", place) for place in sorted(wanting)]


def _ferry(rng: np.random.Generator, locations: int, cars: int) -> Parts:
    places, vehicles = _names("l", max(2, locations)), _names("c", cars)
    init: set[Atom] = {("location", p) for p in places} | {("car", c) for c in vehicles} | {("empty-ferry",)}
    init |= {("different", a, b) for a in places for b in places if a != b}
    init.add(("at-ferry", str(rng.choice(places))))
    goal: list[Atom] = []
    for car in vehicles:
        start, end = rng.choice(len(places), 2, replace=False)
        init.add(("at", car, places[start]))
        goal.append(("at", car, places[end]))
    return dict.fromkeys((*places, *vehicles), "object"), init, goal


def _forest(rng: np.random.Generator, side: int) -> Parts:
    """A trail of flat ground and hills from the first column to the last one; the rest is ground, hills and water."""
    cells = {(r, c): f"r{r}_c{c}" for r in range(side) for c in range(side)}
    row, column = int(rng.integers(side)), 0
    path = [(row, column)]
    while column < side - 1:
        aim = int(rng.integers(side))
        while row != aim:
            row += 1 if aim > row else -1
            path.append((row, column))
        for _ in range(2 if column + 2 < side else 1):
            column += 1
            path.append((row, column))
    kinds = {cell: rng.choice(["ground", "hill", "water"], p=[0.4, 0.3, 0.3]) for cell in cells}
    for cell in path:
        kinds[cell] = rng.choice(["ground", "hill"], p=[0.7, 0.3])
    kinds[path[0]] = "ground"
    init: set[Atom] = {("at", cells[path[0]]), ("goal", cells[path[-1]])}
    init |= {(str(kind), cells[cell]) for cell, kind in kinds.items() if kind != "ground"}
    for r, c in cells:
        near = [(r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)]
        init |= {("adjacent", cells[r, c], cells[cell]) for cell in near if cell in cells}
    init |= {("trail", cells[a], cells[b]) for a, b in itertools.pairwise(path)}
    return dict.fromkeys(cells.values(), "place"), init, [("at", cells[path[-1]])]


def _gripper(rng: np.random.Generator, balls: int, rooms: int, goals: int) -> Parts:
    things, places, hands = _names("ball", balls), _names("room", max(2, rooms)), _names("gripper", GRIPPERS)
    init: set[Atom] = {("ball", x) for x in things} | {("room", x) for x in places} | {("gripper", x) for x in hands}
    init |= {("free", x) for x in hands} | {("at-robby", str(rng.choice(places)))}
    start = {ball: int(rng.integers(len(places))) for ball in things}
    init |= {("at", ball, places[i]) for ball, i in start.items()}
    chosen = sorted(rng.choice(balls, min(goals, balls), replace=False))
    goal: list[Atom] = []
    for i in chosen:  # another room than the ball's
        end = (start[things[i]] + int(rng.integers(1, len(places)))) % len(places)
        goal.append(("at", things[i], places[end]))
    return dict.fromkeys((*things, *places, *hands), "object"), init, goal


def _heavy(rng: np.random.Generator, items: int) -> Parts:
    order = [_names("item", items)[i] for i in rng.permutation(items)]
    init: set[Atom] = {("box-empty",)} | {("unpacked", item) for item in order}
    init |= {("heavier", a, b) for i, a in enumerate(order) for b in order[i + 1 :]}
    return dict.fromkeys(sorted(order), "item"), init, [("packed", item) for item in sorted(order)]


def _miconic(rng: np.random.Generator, floors: int, passengers: int, buildings: int) -> Parts:
    objects: Objects = {}
    init: set[Atom] = set()
    goal: list[Atom] = []
    floors = max(2, floors)
    for b in range(buildings):
        levels = [f"f{i}_b{b}" for i in range(floors)]
        objects |= dict.fromkeys(levels, "floor")
        init |= {("above", low, high) for i, low in enumerate(levels) for high in levels[i + 1 :]}
        init.add(("lift-at", str(rng.choice(levels))))
        for i in range(passengers):
            who = f"p{i}_b{b}"
            start, end = rng.choice(floors, 2, replace=False)
            objects[who] = "passenger"
            init |= {("origin", who, levels[start]), ("destination", who, levels[end])}
            goal.append(("served", who))
    return objects, init, goal


def _spanner(rng: np.random.Generator, spanners: int, nuts: int, locations: int) -> Parts:
    """At least as many spanners as nuts."""
    nuts = min(nuts, spanners)
    way = ["shed", *_names("location", locations), "gate"]
    tools, screws = _names("spanner", spanners), _names("nut", nuts)
    init: set[Atom] = {("at", "bob", "shed")} | {("link", a, b) for a, b in itertools.pairwise(way)}
    init |= {("at", tool, way[int(rng.integers(1, locations + 1))]) for tool in tools}
    init |= {("usable", tool) for tool in tools}
    init |= {(what, nut) for nut in screws for what in ("loose",)} | {("at", nut, "gate") for nut in screws}
    objects = {place: "location" for place in way} | {"bob": "man"}
    objects |= {tool: "spanner" for tool in tools} | {nut: "nut" for nut in screws}
    return objects, init, [("tightened", nut) for nut in screws]


GENERATORS: dict[str, Callable[..., Parts]] = {
    "delivery": _delivery, "ferry": _ferry, "forest": _forest, "gripper": _gripper, "heavy": _heavy,
    "miconic": _miconic, "spanner": _spanner,
}  # fmt: skip
