"""PUCT over thoughts: a thought tree is a search tree, so the search is that of `planning.search.mcts`.

An action is one of A sampled next steps; the prior is softmax of their log-probabilities, the value is the verifier's
score, and an ended answer is a terminal state whose reward is its score (as in RAP, Hao et al. 2023, arXiv:2305.14992,
with the rule of AlphaZero). All questions are searched at once: a simulation is one batch of proposals, and of scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.planning.reasoning.beam import Path, after, identity, last
from foresight.planning.reasoning.mind import (
    STEP_TOKENS,
    Answer,
    Ask,
    Charge,
    Check,
    Mind,
    Problem,
    Result,
)
from foresight.planning.reasoning.tree import ThoughtTree
from foresight.planning.search.mcts import PUCT, search


@dataclasses.dataclass
class _State:
    """A node of one question: its path, the paths of its actions, and their nodes once they are visited."""

    path: Path
    actions: list[Path]
    children: dict[int, int]


class Thoughts:
    """The thoughts of B questions as a search `Model`; a state is the index of a node, int64 `[B]`."""

    def __init__(
        self, mind: Mind, problems: Sequence[Problem], budget: int | None, actions: int, step_tokens: int
    ) -> None:
        self.mind, self.problems, self.budget = mind, problems, budget
        self.actions, self.step_tokens = actions, min(step_tokens, mind.max_new_tokens)
        self.charges = [Charge() for _ in problems]
        self.trees: list[ThoughtTree] = [problem.tree() for problem in problems]
        self.nodes: list[list[_State]] = [[] for _ in problems]

    def root(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The proposals for each question `obs` `[B]`. The value of a question is not known: 0."""
        rows = obs.tolist()
        logits = self._expand({b: Path() for b in rows})
        return logits, torch.zeros(len(rows)), torch.zeros(len(rows), dtype=torch.int64)

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The proposals and the value after one more step; an ended answer is terminal, with its score as reward."""
        rows = list(zip(state.tolist(), action.tolist(), strict=True))
        fresh: dict[int, Path] = {}
        after = torch.zeros(len(rows), dtype=torch.int64)
        for b, (node, a) in enumerate(rows):
            at = self.nodes[b][node]
            if a not in at.children and a < len(at.actions):
                fresh[b] = at.actions[a]
        scores = self.serve({b: Check((path.text,)) for b, path in fresh.items()})
        for b, path in fresh.items():
            kind, before = "answer" if path.ended else "thought", self.nodes[b][rows[b][0]].path.text
            path = dataclasses.replace(
                path,
                scores=(*path.scores, scores[b][0]),
                node=self.trees[b].add(last(before, path.text), (path.node,), kind, scores[b][0]),
            )  # fmt: skip
            fresh[b] = path
            self.nodes[b][rows[b][0]].children[rows[b][1]] = len(self.nodes[b])
        logits = torch.full((len(rows), self.actions), -torch.inf)
        found = self._expand(fresh)
        for row, b in enumerate(fresh):
            logits[b] = found[row]
        reward, discount, value = (torch.zeros(len(rows)) for _ in range(3))
        for b, (node, a) in enumerate(rows):
            after[b] = self.nodes[b][node].children.get(a, node)
            there = self.nodes[b][int(after[b])]
            score = there.path.scores[-1] if there.path.scores else 0.0
            if there.path.ended or not there.actions:
                reward[b] = score if there.path.ended else 0.0
            else:
                discount[b], value[b] = 1.0, score
        return after, reward, discount, logits, value

    def _expand(self, paths: dict[int, Path]) -> Tensor:
        """Sample the actions of new nodes; their prior logits `[len(paths), A]`, -inf where there are fewer."""
        live = {b: path for b, path in paths.items() if not path.ended}
        asks = {
            b: Ask((p.prompt + path.tokens,), self.actions, self.step_tokens, (p.delimiter,))
            for b, path in live.items()
            for p in (self.problems[b],)
        }  # fmt: skip
        replies = self.serve(asks)
        logits = torch.full((len(paths), self.actions), -torch.inf)
        for row, (b, path) in enumerate(paths.items()):
            found = [
                dataclasses.replace(after(self.problems[b], path, thought), logprob=thought.logprob)
                for thought in (replies[b][0] if b in replies else ())
            ]  # fmt: skip
            actions = list({identity(one): one for one in found}.values())
            logits[row, : len(actions)] = torch.tensor([action.logprob for action in actions])
            self.nodes[b].append(_State(path, actions, {}))
        return logits

    def serve(self, requests: dict[int, Any]) -> dict[int, Any]:
        """The mind's reply to the request of each question, charged to it."""
        return self.mind.serve(self.problems, requests, self.charges, self.budget) if requests else {}


def puct(
    mind: Mind,
    task: TextTask,
    examples: Sequence[Example],
    budget: int | None = None,
    simulations: int = 32,
    actions: int = 4,
    step_tokens: int = STEP_TOKENS,
    c_init: float = 1.25,
) -> list[Result]:
    """`simulations` of PUCT for each question, with `actions` sampled steps a node: the answer with the best score.

    Where no answer ended, the deepest path is continued to one with the rest of the budget; of several, the one with
    the best score. Raises UserError as `Mind.think` does.
    """
    if actions < 1 or simulations < 1:
        raise UserError(f"actions is {actions} and simulations {simulations}: both must be at least 1.")
    problems = mind.problems(task, examples, budget)
    model = Thoughts(mind, problems, budget, actions, step_tokens)
    rule = PUCT(c_init=c_init, normalize="none", first_play="zero")  # scores are in [0, 1] already
    search(model, torch.arange(len(problems)), simulations, rule)
    ended = [
        sorted((s.path for s in nodes if s.path.ended), key=lambda path: -path.scores[-1]) for nodes in model.nodes
    ]
    open_ends = {b: _deepest(model.nodes[b]) for b, paths in enumerate(ended) if not paths}
    rest = [mind.max_new_tokens if budget is None else budget - charge.sampled_tokens for charge in model.charges]
    asks = {
        b: Ask((problems[b].prompt + path.tokens,), 1, min(mind.max_new_tokens, rest[b]))
        for b, path in open_ends.items()
    }
    replies = model.serve(asks)
    for b, path in open_ends.items():
        whole = after(problems[b], path, replies[b][0][0]) if replies[b][0] else path
        ended[b] = [dataclasses.replace(whole, node=model.trees[b].add(whole.text, (path.node,), "answer"))]
    results = list[Result]()
    for b, paths in enumerate(ended):
        model.trees[b].choose(paths[0].node)
        candidates = tuple((path.text, path.scores[-1] if path.scores else 0.0) for path in paths)
        results.append(Result(Answer(paths[0].text, candidates, model.trees[b]), model.charges[b]))
    mind.kept.clear()
    mind.total = sum(model.charges, mind.total)
    return results


def _deepest(nodes: Sequence[_State]) -> Path:
    """The deepest path, of several the one whose last score is the best."""
    return max((node.path for node in nodes), key=lambda path: (len(path.scores), path.scores[-1:] or (0.0,)))
