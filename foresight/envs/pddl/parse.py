"""Reads PDDL files: STRIPS with types, constants, equality and negative preconditions.

An error is a UserError with the file, the line, what was found and what was expected. What the reader does not support
(conditional effects, quantifiers, disjunctions, numbers, derived predicates, durations) is refused by its name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from foresight.envs.pddl.task import OBJECT, Action, Atom, Domain, Problem
from foresight.errors import UserError, unknown

REQUIREMENTS = (":strips", ":typing", ":negative-preconditions", ":equality")
UNSUPPORTED = {
    "or": "disjunctions", "imply": "implications", "forall": "quantifiers", "exists": "quantifiers",
    "when": "conditional effects", "increase": "numeric effects", "decrease": "numeric effects",
    "assign": "numeric effects", "scale-up": "numeric effects", "scale-down": "numeric effects",
    ">": "numeric conditions", "<": "numeric conditions", ">=": "numeric conditions", "<=": "numeric conditions",
    "preference": "preferences", "either": "types of alternatives (either)", ":functions": "functions and costs",
    ":derived": "derived predicates", ":durative-action": "durative actions", ":metric": "metrics",
    ":constraints": "constraints", "at-start": "durative actions", "over": "durative actions",
}  # fmt: skip
TOKEN = re.compile(r"[()]|[^\s();]+|;[^\n]*|\n")


class Words(list["Words | str"]):
    """A list in parentheses, and the line where each of its elements begins."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: list[int] = []


class Source:
    """A file, for errors."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    def error(self, line: int, found: str, expected: str) -> UserError:
        """What is wrong at a line."""
        return UserError(f"{self.name}, line {line}: {found}; expected {expected}.")

    def unsupported(self, line: int, word: str) -> UserError:
        """A feature that is not supported."""
        return UserError(
            f"{self.name}, line {line}: {UNSUPPORTED.get(word, 'the requirement')} ({word}) not supported; "
            f"supported are {' '.join(REQUIREMENTS)}."
        )

    def tree(self) -> Words:
        """The file as nested lists."""
        top, line = Words(1), 1
        stack = [top]
        for token in TOKEN.findall(self.text.lower()):
            if token == "\n":
                line += 1
            elif token == "(":
                stack[-1].lines.append(line)
                stack[-1].append(Words(line))
                stack.append(stack[-1][-1])  # type: ignore[arg-type]
            elif token == ")":
                if len(stack) == 1:
                    raise self.error(line, "a ')' without '('", "'(define ...)' or the end of the file")
                stack.pop()
            elif token[0] != ";":
                if len(stack) == 1:
                    raise self.error(line, f"'{token}' outside parentheses", "'(define ...)'")
                stack[-1].append(token)
                stack[-1].lines.append(line)
        if len(stack) > 1:
            raise self.error(line, f"the file ends inside the '(' of line {stack[-1].line}", "')'")
        if len(top) != 1 or not isinstance(top[0], Words):
            raise self.error(line, f"{len(top)} definitions", "one '(define ...)'")
        return top[0]


def read(path: str | Path) -> str:
    """The text of a file. Raises UserError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}. Give the path of a PDDL file.") from error


def domain_from(text: str, name: str = "domain.pddl") -> Domain:
    """The domain in `text`; `name` is the file's, for errors. Raises UserError."""
    source = Source(name, text)
    tree = source.tree()
    title = _header(source, tree, "domain")
    types: dict[str, str] = {}
    constants: dict[str, str] = {}
    predicates: dict[str, tuple[str, ...]] = {}
    actions: dict[str, Action] = {}
    for part in _parts(source, tree, (":requirements", ":types", ":constants", ":predicates", ":action"), 2):
        key = part[0]
        if key == ":requirements":
            for word, line in zip(part[1:], part.lines[1:], strict=True):
                if word not in REQUIREMENTS:
                    raise source.unsupported(line, str(word))
        elif key == ":types":
            types = dict(_typed(source, part, 1, None))
            for kind in list(types.values()):
                if kind != OBJECT:
                    types.setdefault(kind, OBJECT)
            types.pop(OBJECT, None)
            _check_order(source, part, types)
        elif key == ":constants":
            constants = dict(_typed(source, part, 1, types))
        elif key == ":predicates":
            for one in part[1:]:
                if not isinstance(one, Words) or not one or not isinstance(one[0], str):
                    raise source.error(part.line, f"{_shown(one)} in :predicates", "'(name ?variable ...)'")
                predicates[one[0]] = tuple(kind for _, kind in _typed(source, one, 1, types, variables=True))
        else:
            action = _action(source, part, types, constants, predicates)
            if action.name in actions:
                raise source.error(part.line, f"a second action {action.name}", "a new name")
            actions[action.name] = action
    if not actions:
        raise source.error(tree.line, "a domain without an action", "'(:action name ...)'")
    return Domain(title, types, constants, predicates, actions, text)


