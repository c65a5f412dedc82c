"""STRIPS with types and negation: domains, problems, and what an action needs and does.

An atom is a tuple of strings, the predicate first: `("at", "ball1", "room2")`. A state is a frozenset of atoms; what is
not in it is false. Source: PDDL 1.2 (McDermott et al. 1998), of which `envs.pddl.parse` reads the STRIPS part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

Atom = tuple[str, ...]
State = frozenset[Atom]
OBJECT = "object"  # the type of everything


@dataclass(frozen=True)
class Action:
    """An action schema. `parameters`: variables with their types. Literals hold variables and constants.

    It is applicable where all of `positive` and none of `negative` hold; then `delete` becomes false and `add` true
    (an atom in both is true afterwards).
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    positive: tuple[Atom, ...]
    negative: tuple[Atom, ...]
    add: tuple[Atom, ...]
    delete: tuple[Atom, ...]

    def bind(self, arguments: Sequence[str]) -> Action:
        """The ground action: its literals with `arguments` in place of the variables."""
        names = dict(zip((variable for variable, _ in self.parameters), arguments, strict=True))

        def filled(atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
            return tuple((atom[0], *(names.get(term, term) for term in atom[1:])) for atom in atoms)

        return Action(
            f"({' '.join((self.name, *arguments))})", (),
            filled(self.positive), filled(self.negative), filled(self.add), filled(self.delete),
        )  # fmt: skip

    def applicable(self, state: AbstractSet[Atom]) -> bool:
        """Whether this ground action may be taken in `state`."""
        return all(atom in state for atom in self.positive) and not any(atom in state for atom in self.negative)

    def apply(self, state: State) -> State:
        """The state after this ground action."""
        return (state - frozenset(self.delete)) | frozenset(self.add)


@dataclass(frozen=True)
class Domain:
    """Predicates and actions. `types`: each with its parent; `predicates`: each with the types of its arguments."""

    name: str
    types: Mapping[str, str]
    constants: Mapping[str, str]
    predicates: Mapping[str, tuple[str, ...]]
    actions: Mapping[str, Action]
    text: str = field(default="", repr=False, compare=False)  # the file

    @property
    def typed(self) -> bool:
        """Whether it declares types."""
        return bool(self.types)

    def is_a(self, kind: str, of: str) -> bool:
        """Whether `kind` is the type `of` or below it."""
        while kind != of and kind in self.types:
            kind = self.types[kind]
        return kind == of or of == OBJECT


@dataclass(frozen=True)
class Problem:
    """Objects (with their types; constants of the domain included), an initial state, and a goal of literals."""

    name: str
    domain: Domain
    objects: Mapping[str, str]
    init: State
    goal: tuple[Atom, ...]
    goal_negative: tuple[Atom, ...] = ()
    text: str = field(default="", repr=False, compare=False)

    @property
    def facts(self) -> list[Atom]:
        """The initial state in alphabetical order, without the atoms of equality: they hold in every state."""
        return sorted(atom for atom in self.init if atom[0] != "=")

    def solved(self, state: State) -> bool:
        """Whether the goal holds."""
        return all(atom in state for atom in self.goal) and not any(atom in state for atom in self.goal_negative)

    def of_type(self, kind: str) -> list[str]:
        """The objects of a type, in their order."""
        return [name for name, own in self.objects.items() if self.domain.is_a(own, kind)]


def text_of(atom: Atom) -> str:
    """`(at ball1 room2)`."""
    return f"({' '.join(atom)})"


def write_domain(domain: Domain) -> str:
    """The domain as a PDDL file."""

    def typed(pairs: Sequence[tuple[str, str]]) -> str:
        return " ".join(f"{name} - {kind}" if domain.typed else name for name, kind in pairs)

    def literals(positive: Sequence[Atom], negative: Sequence[Atom]) -> str:
        parts = [text_of(a) for a in positive] + [f"(not {text_of(a)})" for a in negative]
        return f"(and {' '.join(parts)})"

    negative = any(action.negative for action in domain.actions.values())
    equality = any(a[0] == "=" for x in domain.actions.values() for a in (*x.positive, *x.negative))
    needs = [":strips"] + [":typing"] * domain.typed + [":negative-preconditions"] * negative + [":equality"] * equality
    lines = [f"(define (domain {domain.name})", f"  (:requirements {' '.join(needs)})"]
    if domain.typed:
        lines.append(f"  (:types {' '.join(f'{kind} - {parent}' for kind, parent in domain.types.items())})")
    if domain.constants:
        lines.append(f"  (:constants {typed(list(domain.constants.items()))})")
    lines.append("  (:predicates")
    for name, kinds in domain.predicates.items():
        pairs = [(f"?x{i}", kind) for i, kind in enumerate(kinds)]
        lines.append(f"    ({' '.join(filter(None, (name, typed(pairs))))})")
    lines[-1] += ")"
    for action in domain.actions.values():
        lines += [
            f"  (:action {action.name}",
            f"    :parameters ({typed(action.parameters)})",
            f"    :precondition {literals(action.positive, action.negative)}",
            f"    :effect {literals(action.add, action.delete)})",
        ]
    return "\n".join(lines) + ")\n"


def write_problem(problem: Problem) -> str:
    """The problem as a PDDL file; atoms in alphabetical order."""
    own = [(n, k) for n, k in problem.objects.items() if n not in problem.domain.constants]
    objects = " ".join(f"{name} - {kind}" if problem.domain.typed else name for name, kind in own)
    goal = [text_of(a) for a in problem.goal] + [f"(not {text_of(a)})" for a in problem.goal_negative]
    return "\n".join(
        [
            f"(define (problem {problem.name}) (:domain {problem.domain.name})",
            f"  (:objects {objects})",
            "  (:init",
            *(f"    {text_of(atom)}" for atom in problem.facts),
            "  )",
            f"  (:goal (and {' '.join(goal)})))\n",
        ]
    )


def ground_actions(problem: Problem) -> Iterator[Action]:
    """All ground actions, by the definition: every object of the right type for every parameter."""
    import itertools

    for action in problem.domain.actions.values():
        for arguments in itertools.product(*(problem.of_type(kind) for _, kind in action.parameters)):
            yield action.bind(arguments)
