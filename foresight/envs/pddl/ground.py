"""Grounding: the ground actions that can ever be applied, as arrays of atom numbers for compiled loops.

Schemas are joined with the static atoms (those no action changes), then kept if they are reachable when nothing is
ever deleted. Negative preconditions are ignored in that test unless they are static, as in Fast Downward's translator
(Helmert 2009).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foresight.envs.pddl.task import Action, Atom, Problem, State
from foresight.errors import UserError

Ints = NDArray[np.int32]
Words = NDArray[np.uint64]
MOST = 3_000_000  # ground actions before the test of reachability


class Arrays(NamedTuple):
    """P atoms and A actions for compiled loops. Each `X_start` `[n + 1]` cuts the flat `X` into n lists.

    `watch`: per atom, the actions that are looked at where it holds (each action is watched by one precondition);
    `always`: those without a positive precondition; `need`: per atom, all actions that it is a precondition of.
    """

    watch_start: Ints
    watch: Ints
    always: Ints
    positive_start: Ints
    positive: Ints
    negative_start: Ints
    negative: Ints
    add_start: Ints
    add: Ints
    delete_start: Ints
    delete: Ints
    need_start: Ints
    need: Ints
    goal: Ints
    goal_negative: Ints


@dataclass(frozen=True)
class Grounded:
    """A problem over numbered atoms. `possible` is False where a goal atom can never become true."""

    problem: Problem
    atoms: tuple[Atom, ...]
    actions: tuple[Action, ...]
    init: Words  # [W], a bit per atom
    arrays: Arrays
    possible: bool

    def bits(self, state: State) -> Words:
        """The bits `[W]` of a state; atoms without a number, which are static, are left out."""
        return _bits([i for i, atom in enumerate(self.atoms) if atom in state], len(self.atoms))

    def state(self, bits: Words) -> State:
        """The state of these bits, without its static atoms."""
        flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
        return frozenset(self.atoms[i] for i in np.flatnonzero(flags[: len(self.atoms)]))


def ground(problem: Problem, seconds: float = math.inf) -> Grounded:
    """The reachable part of a problem.

    Raises UserError if it has more than three million ground actions, or takes more than `seconds`.
    """
    tick = _clock(problem.name, seconds)
    schemas = problem.domain.actions.values()
    fluent = {atom[0] for action in schemas for atom in (*action.add, *action.delete)}
    static: dict[str, list[Atom]] = {}
    for atom in problem.init:
        if atom[0] not in fluent:
            static.setdefault(atom[0], []).append(atom)
    candidates: list[Action] = []
    for action in schemas:
        for arguments in _instances(problem, action, fluent, static, tick):
            candidates.append(action.bind(arguments))
            if len(candidates) > MOST:
                raise UserError(f"{problem.name} has more than {MOST:,} ground actions: it is too large to ground.")
    kept, reached = _reachable(problem, candidates, fluent, tick)
    kept.sort(key=lambda action: action.name)  # sets have no order that lasts
    changed = {atom for action in kept for atom in (*action.add, *action.delete)} & reached
    always = problem.init - changed  # atoms that no action can make false
    kept = [action for action in kept if always.isdisjoint(action.negative)]
    atoms = tuple(sorted(atom for atom in changed if atom[0] in fluent))
    number = {atom: i for i, atom in enumerate(atoms)}
    possible = all(atom in reached for atom in problem.goal)
    possible = possible and not any(a in problem.init and a not in number for a in problem.goal_negative)
    return Grounded(
        problem,
        atoms,
        tuple(kept),
        _bits([number[atom] for atom in problem.init if atom in number], len(atoms)),
        _arrays(problem, kept, number),
        possible,
    )


def _clock(name: str, seconds: float) -> Callable[[], None]:
    """What raises UserError once `seconds` have passed."""
    end = time.perf_counter() + seconds

    def tick() -> None:
        if time.perf_counter() > end:
            raise UserError(f"{name} was not grounded within {seconds:g} seconds: raise --seconds, or make it smaller.")

    return tick


def _instances(
    problem: Problem, action: Action, fluent: set[str], static: Mapping[str, list[Atom]], tick: Callable[[], None]
) -> Iterator[tuple[str, ...]]:
    """The arguments for which all static preconditions hold."""
    variables = [variable for variable, _ in action.parameters]
    kinds = dict(action.parameters)
    allowed = {v: problem.of_type(kind) for v, kind in kinds.items()}
    members = {v: set(names) for v, names in allowed.items()}
    conditions = [atom for atom in action.positive if atom[0] not in fluent]
    forbidden = [atom for atom in action.negative if atom[0] not in fluent]
    for atom in conditions:  # a unary one narrows its variable at once
        if len(atom) == 2 and atom[1] in members:
            members[atom[1]] &= {a[1] for a in static.get(atom[0], ())}
    allowed = {v: [name for name in names if name in members[v]] for v, names in allowed.items()}
    wide = [atom for atom in conditions if len(atom) > 2]
    index: dict[tuple[Atom, tuple[int, ...]], dict[tuple[str, ...], list[Atom]]] = {}
    held = {atom for atoms in static.values() for atom in atoms}

    def matches(atom: Atom, bound: Mapping[str, str]) -> list[Atom]:
        """The static atoms that agree with what is bound."""
        fixed = tuple(i for i, term in enumerate(atom[1:], 1) if not term.startswith("?") or term in bound)
        if (atom, fixed) not in index:
            table = index[atom, fixed] = {}
            for one in static.get(atom[0], ()):
                table.setdefault(tuple(one[i] for i in fixed), []).append(one)
        return index[atom, fixed].get(tuple(bound.get(atom[i], atom[i]) for i in fixed), [])

    def extend(bound: dict[str, str], left: Sequence[Atom]) -> Iterator[dict[str, str]]:
        tick()
        if left:
            best = max(left, key=lambda atom: sum(term in bound or not term.startswith("?") for term in atom[1:]))
            rest = [atom for atom in left if atom is not best]
            for one in matches(best, bound):
                more = dict(bound)
                for term, name in zip(best[1:], one[1:], strict=True):
                    if term.startswith("?") and (more.setdefault(term, name) != name or name not in members[term]):
                        break
                else:
                    yield from extend(more, rest)
            return
        free = [v for v in variables if v not in bound]
        if not free:
            yield bound
            return
        for name in allowed[free[0]]:
            yield from extend({**bound, free[0]: name}, left)

    for bound in extend({}, wide):
        if all((a[0], *(bound.get(t, t) for t in a[1:])) in held for a in conditions) and not any(
            (a[0], *(bound.get(t, t) for t in a[1:])) in held for a in forbidden
        ):
            yield tuple(bound[v] for v in variables)


def _reachable(
    problem: Problem, candidates: list[Action], fluent: set[str], tick: Callable[[], None]
) -> tuple[list[Action], set[Atom]]:
    """The actions whose positive preconditions can all become true, and the atoms that can."""
    waiting = [0] * len(candidates)
    users: dict[Atom, list[int]] = {}
    ready: list[int] = []
    for i, action in enumerate(candidates):
        tick()
        needs = {atom for atom in action.positive if atom[0] in fluent}
        waiting[i] = len(needs)
        for atom in needs:
            users.setdefault(atom, []).append(i)
        if not needs:
            ready.append(i)
    reached = set(problem.init)
    queue = list(problem.init)
    kept: list[Action] = []
    while queue or ready:
        tick()
        while ready:
            action = candidates[ready.pop()]
            kept.append(action)
            for atom in action.add:
                if atom not in reached:
                    reached.add(atom)
                    queue.append(atom)
        if queue:
            for i in users.get(queue.pop(), ()):
                waiting[i] -= 1
                if not waiting[i]:
                    ready.append(i)
    return kept, reached


def _arrays(problem: Problem, actions: Sequence[Action], number: Mapping[Atom, int]) -> Arrays:
    positive = [_numbers(action.positive, number) for action in actions]
    negative = [_numbers(action.negative, number) for action in actions]
    add = [_numbers(action.add, number) for action in actions]
    delete = [sorted(set(_numbers(x.delete, number)) - set(a)) for x, a in zip(actions, add, strict=True)]
    need: list[list[int]] = [[] for _ in number]
    for i, atoms in enumerate(positive):
        for atom in atoms:
            need[atom].append(i)
    watch: list[list[int]] = [[] for _ in number]
    always = []
    for i, atoms in enumerate(positive):
        if atoms:
            watch[min(atoms, key=lambda atom: len(need[atom]))].append(i)
        else:
            always.append(i)
    flat = [_flat(lists) for lists in (watch, positive, negative, add, delete, need)]
    return Arrays(
        *flat[0], np.array(always, np.int32), *flat[1], *flat[2], *flat[3], *flat[4], *flat[5],
        np.array(_numbers(problem.goal, number), np.int32),
        np.array(_numbers(problem.goal_negative, number), np.int32),
    )  # fmt: skip


def _numbers(atoms: Sequence[Atom], number: Mapping[Atom, int]) -> list[int]:
    """The numbers of the fluent atoms, each once. An atom without one never changes, and was tested before."""
    return sorted({number[atom] for atom in atoms if atom in number})


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    start = np.zeros(len(lists) + 1, np.int32)
    start[1:] = np.cumsum([len(one) for one in lists])
    return start, np.array([x for one in lists for x in one], np.int32)


def _bits(numbers: Sequence[int], count: int) -> Words:
    bits = np.zeros(max(1, (count + 63) // 64), np.uint64)
    for i in numbers:
        bits[i // 64] |= np.uint64(1) << np.uint64(i % 64)
    return bits
