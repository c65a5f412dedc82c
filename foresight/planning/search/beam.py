"""Beam search: of all continuations of the best partial plans, keep the best, a depth at a time.

Batched over B roots with the rows of one state: a tree of tensors of which row i belongs to candidate i. The caller
defines a continuation: in the Trajectory Transformer, the model's predictions of actions, rewards and observations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


def search(
    root: State,
    batch: int,
    propose: Callable[[State, int], tuple[State, Tensor]],
    observe: Callable[[State], State],
    select: Callable[[State, Tensor], State],
    width: int,
    branches: int,
    depth: int,
    device: str | torch.device = "cpu",
) -> State:
    """The best of the beam after `depth` rounds, for each of `batch` roots: a state of `batch` rows.

    - `propose(state, t)`: each of M rows continued at random by a decision and its consequences; also the scores `[M]`,
      which are of the whole candidate and the higher the better;
    - `observe(state)`: what follows a kept candidate, up to the next decision;
    - `select(state, rows)`: row i of the result is row `rows[i]`.

    In every round each of the `width` candidates of a root has `branches` continuations, of which the `width` best
    remain. With `branches` 1 nothing is pruned: the best of `width` sampled rollouts. Source: Reddy 1977; Janner et al.
    2021 (arXiv:2106.02039), algorithm 1.
    """
    roots = torch.arange(batch, device=device)
    state = select(root, roots.repeat_interleave(width * branches))
    first = roots[:, None] * width * branches
    for t in range(depth):
        state, score = propose(state, t)
        kept = score.view(batch, -1).topk(width if t < depth - 1 else 1, 1).indices
        state = select(state, (first + kept).flatten())
        if t < depth - 1:
            state = observe(state)
            state = select(state, torch.arange(batch * width, device=device).repeat_interleave(branches))
    return state
