"""Problems and programs with other names: a planner that works by the structure must not depend on the words.

`draw` gives every predicate, type, action and kind of object a new name, at random or (`nameless`) one without meaning
such as `predicate3`, the control NoNames of Silver et al. (2024).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from foresight.envs.pddl.task import OBJECT, Action, Atom, Domain, Problem

SYLLABLES = tuple(first + last for first in "bdfgklmnpr" for last in "aeio")
STRING = re.compile(r"f?'[^'\n]*'|f?\"[^\"\n]*\"")
WORD = re.compile(r"\{[^}]*\}|[A-Za-z][\w-]*")  # braces of f-strings are left alone
PARTS = re.compile(r"([a-z]+)(.*)")


@dataclasses.dataclass(frozen=True)
class Names:
    """New names of the words of a domain, and of the stems of its objects (`ball` of `ball7`)."""

    domain: str
    words: Mapping[str, str]
    stems: Mapping[str, str]


def draw(domain: Domain, stems: list[str], rng: np.random.Generator, nameless: bool = False) -> Names:
    """New names, all different, for the domain and the stems of its objects."""
    taken: set[str] = set()

    def word() -> str:
        while True:
            made = "".join(rng.choice(SYLLABLES, int(rng.integers(2, 4))))
            if made not in taken and made not in domain.predicates and made not in domain.actions:
                taken.add(made)
                return made

    kinds = {"predicate": list(domain.predicates), "type": list(domain.types), "action": list(domain.actions)}
    words: dict[str, str] = {}
    for kind, names in kinds.items():
        for i, name in enumerate(names):
            words.setdefault(name, f"{kind}{i}" if nameless else word())
    new = {stem: f"object{chr(97 + i)}" if nameless else word() for i, stem in enumerate(stems)}
    return Names("domain0" if nameless else word(), words, new)


def turned(domain: Domain) -> Domain:
    """A variant of the domain: the parameters of each action in the opposite order."""
    actions = {
        name: dataclasses.replace(action, parameters=action.parameters[::-1]) for name, action in domain.actions.items()
    }
    return dataclasses.replace(domain, actions=actions, text="")


def stems(problem: Problem) -> list[str]:
    """The stems of the objects' names, sorted."""
    return sorted({_stem(name) for name in problem.objects})


def rename_domain(domain: Domain, names: Names) -> Domain:
    """The same domain in other words."""
    new = names.words

    def atoms(found: tuple[Atom, ...]) -> tuple[Atom, ...]:
        return tuple(
            (new.get(a[0], a[0]), *(t if t.startswith("?") else _object(t, names) for t in a[1:])) for a in found
        )

    def kind(name: str) -> str:
        return OBJECT if name == OBJECT else new.get(name, name)

    actions = {}
    for action in domain.actions.values():
        variables = {v: f"?x{i}" for i, (v, _) in enumerate(action.parameters)}
        made = Action(
            new[action.name], tuple((v, kind(k)) for v, k in action.parameters),
            *(atoms(part) for part in (action.positive, action.negative, action.add, action.delete)),
        )  # fmt: skip
        bound = made.bind(list(variables.values()))
        actions[made.name] = dataclasses.replace(
            bound, name=made.name, parameters=tuple((variables[v], k) for v, k in made.parameters)
        )
    return Domain(
        names.domain,
        {kind(a): kind(b) for a, b in domain.types.items()},
        {_object(name, names): kind(k) for name, k in domain.constants.items()},
        {new[name]: tuple(kind(k) for k in kinds) for name, kinds in domain.predicates.items()},
        actions,
    )


def rename(problem: Problem, names: Names, domain: Domain | None = None) -> Problem:
    """The same problem in other words; `domain` is the renamed domain, if it is at hand."""
    made = domain or rename_domain(problem.domain, names)

    def atom(a: Atom) -> Atom:
        return (names.words.get(a[0], a[0]), *(_object(t, names) for t in a[1:]))

    objects = {
        _object(name, names): kind if kind == OBJECT else names.words[kind] for name, kind in problem.objects.items()
    }
    return Problem(
        problem.name, made, objects, frozenset(map(atom, problem.init)), tuple(map(atom, problem.goal)),
        tuple(map(atom, problem.goal_negative)),
    )  # fmt: skip


def rename_program(source: str, names: Names) -> str:
    """The program with the new words inside its string literals."""

    def literal(match: re.Match[str]) -> str:
        text = match[0]
        start = 2 if text[0] == "f" else 1
        inner = WORD.sub(lambda m: names.words.get(m[0], m[0]), text[start:-1])
        return text[:start] + inner + text[-1]

    return STRING.sub(literal, source)


def with_constants(source: str, names: Names) -> str:
    """The program with the new words as constants: one a line, all of them, in the order of the domain.

    So a small model only copies a list. Inside the strings, a tokenizer may split a word in another way than in the
    domain (in SmolLM2's, `'re` is a token), and a word that cannot be copied is spelled by heart.
    """

    def constant(word: str) -> str:
        return word.upper().replace("-", "_")

    def literal(match: re.Match[str]) -> str:
        text = match[0]
        start = 2 if text[0] == "f" else 1
        inner = text[start:-1]
        if inner in names.words:
            return constant(inner)
        made = WORD.sub(lambda m: f"{{{constant(m[0])}}}" if m[0] in names.words else m[0], inner)
        return text if made == inner else f"f{text[-1]}{made}{text[-1]}"

    lines = [f'{constant(word)} = "{new}"' for word, new in names.words.items()]
    return "\n".join(lines) + "\n\n\n" + STRING.sub(literal, source)


def _stem(name: str) -> str:
    form = PARTS.match(name)
    return form[1] if form else name


def _object(name: str, names: Names) -> str:
    form = PARTS.match(name)
    return names.stems.get(form[1], form[1]) + form[2] if form else name
