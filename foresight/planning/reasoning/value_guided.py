"""Value-guided decoding: a critic or a reward model chooses each block of tokens while an answer is written.

Blockwise best-of-K (Mudgal et al. 2023, arXiv:2310.17022, §3.2): sample K continuations of a few tokens, score the text
with each, and keep one, drawn from softmax(score / τ); τ = 0 keeps the best. With blocks of one token, the critic is
asked at every token. The score is that of any verifier: the multi-token critic's value, or a reward model's.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from foresight.errors import UserError
from foresight.planning.reasoning.beam import Path, after, extend_each, identity, last
from foresight.planning.reasoning.mind import Answer, Ask, Problem, Steps, score


def value_guided(problem: Problem, samples: int = 8, block: int = 8, tau: float = 0.0) -> Steps:
    """One answer, of blocks of `block` tokens (0: steps of the task), each the choice of `samples` by their scores."""
    if samples < 1 or block < 0 or tau < 0:
        raise UserError(f"samples is {samples}, block {block} and tau {tau}: at least 1, 0 and 0.")
    tree, path, limit = problem.tree(), Path(), problem.mind.max_new_tokens
    while not path.ended and len(path.tokens) < limit:
        size = min(block or limit, limit - len(path.tokens))
        if block == 0:
            children = (yield from extend_each(problem, tree, [path], samples, size))[0]
        else:
            children = []
            replies = yield Ask((problem.prompt + path.tokens,), samples, size)
            paths = (after(problem, path, thought) for thought in replies[0])
            unique = {identity(one): one for one in paths}.values()
            scores = yield from score(problem, [one.text for one in unique])
            for one, found in zip(unique, scores, strict=True):
                node = tree.add(last(path.text, one.text), (path.node,), "answer" if one.ended else "thought", found)
                children.append(dataclasses.replace(one, scores=(*path.scores, found), node=node))
        if not children:
            break
        chosen = _draw([child.scores[-1] for child in children], tau, problem.mind.generator)
        tree.prune([child.node for i, child in enumerate(children) if i != chosen])
        path = children[chosen]
    tree.choose(path.node)
    return Answer(path.text, ((path.text, path.scores[-1] if path.scores else 0.0),), tree)


def _draw(scores: list[float], tau: float, generator: torch.Generator) -> int:
    if tau == 0:
        return max(range(len(scores)), key=lambda i: scores[i])
    top = max(scores)
    weights = torch.tensor([math.exp((score - top) / tau) for score in scores])
    return int(torch.multinomial(weights, 1, generator=generator))
