"""Graph of Thoughts: Besta et al. 2023 (arXiv:2308.09687), §3 and §5.1.

Operations over a graph of thoughts: *generate* k thoughts from one, *score* them, *keep* the best, *improve* one k
times, and *aggregate* several into one, which no tree can do. A `Plan` holds what the task contributes: how a question
is split, the prompts, and a score of each thought given the texts that it was made from, 0 being perfect.

`tree` is the same without aggregation: thoughts of the whole question, of which the best is improved level by level, as
the paper's Tree of Thoughts baseline; `direct` takes the first of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

from foresight.envs.text.task import Example
from foresight.errors import UserError
from foresight.planning.reasoning.mind import Answer, Ask, Check, Problem, Steps
from foresight.planning.reasoning.tree import ThoughtTree


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a task is thought about in parts. Texts are inputs and outputs of thoughts, without prompts.

    `error(given, text)` is the score of a thought: how wrong `text` is as the result of the inputs `given`; 0 is right.
    """

    split: Callable[[Example, int], list[str]]  # a question in so many parts
    solve: Callable[[str], str]  # the prompt that solves a part
    merge: Callable[[Sequence[str]], str]  # the prompt that merges solved parts
    improve: Callable[[str, str], str]  # the prompt that improves a result, given the input
    join: Callable[[Sequence[str]], str]  # the input that merged parts stand for
    error: Callable[[str, str], float]


@dataclasses.dataclass(frozen=True)
class Part:
    """A thought: the input it is the result of, its text, its error and its node."""

    given: str
    text: str
    error: float
    node: int


Parts = Generator[Ask | Check, Any, list[Part]]


def graph_of_thoughts(
    problem: Problem, plan: Plan, parts: int = 4, solve: int = 5, merge: int = 10, improve: int = 5
) -> Steps:
    """Split in `parts` (a power of 2), solve each `solve` times and keep the best, merge pairwise `merge` times.

    Every merged thought is improved `improve` times; the best of all is kept at each level. A question may be split in
    fewer parts, such as 3: one without a partner is merged at the next level.
    """
    if parts < 1 or parts & (parts - 1):
        raise UserError(f"parts is {parts}: it must be a power of 2, since parts are merged in pairs.")
    tree = problem.tree()
    inputs = plan.split(problem.example, parts)
    nodes = [tree.add(text, kind="part") for text in inputs]
    level = list[Part]()
    for text, node in zip(inputs, nodes, strict=True):
        found = yield from generate(problem, tree, plan, text, plan.solve(text), [node], solve)
        level += keep(tree, found)
    while len(level) > 1:
        merged = list[Part]()
        for left, right in zip(level[::2], level[1::2], strict=False):
            given, prompt = plan.join([left.given, right.given]), plan.merge([left.text, right.text])
            found = yield from generate(problem, tree, plan, given, prompt, [left.node, right.node], merge)
            best = keep(tree, found)
            if best:
                better = yield from generate(
                    problem, tree, plan, given, plan.improve(given, best[0].text), [best[0].node], improve
                )
                merged += keep(tree, [*best, *better])
        if not merged:
            break
        level = merged + level[len(level) // 2 * 2 :]  # of an odd number, the last waits for the next level
    return finish(tree, level)


def tree(problem: Problem, plan: Plan, solve: int = 20, improve: int = 20, levels: int = 3) -> Steps:
    """`solve` thoughts of the whole question, of which the best is improved `improve` times at each of `levels`."""
    grown = problem.tree()
    given = plan.split(problem.example, 1)[0]
    best = keep(grown, (yield from generate(problem, grown, plan, given, plan.solve(given), [0], solve)))
    for _ in range(levels if best else 0):
        found = yield from generate(
            problem, grown, plan, given, plan.improve(given, best[0].text), [best[0].node], improve
        )
        best = keep(grown, [*best, *found])
    return finish(grown, best)


def direct(problem: Problem, plan: Plan) -> Steps:
    """One thought."""
    grown = problem.tree()
    given = plan.split(problem.example, 1)[0]
    return finish(grown, (yield from generate(problem, grown, plan, given, plan.solve(given), [0], 1)))


def generate(
    problem: Problem, tree: ThoughtTree, plan: Plan, given: str, prompt: str, parents: Sequence[int], count: int
) -> Parts:
    """`count` replies to a prompt as thoughts below `parents`, scored."""
    replies = yield Ask((tuple(problem.mind.policy.encode(prompt)),), count)
    found = list[Part]()
    for thought in replies[0]:
        error = plan.error(given, thought.text)
        found.append(Part(given, thought.text, error, tree.add(thought.text, parents, score=-error)))
    return found


def keep(tree: ThoughtTree, parts: Sequence[Part], count: int = 1) -> list[Part]:
    """The `count` thoughts with the least error (ties: the first)."""
    order = sorted(parts, key=lambda part: part.error)
    tree.prune([part.node for part in order[count:]])
    return order[:count]


def finish(tree: ThoughtTree, parts: Sequence[Part]) -> Answer:
    """The first of the thoughts as the answer."""
    if not parts:
        return Answer("", (), tree)
    tree.choose(parts[0].node)
    return Answer(parts[0].text, tuple((part.text, -part.error) for part in parts), tree)