def problem_from(text: str, domain: Domain, name: str = "problem.pddl") -> Problem:
    """The problem in `text`, of this domain. Raises UserError."""
    source = Source(name, text)
    tree = source.tree()
    title = _header(source, tree, "problem")
    objects = dict(domain.constants)
    atom = functools.partial(_atom, source, domain, objects, True)
    init: set[Atom] = set()
    goal: tuple[list[Atom], list[Atom]] | None = None
    for part in _parts(source, tree, (":domain", ":requirements", ":objects", ":init", ":goal"), 2):
        key = part[0]
        if key == ":domain" and part[1:] != [domain.name]:
            raise source.error(part.line, f"the domain {_shown(part[1:])}", domain.name)
        if key == ":objects":
            objects |= dict(_typed(source, part, 1, domain.types))
        elif key == ":init":
            for one, line in zip(part[1:], part.lines[1:], strict=True):
                if isinstance(one, Words) and one[:1] == ["not"]:  # what is not in a state is false
                    _literals(source, domain, one, line, atom)
                else:
                    init.add(atom(one, line))
        elif key == ":goal":
            if len(part) != 2:
                raise source.error(part.line, f"{len(part) - 1} conditions in :goal", "one condition")
            goal = _literals(source, domain, part[1], part.lines[1], atom)
    if goal is None:
        raise source.error(tree.line, "a problem without a goal", "'(:goal ...)'")
    if _uses_equality(domain) or any(a[0] == "=" for a in (*goal[0], *goal[1])):
        init |= {("=", one, one) for one in objects}
    return Problem(title, domain, objects, frozenset(init), tuple(goal[0]), tuple(goal[1]), text)


def _uses_equality(domain: Domain) -> bool:
    return any(a[0] == "=" for x in domain.actions.values() for a in (*x.positive, *x.negative))


def _shown(what: Sequence[object]) -> str:
    """A word, or a list without what is nested in it."""
    if isinstance(what, str):
        return f"'{what}'"
    return f"({' '.join(word if isinstance(word, str) else '(...)' for word in what)[:40]})"


def _header(source: Source, tree: Words, kind: str) -> str:
    """The name in `(define (KIND NAME) ...)`."""
    if tree[:1] != ["define"]:
        raise source.error(tree.line, _shown(tree[0] if tree else ""), "'define'")
    head = tree[1] if len(tree) > 1 else ""
    if not isinstance(head, Words) or len(head) != 2 or head[0] != kind or not isinstance(head[1], str):
        raise source.error(tree.lines[1] if len(tree) > 1 else tree.line, _shown(head), f"'({kind} NAME)'")
    return head[1]


def _parts(source: Source, tree: Words, known: tuple[str, ...], start: int) -> Iterable[Words]:
    for part, line in zip(tree[start:], tree.lines[start:], strict=True):
        if not isinstance(part, Words) or not part or not isinstance(part[0], str):
            raise source.error(line, _shown(part), f"'({known[0]} ...)'")
        if part[0] in UNSUPPORTED:
            raise source.unsupported(line, part[0])
        if part[0] not in known:
            raise source.error(line, f"'{part[0]}'", f"one of {' '.join(known)}")
        yield part


def _typed(
    source: Source, words: Words, start: int, types: Mapping[str, str] | None, variables: bool = False
) -> list[tuple[str, str]]:
    """Names with their types: `a b - block c` is block, block, object. `types` None: any type may be named."""
    found: list[tuple[str, str]] = []
    waiting: list[str] = []
    i = start
    while i < len(words):
        word, line = words[i], words.lines[i]
        if word == "-":
            kind = words[i + 1] if i + 1 < len(words) else ""
            if isinstance(kind, Words):
                raise source.unsupported(line, kind[0] if kind and isinstance(kind[0], str) else "either")
            if not kind or not waiting:
                raise source.error(line, "'-'", "names before it and a type after it")
            if types is not None and kind != OBJECT and kind not in types:
                raise source.error(line, f"the type '{kind}'", f"one of {', '.join([*types, OBJECT])}")
            found += [(name, kind) for name in waiting]
            waiting, i = [], i + 2
            continue
        if not isinstance(word, str) or word.startswith("?") != variables:
            raise source.error(line, _shown(word), "a variable such as ?x" if variables else "a name")
        waiting.append(word)
        i += 1
    return found + [(name, OBJECT) for name in waiting]


def _check_order(source: Source, part: Words, types: Mapping[str, str]) -> None:
    """Raise UserError for a type that is below itself."""
    for kind, above in types.items():
        for _ in types:
            if above == kind:
                line = part.lines[part.index(kind, 1)]
                raise source.error(line, f"the type '{kind}' below itself", "types that end at object")
            above = types.get(above, OBJECT)


