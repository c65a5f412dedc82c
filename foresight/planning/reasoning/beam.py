"""Beam search over steps with a process reward model, and diverse verifier tree search (DVTS).

Snell et al. 2024 (arXiv:2408.03314, §5.1): N beams; each step, the best N/M by the reward model are continued by M
samples each. DVTS (Beeching et al. 2024, "Scaling test-time compute with open models") runs N/M such searches apart,
each of which keeps the best of its M samples, so that one early favorite cannot take all beams.

A beam is scored by its last step, its worst, or the product of all (`aggregate`). Equal texts are one beam: a copy
would only take the place of another thought. Left out: lookahead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

from foresight import errors
from foresight.errors import UserError
from foresight.planning.reasoning.mind import (
    STEP_TOKENS,
    Answer,
    Ask,
    Check,
    Problem,
    Steps,
    Thought,
    contains,
    score,
)
from foresight.planning.reasoning.tree import ThoughtTree
from foresight.planning.reasoning.voting import best, elect

AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "prod": math.prod,
}
UNFINISHED = "\ufffd"  # what the beginning of a character is decoded to
READINGS = ("best", "weighted", "majority")  # how the answer is read from the finished beams


@dataclasses.dataclass(frozen=True)
class Path:
    """A partial completion: the ids of its steps, its text, the score of each step, and its node in the tree."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    scores: tuple[float, ...] = ()
    ended: bool = False
    node: int = 0
    logprob: float = 0.0


def beam(
    problem: Problem,
    n: int = 16,
    width: int = 4,
    steps: int = 40,
    step_tokens: int = STEP_TOKENS,
    aggregate: str = "last",
    read: str = "best",
) -> Steps:
    """`n` beams, of which each step keeps the best n / `width` by the verifier and continues each `width` times."""
    check(n, width, steps, aggregate, read)
    tree, live, ended = problem.tree(), [Path()], list[Path]()
    for step in range(steps):
        paths = yield from extend(problem, tree, live, n if step == 0 else width, step_tokens)
        if not paths:
            break
        ended += [path for path in paths if path.ended]
        live = keep(tree, [path for path in paths if not path.ended], max(1, n // width), aggregate)
        if not live or len(ended) >= n:
            break
    return finish(problem, tree, ended or live, aggregate, read)


def dvts(
    problem: Problem,
    n: int = 16,
    width: int = 4,
    steps: int = 40,
    step_tokens: int = STEP_TOKENS,
    aggregate: str = "last",
    read: str = "best",
) -> Steps:
    """n / `width` searches apart, each of which continues the best of its `width` samples."""
    check(n, width, steps, aggregate, read)
    tree, ended = problem.tree(), list[Path]()
    live = [Path() for _ in range(max(1, n // width))]
    for _ in range(steps):
        groups = yield from extend_each(problem, tree, live, width, step_tokens)
        firsts = [keep(tree, group, 1, aggregate)[0] for group in groups if group]
        if not firsts:
            break
        ended += [path for path in firsts if path.ended]
        live = [path for path in firsts if not path.ended]
        if not live:
            break
    return finish(problem, tree, ended or live, aggregate, read)


def check(n: int, width: int, steps: int, aggregate: str, read: str) -> None:
    """Raise UserError for sizes below 1 and for unknown names."""
    if min(n, width, steps) < 1:
        raise UserError(f"n is {n}, width {width}, steps {steps}: all must be at least 1.")
    if aggregate not in AGGREGATES:
        raise errors.unknown("aggregate", aggregate, AGGREGATES)
    if read not in READINGS:
        raise errors.unknown("reading", read, READINGS)


def extend_each(
    problem: Problem, tree: ThoughtTree, paths: Sequence[Path], count: int, step_tokens: int, scored: bool = True
) -> Generator[Ask | Check, Any, list[list[Path]]]:
    """`count` next steps of each path, scored; of equal texts below one path, only the first.

    A step is no longer than one answer may be, which every budget pays for.
    """
    prefixes = tuple(problem.prompt + path.tokens for path in paths)
    most = min(step_tokens, problem.mind.max_new_tokens)
    replies = yield Ask(prefixes, count, most, (problem.delimiter,))
    groups = list[list[Path]]()
    for path, thoughts in zip(paths, replies, strict=True):
        unique: dict[Any, Path] = {}
        for one in (after(problem, path, thought) for thought in thoughts):
            unique.setdefault(identity(one), one)
        groups.append(list(unique.values()))
    flat = [path for group in groups for path in group]
    scores: Sequence[float | None] = [None] * len(flat)
    if scored:
        scores = yield from score(problem, [path.text for path in flat])
    results, position = list[list[Path]](), 0
    for path, group in zip(paths, groups, strict=True):
        results.append([])
        for one, value in zip(group, scores[position : position + len(group)], strict=True):
            node = tree.add(last(path.text, one.text), (path.node,), "answer" if one.ended else "thought", value)
            valued = path.scores if value is None else (*path.scores, value)
            results[-1].append(dataclasses.replace(one, scores=valued, node=node))
        position += len(group)
    return results


def after(problem: Problem, path: Path, thought: Thought) -> Path:
    """The path with one more thought, not scored yet. Its text is that of all its tokens, as none stands for itself.

    A character may be split over two thoughts, and so may a text that ends the answer.
    """
    tokens = path.tokens + thought.tokens
    text = problem.mind.policy.decode(tokens)
    return dataclasses.replace(
        path,
        tokens=tokens,
        text=text,
        ended=thought.ended or contains(text, problem.example.stop),
        logprob=path.logprob + thought.logprob,
    )


def last(before: str, text: str) -> str:
    """What a text adds to the one before it, with a character that the latter had only begun."""
    return text[len(before.rstrip(UNFINISHED)) :]


def identity(path: Path) -> tuple[Any, ...]:
    """What equal paths have in common: the text or, where it ends within a character, the tokens too."""
    return path.text, path.tokens if path.text.endswith(UNFINISHED) else ()


def extend(
    problem: Problem, tree: ThoughtTree, paths: Sequence[Path], count: int, step_tokens: int
) -> Generator[Ask | Check, Any, list[Path]]:
    """The next steps of all paths, scored, without duplicates."""
    groups = yield from extend_each(problem, tree, paths, count, step_tokens)
    unique: dict[Any, Path] = {}
    for path in (path for group in groups for path in group):
        unique.setdefault(identity(path), path)
    return list(unique.values())


def keep(tree: ThoughtTree, paths: Sequence[Path], count: int, aggregate: str) -> list[Path]:
    """The `count` paths with the best scores (ties: the first); the others are marked in the tree."""
    order = sorted(paths, key=lambda path: -AGGREGATES[aggregate](path.scores))
    tree.prune([path.node for path in order[count:]])
    return order[:count]


def finish(problem: Problem, tree: ThoughtTree, paths: Sequence[Path], aggregate: str, read: str) -> Answer:
    """The answer read from finished paths: the best score, or a vote, weighted or not."""
    texts = [path.text for path in paths]
    scores = [AGGREGATES[aggregate](path.scores) if path.scores else 0.0 for path in paths]
    scratch = problem.tree()
    found = (
        best(scratch, texts, scores)
        if read == "best"
        else elect(problem, scratch, texts, scores if read == "weighted" else None)
    )
    if found.text in texts:
        tree.choose(paths[texts.index(found.text)].node)
    return dataclasses.replace(found, tree=tree)
