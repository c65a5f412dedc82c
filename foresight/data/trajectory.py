"""`Trajectory`: the experience that algorithms train on, with leading dims `[B, T]`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Tree = Any  # a Tensor, or a dict of trees: an observation may have parts


def tree_map(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply `function` to every tensor of a tensor, a dict of trees or None."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: tree_map(function, value) for key, value in tree.items()}
    return function(tree)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Experience; step t holds the observation, the action, and the results *of* action t.

    Every scalar is `[B, T]`; features follow. Fields that an algorithm does not use are None.

    - `obs` `[B, T, ...]` (or a dict of such), `action` `[B, T, ...]`;
    - `reward`: of action t;
    - `discount`: the continuation *after* action t: 0 at termination, gamma otherwise
      (-gamma when the mover changes, 1 between tokens);
    - `cut`: 1 where step t+1 belongs to another episode, for any reason (a time limit too);
    - `mask`: 1 where the step is real (0: padding, or an autoreset step whose action was ignored);
    - `logprob`: log-probability of `action` under the policy that acted;
    - `value`, `next_value`: of `obs` and of its *true* successor (the final observation at a cut);
    - `extras`: anything else, `[B, T, ...]`.
    """

    obs: Tree
    action: Tensor
    reward: Tensor
    discount: Tensor
    cut: Tensor
    mask: Tensor | None = None
    logprob: Tensor | None = None
    value: Tensor | None = None
    next_value: Tensor | None = None
    extras: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """`(B, T)`."""
        return self.reward.shape[0], self.reward.shape[1]

    def replace(self, **fields: Any) -> Trajectory:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **fields)

    def map(self, function: Callable[[Tensor], Tensor]) -> Trajectory:
        """Apply `function` to every tensor."""
        return Trajectory(*[tree_map(function, getattr(self, name)) for name in _FIELDS])

    def flatten(self) -> Trajectory:
        """`[B, T, ...]` becomes `[B * T, 1, ...]`: single steps, for shuffled minibatches."""
        return self.map(lambda x: x.reshape(-1, 1, *x.shape[2:]))

    def minibatches(self, count: int, generator: torch.Generator | None = None) -> Iterator[Trajectory]:
        """Split the batch dim into `count` shuffled minibatches that together cover every row once.

        Raises ValueError if there are fewer rows than minibatches.
        """
        rows = self.reward.shape[0]
        if count > rows:
            raise ValueError(f"{count} minibatches need at least {count} rows, but the trajectory has {rows}.")
        order = torch.randperm(rows, generator=generator, device="cpu").to(self.reward.device)
        shuffled = self.map(lambda x: x.index_select(0, order))  # one gather per field; the parts below are views
        for start, stop in _bounds(rows, count):
            yield shuffled.map(lambda x, a=start, b=stop: x[a:b])  # type: ignore[misc]


_FIELDS = tuple(field.name for field in dataclasses.fields(Trajectory))


def _bounds(rows: int, count: int) -> list[tuple[int, int]]:
    edges = [round(i * rows / count) for i in range(count + 1)]
    return list(itertools.pairwise(edges))
