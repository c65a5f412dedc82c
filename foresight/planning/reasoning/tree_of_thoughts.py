"""Tree of Thoughts: Yao et al. 2023 (arXiv:2305.10601), algorithms 1 (breadth-first) and 2 (depth-first).

A state is the steps so far; G samples propose the next step, and V(s), the verifier, values each state. Breadth-first
keeps the b best states of a level. Depth-first follows the best first, gives up below a threshold, and returns.

The paper's 74% in the Game of 24 counts a puzzle as solved if any of its b final states is right; so `Answer` holds all
of them, and a report gives three figures: the first listed, any of b, and their mean. Without a verifier the model
values a state itself, as in the paper: the words sure, likely and impossible, asked for several times and summed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

from foresight.errors import UserError, unknown
from foresight.planning.reasoning.beam import Path, extend_each, identity, keep
from foresight.planning.reasoning.mind import STEP_TOKENS, Answer, Ask, Check, Problem, Steps, score
from foresight.planning.reasoning.tree import ThoughtTree

ORDERS = ("bfs", "dfs")
WORDS = {"impossible": 0.001, "likely": 1.0, "sure": 20.0}  # the paper's values
VALUE_TOKENS = 12
VALUE_PROMPT = (
    "{question}\n\nThe steps so far:\n{steps}\n\nCan the answer still be reached from here? "
    "Reply with one word: sure, likely or impossible."
)


def tree_of_thoughts(
    problem: Problem,
    order: str = "bfs",
    breadth: int = 5,
    samples: int = 8,
    steps: int = 8,
    step_tokens: int = STEP_TOKENS,
    threshold: float = 0.5,
    values: int = 3,
) -> Steps:
    """A search of depth `steps` with `samples` proposals a state.

    `bfs` keeps `breadth` states of a level. `dfs` gives up a state whose value is below `threshold`, and ends at the
    first answer, or state of the last depth, whose value is not. Without an answer both return the best of the deepest
    states. `values`: how often the model is asked for its own, if there is no verifier.
    """
    if order not in ORDERS:
        raise unknown("order", order, ORDERS)
    if min(breadth, samples, steps, values) < 1:
        raise UserError(f"breadth is {breadth}, samples {samples}, steps {steps}, values {values}: at least 1 each.")
    search = _breadth_first if order == "bfs" else _depth_first
    return (yield from search(problem, breadth, samples, steps, step_tokens, threshold, values))


def _breadth_first(
    problem: Problem, breadth: int, samples: int, steps: int, step_tokens: int, threshold: float, values: int
) -> Steps:
    tree, states, ended = problem.tree(), [Path()], list[Path]()
    for _ in range(steps):
        children = yield from _propose(problem, tree, states, samples, step_tokens, values)
        if not children:
            break
        kept = keep(tree, [*children, *ended], breadth, "last")
        ended = [path for path in kept if path.ended]
        states = [path for path in kept if not path.ended]
        if not states:
            break
    return _answer(tree, ended or states)


def _depth_first(
    problem: Problem, breadth: int, samples: int, steps: int, step_tokens: int, threshold: float, values: int
) -> Steps:
    tree, stack = problem.tree(), [(Path(), 0)]
    final, seen = list[Path](), list[Path]()
    while stack:
        state, depth = stack.pop()
        children = yield from _propose(problem, tree, [state], samples, step_tokens, values)
        order = keep(tree, children, breadth, "last")
        good = [path for path in order if path.scores[-1] >= threshold]
        tree.prune([path.node for path in order if path not in good])
        deepest = depth + 1 == steps
        final += [path for path in order if path.ended or (deepest and path in good)]
        seen += order
        if any(path.ended or deepest for path in good):
            break
        stack += [(path, depth + 1) for path in reversed(good)]
    if not final and seen:  # the budget ended, or every state was given up: the deepest that was not, and its value
        final = [max(seen, key=lambda path: (path.scores[-1] >= threshold, len(path.scores), path.scores[-1]))]
    return _answer(tree, keep(tree, final, max(1, len(final)), "last"))


def _answer(tree: ThoughtTree, ended: Sequence[Path]) -> Answer:
    """The final states, the best first."""
    if not ended:
        return Answer("", (), tree)
    tree.choose(ended[0].node)
    return Answer(ended[0].text, tuple((path.text, path.scores[-1] if path.scores else 0.0) for path in ended), tree)


def _propose(
    problem: Problem, tree: ThoughtTree, states: Sequence[Path], samples: int, step_tokens: int, values: int
) -> Generator[Ask | Check, Any, list[Path]]:
    """The different next states of all states, valued."""
    groups = yield from extend_each(problem, tree, states, samples, step_tokens, scored=False)
    unique: dict[Any, Path] = {}
    for path in (path for group in groups for path in group):
        unique.setdefault(identity(path), path)
    children = list(unique.values())
    valued = yield from value(problem, [path.text for path in children], values)
    for path, found in zip(children, valued, strict=True):
        tree.nodes[path.node].score = found
    return [dataclasses.replace(p, scores=(*p.scores, v)) for p, v in zip(children, valued, strict=True)]


def own_values(problem: Problem, texts: Sequence[str], times: int = 3) -> Generator[Ask | Check, Any, list[float]]:
    """The model's own value of each state: of its replies, the sum of `WORDS`. Needs a chat template."""
    prompts = [problem.message(VALUE_PROMPT.format(question=problem.example.question, steps=text)) for text in texts]
    if not prompts:
        return []
    replies = yield Ask(tuple(prompts), times, VALUE_TOKENS)
    return [sum(_word(thought.text) for thought in thoughts) for thoughts in replies]


def _word(text: str) -> float:
    return next((value for word, value in WORDS.items() if word in text.lower()), 0.0)


def value(problem: Problem, texts: Sequence[str], times: int = 3) -> Generator[Ask | Check, Any, list[float]]:
    """The verifier's score of each state or, without one, the model's own."""
    if problem.verified:
        return (yield from score(problem, texts))
    return (yield from own_values(problem, texts, times))