def _action(
    source: Source,
    part: Words,
    types: Mapping[str, str],
    constants: Mapping[str, str],
    predicates: Mapping[str, tuple[str, ...]],
) -> Action:
    if len(part) < 2 or not isinstance(part[1], str):
        raise source.error(part.line, "an action without a name", "'(:action NAME ...)'")
    name, parameters = part[1], []
    conditions: tuple[list[Atom], list[Atom]] = [], []
    effects: tuple[list[Atom], list[Atom]] | None = None
    scope = Domain("", types, constants, predicates, {})
    names = dict(constants)
    for i in range(2, len(part), 2):
        key, line = part[i], part.lines[i]
        value = part[i + 1] if i + 1 < len(part) else None
        if key not in (":parameters", ":precondition", ":effect") or not isinstance(value, Words):
            raise source.error(
                line, f"{_shown(key)} in the action {name}", ":parameters, :precondition or :effect, '('"
            )
        if key == ":parameters":
            parameters = _typed(source, value, 0, types, variables=True)
            names |= dict(parameters)
            if len(names) != len(constants) + len(parameters):
                raise source.error(line, f"a variable twice in the action {name}", "different variables")
            continue
        found = _literals(source, scope, value, line, functools.partial(_atom, source, scope, names, False))
        if key == ":precondition":
            conditions = found
        else:
            effects = found
    if effects is None:
        raise source.error(part.line, f"the action {name} without an effect", "':effect (...)'")
    bad = [a for a in (*effects[0], *effects[1]) if a[0] == "="]
    if bad:
        raise source.error(part.line, f"the action {name} changes '='", "an effect on a predicate")
    return Action(name, tuple(parameters), *(tuple(x) for x in (*conditions, *effects)))


def _unsupported(word: object, domain: Domain) -> TypeGuard[str]:
    """Whether the first word of a condition is of a feature that is not supported, and no predicate of the domain."""
    return isinstance(word, str) and word in UNSUPPORTED and word not in domain.predicates


def _literals(
    source: Source, domain: Domain, words: Words | str, line: int, atom: Callable[[Words | str, int], Atom]
) -> tuple[list[Atom], list[Atom]]:
    """The positive and the negative atoms of a conjunction."""
    positive: list[Atom] = []
    negative: list[Atom] = []
    left = [(words, line)]  # not by recursion: a conjunction may be nested thousands deep
    while left:
        words, line = left.pop()
        if not isinstance(words, Words):
            raise source.error(line, _shown(words), "'(and ...)' or '(predicate ...)'")
        if not words:
            continue
        head = words[0]
        if _unsupported(head, domain):
            raise source.unsupported(words.line, head)
        if head == "and":
            left += reversed(list(zip(words[1:], words.lines[1:], strict=True)))
        elif head == "not":
            if len(words) != 2:
                raise source.error(words.line, f"'not' of {len(words) - 1} conditions", "'(not (predicate ...))'")
            inner = words[1]
            if isinstance(inner, Words) and inner and inner[0] in ("and", "not"):
                raise source.unsupported(words.line, "or")
            if isinstance(inner, Words) and inner and _unsupported(inner[0], domain):
                raise source.unsupported(words.line, inner[0])
            negative.append(atom(inner, words.line))
        else:
            positive.append(atom(words, words.line))
    return positive, negative


def _atom(source: Source, domain: Domain, names: Mapping[str, str], check: bool, words: Words | str, line: int) -> Atom:
    """An atom whose predicate, arity, terms and their types are declared."""
    if not isinstance(words, Words) or not words or not all(isinstance(word, str) for word in words):
        raise source.error(line, _shown(words), "'(predicate name ...)'")
    head, *terms = (str(word) for word in words)
    if _unsupported(head, domain) or head == "not":
        raise source.unsupported(line, head) if head != "not" else source.error(line, "'not'", "an atom")
    kinds = domain.predicates.get(head, (OBJECT, OBJECT) if head == "=" else None)
    if kinds is None:
        hint = str(unknown("predicate", head, domain.predicates))
        raise UserError(f"{source.name}, line {line}: {hint}")
    if len(terms) != len(kinds):
        raise source.error(line, f"{len(terms)} arguments of '{head}'", f"{len(kinds)}")
    for term, kind in zip(terms, kinds, strict=True):
        if term not in names:
            what = "parameter" if term.startswith("?") else "object"
            raise source.error(line, f"'{term}', which is no {what},", f"one of {', '.join(list(names)[:8]) or 'none'}")
        if check and not domain.is_a(names[term], kind):
            raise source.error(line, f"'{term}' of type {names[term]} in '{head}'", f"an object of type {kind}")
    return (head, *terms)
