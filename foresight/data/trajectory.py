"""`Trajectory`: the experience that algorithms train on, with leading dims `[B, T]`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

Tree = Any  # a Tensor, or a dict of trees: an observation may have parts
Same = TypeVar("Same")  # a Tree, and the result has its structure


def tree_map(function: Callable[[Tensor], Tensor], tree: Same) -> Same:
    """Apply `function` to every tensor of a tensor, a dict of trees or None."""
    if tree is None:
        return tree
    if isinstance(tree, dict):
        return {key: tree_map(function, value) for key, value in tree.items()}  # type: ignore[return-value]  # a dict too
    return function(tree)  # type: ignore[arg-type, return-value]  # neither None nor a dict: a tensor


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

    def replace(self, **fields: Tree) -> Trajectory:
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
        for start, stop in itertools.pairwise(batch_edges(rows, count)):
            yield shuffled.map(_part(start, stop))


_FIELDS = tuple(field.name for field in dataclasses.fields(Trajectory))


def _part(start: int, stop: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[start:stop]


def batch_edges(rows: int, count: int) -> list[int]:
    """Where `count` minibatches of `rows` rows begin, and where the last one ends."""
    return [round(i * rows / count) for i in range(count + 1)]
