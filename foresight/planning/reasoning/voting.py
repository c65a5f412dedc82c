"""Votes over independent samples: self-consistency and best-of-N.

Self-consistency (Wang et al. 2022, arXiv:2203.11171, §2) takes the most frequent answer; weighted by a verifier (Li et
al. 2022, arXiv:2206.02336, eq. 2) it takes argmax_a Σ_i s_i 1[a_i = a]. It may stop early once the rest of the samples
cannot change the winner, or are unlikely to (Aggarwal et al. 2023, arXiv:2305.11860, eq. 1). Best-of-N (Cobbe et al.
2021, arXiv:2110.14168, §4) takes the sample with the highest score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foresight.errors import UserError
from foresight.planning.reasoning.mind import Answer, Problem, Steps, Thought, samples, score
from foresight.planning.reasoning.tree import ThoughtTree

ROUND = 4  # samples between tests for an early stop


def tally(answers: Sequence[str], weights: Sequence[float] | None = None) -> list[tuple[str, float]]:
    """Answers with the sum of their weights (None: 1 each), the most first; ties: the first to appear.

    An empty answer has no vote.
    """
    found: dict[str, float] = {}
    for answer, weight in zip(answers, [1.0] * len(answers) if weights is None else weights, strict=True):
        if answer:
            found[answer] = found.get(answer, 0.0) + weight
    return sorted(found.items(), key=lambda pair: -pair[1])


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that k of the samples, drawn without replacement, hold a right one: 1 − C(n−c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1).
    """
    if not 1 <= k <= samples:
        raise UserError(f"k is {k}: it must be from 1 to the number of samples, which is {samples}.")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def self_consistency(
    problem: Problem, n: int = 64, weighted: bool = False, early: float = 0.0, temperature: float | None = None
) -> Steps:
    """The answer with the most votes of `n` samples; `weighted`: by the verifier's score of each.

    With `early` above 0 (0.95 in the paper), samples are drawn in rounds until the leader is a majority with that
    posterior probability, or cannot be reached any more. Raises UserError for an `n` or `early` out of range.
    """
    _check(n)
    if not 0 <= early <= 1:
        raise UserError(f"early is {early}: it must be a probability, from 0 (never) to 1 (only when it is certain).")
    tree, found, scores = problem.tree(), list[Thought](), list[float]()
    while len(found) < n:
        size = min(ROUND, n - len(found)) if early else n - len(found)
        more = yield from samples(problem, size, temperature=temperature)
        if not more:
            break
        found += more
        if weighted:
            scores += yield from score(problem, [thought.text for thought in more])
        votes = tally([problem.key(thought.text) for thought in found], scores if weighted else None)
        if early and _decided(votes, n - len(found), early):
            break
    return elect(problem, tree, [thought.text for thought in found], scores if weighted else None)


def best_of_n(problem: Problem, n: int = 64, temperature: float | None = None) -> Steps:
    """The sample with the highest score of the verifier; ties: the first. Raises UserError for an `n` below 1."""
    _check(n)
    tree = problem.tree()
    found = yield from samples(problem, n, temperature=temperature)
    texts = [thought.text for thought in found]
    scores = yield from score(problem, texts)
    return best(tree, texts, scores)


def greedy(problem: Problem) -> Steps:
    """One sample at temperature 0: what every method is compared with."""
    tree = problem.tree()
    found = yield from samples(problem, 1, temperature=0.0)
    return best(tree, [thought.text for thought in found], [0.0])


def elect(problem: Problem, tree: ThoughtTree, texts: Sequence[str], weights: Sequence[float] | None) -> Answer:
    """The vote over completions: the best completion (the first, without weights) of the answer with most votes."""
    keys = [problem.key(text) for text in texts]
    each = [1.0] * len(texts) if weights is None else list(weights)
    nodes = [tree.add(text, kind="answer", score=weight) for text, weight in zip(texts, each, strict=True)]
    votes = tally(keys, weights)
    if not votes:
        return Answer(texts[0] if texts else "", (), tree)
    winner = max((i for i, key in enumerate(keys) if key == votes[0][0]), key=lambda i: (each[i], -i))
    tree.choose(nodes[winner])
    firsts = {key: text for key, text in reversed(list(zip(keys, texts, strict=True)))}
    candidates = tuple((firsts[key], weight) for key, weight in votes)
    return Answer(texts[winner], candidates, tree)


def best(tree: ThoughtTree, texts: Sequence[str], scores: Sequence[float]) -> Answer:
    """The completion with the highest score."""
    nodes = [tree.add(text, kind="answer", score=s) for text, s in zip(texts, scores, strict=False)]
    order = sorted(range(len(nodes)), key=lambda i: -scores[i])
    if not order:
        return Answer("", (), tree)
    tree.choose(nodes[order[0]])
    return Answer(texts[order[0]], tuple((texts[i], scores[i]) for i in order), tree)


def _check(n: int) -> None:
    if n < 1:
        raise UserError(f"n is {n}: it must be at least 1.")


def _decided(votes: Sequence[tuple[str, float]], left: int, confidence: float) -> bool:
    """Whether the leader cannot lose any more, or leads the second with a Beta posterior above `confidence`."""
    if not votes:
        return False
    first, second = votes[0][1], votes[1][1] if len(votes) > 1 else 0.0
    if first - second > left:
        return True
    a, b = int(first) + 1, int(second) + 1  # P(p > 1/2) under Beta(a, b) is a binomial tail
    total = a + b - 1
    below = sum(math.comb(total, k) for k in range(a)) / 2**total
    return below > confidence
