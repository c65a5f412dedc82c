"""The task `planners`: write a planner for a PDDL domain whose names were drawn at random.

The reward is the share of problems whose plan is valid: the program runs in the sandbox and the validator checks its
plans. The protocol is that of Silver et al. (2024, arXiv 2305.11014), in one answer, for a model of our own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from foresight.envs.pddl import domains, programs, renaming
from foresight.envs.pddl.task import Domain, Problem, write_domain
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError, unknown

ASK = "Write get_plan(objects, init, goal) in Python for this domain."
SEEDS = 1_000_000  # held-out renamings have seeds from here on


def planners(
    planning: str = "gripper,ferry,forest",
    size: int = 2000,
    held_out: int = 30,
    problems: int = 3,
    tests: int = 30,
    nameless: bool = False,
    turned: bool = False,
    seed: int = 0,
) -> TextTask:
    """`size` renamings of the domains `planning` to train on and `held_out` others, in turn over the domains.

    In training an answer earns the share of `problems` training problems that it solves; a held-out answer earns 1 if
    it solves all `tests` evaluation problems, else 0. `nameless`: held-out names have no meaning, such as `predicate3`.
    `turned`: held-out domains are a variant, with the parameters of each action in the opposite order.
    Raises UserError for an unknown domain and sizes below 1.
    """
    names = planning.split(",")
    for name in names:
        if name not in domains.NAMES:
            raise unknown("domain", name, domains.NAMES)
    if min(size, held_out, problems, tests) < 1:
        raise UserError(f"size, held_out, problems and tests must be at least 1, not {size}, {held_out}, {problems}, "
                        f"{tests}.")  # fmt: skip

    def example(i: int, held: bool) -> Example:
        name = names[i % len(names)]
        columns: dict[str, Any] = {
            "planning": name,
            "renaming": seed + i + SEEDS * held,
            "held": held,
            "nameless": held and nameless,
            "turned": held and turned,
        }
        return Example(prompt(_domain(columns)), None, columns)

    def grade(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [reward(one, completion, problems, tests) for one, completion in zip(examples, completions, strict=True)]

    train = [example(i, False) for i in range(size)]
    return TextTask("planners", train, [example(i, True) for i in range(held_out)], grade, extract=str.strip)


def prompt(domain: Domain) -> str:
    """The domain, the form of a step of each action (in a plan, names follow a parenthesis), and the request."""
    steps = (
        f"({' '.join((action.name, *(v.removeprefix('?') for v, _ in action.parameters)))})"
        for action in domain.actions.values()
    )
    return f"{write_domain(domain)}\nSteps: {' '.join(steps)}\n{ASK}"


def demonstration(example: Example) -> str:
    """The hand-written planner, with the names of the example as constants."""
    columns = example.columns
    return renaming.with_constants(programs.plain(programs.written(columns["planning"])), _names(columns))


def reward(example: Example, completion: str, problems: int, tests: int) -> float:
    """The share of training problems solved, or of a held-out renaming whether all evaluation problems are."""
    held = bool(example.columns["held"])
    found = renamed(example, tests if held else problems, held)
    source = completion.strip().removeprefix("```python").removesuffix("```")
    solved = [one.solved for one in programs.solve(source, found, 5.0)] if "get_plan" in source else [False]
    return float(all(solved)) if held else sum(solved) / len(solved)


def renamed(example: Example, count: int, held: bool) -> list[Problem]:
    """Training problems or, if `held`, evaluation problems of a domain in the names of the example."""
    columns, domain = example.columns, _domain(example.columns)
    return [renaming.rename(one, _names(columns), domain) for one in _problems(columns["planning"], count, held)]


@functools.cache
def _problems(name: str, count: int, held: bool) -> tuple[Problem, ...]:
    seed, ranges = (SEEDS, domains.TEST) if held else (0, domains.TRAIN)
    return tuple(domains.tasks(name, count, seed, ranges))


def _domain(columns: Mapping[str, Any]) -> Domain:
    made = renaming.rename_domain(domains.domain(columns["planning"]), _names(columns))
    return renaming.turned(made) if columns["turned"] else made


def _names(columns: Mapping[str, Any]) -> renaming.Names:
    return _drawn(columns["planning"], columns["renaming"], columns["nameless"])


@functools.lru_cache(100_000)
def _drawn(name: str, seed: int, nameless: bool) -> renaming.Names:
    stems = renaming.stems(domains.of_size(name, 3))
    return renaming.draw(domains.domain(name), stems, np.random.default_rng([seed, 11]), nameless)
