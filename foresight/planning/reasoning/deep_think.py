"""Deep think: parallel hypotheses, a critique of each, a revision, and a vote.

Not from one paper: its parts are self-consistency (Wang et al. 2022, arXiv:2203.11171), critique and revision (Self-
Refine, Madaan et al. 2023, arXiv:2303.17651) and weighted votes (Li et al. 2022, arXiv:2206.02336). With a verifier the
critique is exact: the first step whose score is below a threshold; the revision samples again from the step before it.
Without one the model is asked in words. Models that check themselves without any signal from outside often become worse
(Huang et al. 2023, arXiv:2310.01798), so compare it with a plain vote at the same budget.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Generator, Sequence
from typing import Any

from foresight.errors import UserError
from foresight.planning.reasoning.budget_forcing import cut
from foresight.planning.reasoning.mind import Ask, Check, Problem, Steps, samples, score
from foresight.planning.reasoning.voting import elect

CRITIQUE = (
    "{question}\n\nA proposed answer:\n{answer}\n\n"
    "Find the first mistake in it, in one sentence. If there is none, write: correct."
)
APPROVED = re.compile(r"\W*correct\b", re.IGNORECASE)  # a critique that finds no mistake, as it is asked for
REVISE = "{question}\n\nA proposed answer:\n{answer}\n\nA critique of it:\n{critique}\n\nWrite the corrected answer."


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A completion: its ids and text, its score, and its node in the tree."""

    tokens: tuple[int, ...]
    text: str
    score: float
    node: int


def deep_think(problem: Problem, n: int = 8, rounds: int = 2, threshold: float = 0.5) -> Steps:
    """`n` hypotheses, each criticized and revised in up to `rounds` rounds, and a vote weighted by their scores.

    Hypotheses whose every step scores at least `threshold` are not revised. Raises UserError without a verifier if the
    model has no chat template.
    """
    if n < 1 or rounds < 0:
        raise UserError(f"n is {n} and rounds {rounds}: at least 1 and 0.")
    if not problem.verified:
        problem.message("")  # raises: there is no template
    tree = problem.tree()
    found = yield from samples(problem, n)
    nodes = [tree.add(thought.text, kind="answer") for thought in found]
    hypotheses = [Hypothesis(t.tokens, t.text, 0.0, node) for t, node in zip(found, nodes, strict=True)]
    revise = _revise_checked if problem.verified else _revise_in_words
    for turn in range(rounds + 1):
        hypotheses, again = yield from revise(problem, tree, hypotheses, threshold, turn < rounds)
        if not again:
            break
    for hypothesis in hypotheses:
        tree.nodes[hypothesis.node].score = hypothesis.score
    texts = [hypothesis.text for hypothesis in hypotheses]
    answer = elect(problem, problem.tree(), texts, [hypothesis.score for hypothesis in hypotheses])
    if answer.text in texts:
        tree.choose(hypotheses[texts.index(answer.text)].node)
    return dataclasses.replace(answer, tree=tree)


Revised = Generator[Ask | Check, Any, tuple[list[Hypothesis], bool]]


def _revise_checked(
    problem: Problem, tree: Any, hypotheses: Sequence[Hypothesis], threshold: float, again: bool
) -> Revised:
    """Score every step; sample again from before the first one below the threshold."""
    partial = [_prefixes(hypothesis.text, problem.delimiter) for hypothesis in hypotheses]
    flat = yield from score(problem, [text for texts in partial for text in texts])
    scores, position, wrong = list[list[float]](), 0, list[tuple[int, int]]()
    for i, texts in enumerate(partial):
        scores.append(flat[position : position + len(texts)])
        position += len(texts)
        if bad := [k for k, value in enumerate(scores[-1]) if value < threshold]:
            wrong.append((i, bad[0]))
    revised = [dataclasses.replace(h, score=values[-1]) for h, values in zip(hypotheses, scores, strict=True)]
    if not wrong or not again:
        return revised, False
    policy = problem.mind.policy
    starts = [cut(policy, hypotheses[i].tokens, partial[i][k - 1] if k else "") for i, k in wrong]
    replies = yield Ask(tuple(problem.prompt + start for start in starts), 1)
    for (i, _), start, thoughts in zip(wrong, starts, replies, strict=True):
        for thought in thoughts:
            tokens = start + thought.tokens
            node = tree.add(thought.text, (hypotheses[i].node,), "revision")
            revised[i] = Hypothesis(tokens, policy.decode(tokens), 0.0, node)
    return revised, any(replies)


def _revise_in_words(
    problem: Problem, tree: Any, hypotheses: Sequence[Hypothesis], threshold: float, again: bool
) -> Revised:
    """Ask the model for a critique of each hypothesis, and for a better answer where it finds a mistake."""
    if not again or not hypotheses:
        return [dataclasses.replace(h, score=h.score or 1.0) for h in hypotheses], False
    question = problem.example.question
    asked = [problem.message(CRITIQUE.format(question=question, answer=h.text)) for h in hypotheses]
    critiques = yield Ask(tuple(asked), 1)
    revised, wrong = list(hypotheses), list[tuple[int, str, int]]()
    for i, (hypothesis, thoughts) in enumerate(zip(hypotheses, critiques, strict=True)):
        if not thoughts:  # the budget does not pay for a critique: it stays as it is
            continue
        text = thoughts[0].text
        node = tree.add(text, (hypothesis.node,), "critique")
        if APPROVED.match(text):
            revised[i] = dataclasses.replace(hypothesis, score=1.0)
        else:
            wrong.append((i, text, node))
    if not wrong:
        return revised, False
    prompts = [
        problem.message(REVISE.format(question=question, answer=hypotheses[i].text, critique=text))
        for i, text, _ in wrong
    ]
    replies = yield Ask(tuple(prompts), 1)
    for (i, _, node), thoughts in zip(wrong, replies, strict=True):
        for thought in thoughts:
            revised[i] = Hypothesis(thought.tokens, thought.text, 0.0, tree.add(thought.text, (node,), "revision"))
    if not any(replies) and not any(hypothesis.score for hypothesis in revised):  # none is better: a plain vote
        revised = [dataclasses.replace(hypothesis, score=1.0) for hypothesis in revised]
    return revised, any(replies)


def _prefixes(text: str, delimiter: str) -> list[str]:
    """The text up to and including each of its steps."""
    ends = [i + len(delimiter) for i in range(len(text)) if text.startswith(delimiter, i)]
    return [text[:end] for end in ends if end < len(text)] + [text]
