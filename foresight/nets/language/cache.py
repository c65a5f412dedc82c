"""The KV cache of a token tree: levels of keys and values, in which the rows of one level share the rows above."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foresight.data.text import length_mask


@dataclasses.dataclass(frozen=True)
class RowMap:
    """How the rows of one level map to those of the next, where parents have unequally many children.

    `children` `[b, F]` are the child rows of each parent, padded with arbitrary ones; `index` `[B]` is the place of
    each child in the flattened `children`.
    """

    children: Tensor
    index: Tensor

    @property
    def parents(self) -> Tensor:
        """The parent `[B]` of each child."""
        return self.index // self.children.shape[1]

    @staticmethod
    def of(owner: Tensor, rows: int) -> RowMap | None:
        """The map of children with the parents `owner` `[B]`, out of `rows` parents.

        None if every parent has equally many children, in order: whole groups, for which a reshape is enough.
        """
        even = torch.arange(rows, device=owner.device).repeat_interleave(max(1, len(owner) // rows))
        if torch.equal(owner, even):
            return None
        order = owner.argsort(stable=True)
        counts = owner.bincount(minlength=rows)
        rank = torch.empty_like(owner)
        rank[order] = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner[order]]
        fan = int(counts.max())
        index = owner * fan + rank
        return RowMap(
            owner.new_zeros(rows * fan)
            .scatter(0, index, torch.arange(len(owner), device=owner.device))
            .view(rows, fan),
            index,
        )


@dataclasses.dataclass
class Level:
    """Keys and values of one level of the token tree: `[B, KV heads, T, D]` a layer; `blocked` `[B, T]` or None.

    Each row has equally many rows of the next level, in order, unless there is a `row_map`.
    """

    keys: list[Tensor]
    values: list[Tensor]
    blocked: Tensor | None = None  # true on padding
    row_map: RowMap | None = None


class Reach(NamedTuple):
    """What the B rows of a decoding step attend to in the levels of the cache, of which the last is their own.

    In each of the L levels, the first `counts` `[B, L]` tokens of the row `parents` `[B, L]`: on average `shared`
    tokens of rows to which others attend too, and `own` others.
    """

    parents: Tensor
    counts: Tensor
    shared: float
    own: float


@dataclasses.dataclass
class Cache:
    """The levels that the next tokens attend to, from the shared prefix to the longest rows.

    `positions` `[B]` is the position of the next token of each row of the last level.
    """

    levels: list[Level]
    positions: Tensor

    def expand(self, group: int) -> Cache:
        """The same cache for a next level with `group` rows under each row, without a copy."""
        return Cache(self.levels, self.positions.repeat_interleave(group))


class Prefill:
    """The cache seen by a level whose tokens are all given: its keys and values are kept for the level below."""

    blocked = None

    def __init__(self, levels: list[Level], layers: int) -> None:
        self.levels = levels
        self.keys: list[Any] = [None] * layers
        self.values: list[Any] = [None] * layers

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values `[B, KV, T, D]` of a layer; returns those of this level to attend to."""
        self.keys[layer], self.values[layer] = key, value
        return key, value


class DecodeStep:
    """The cache seen by a decoding step: each row writes one token into its buffer, at its own `places` `[B]`."""

    def __init__(self, levels: list[Level], level: Level, places: Tensor) -> None:
        self.levels, self.level, self.places = levels, level, places
        self.stop = int(places.max()) + 1
        ahead = torch.arange(self.stop, device=places.device) > places[:, None]
        aligned = not bool(ahead.any())  # all rows are equally long: a slice, which is cheaper than an index
        self.blocked = None if aligned else ahead
        self.at: tuple[slice | Tensor, slice, int | Tensor] = (
            (slice(None), slice(None), self.stop - 1)
            if aligned
            else (torch.arange(len(places), device=places.device), slice(None), places)
        )

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As `Prefill.update`."""
        keys, values = self.level.keys[layer], self.level.values[layer]
        keys[self.at], values[self.at] = key[:, :, 0].to(keys.dtype), value[:, :, 0].to(values.dtype)
        return keys[:, :, : self.stop], values[:, :, : self.stop]

    @functools.cached_property
    def reach(self) -> Reach | None:
        """What each row attends to; None if a level is padded elsewhere than at the end of its rows."""
        return _reach(self)


class Extension:
    """The cache seen by several tokens written from `place` on: what the buffer holds before them is a level above."""

    blocked = None

    def __init__(self, above: list[Level], level: Level, place: int) -> None:
        self.above, self.level, self.place = above, level, place

    @functools.cached_property
    def levels(self) -> list[Level]:
        """The levels `above`, and what the buffer holds before `place`."""
        keys, values = ([x[:, :, : self.place] for x in xs] for xs in (self.level.keys, self.level.values))
        before = Level(keys, values)
        return [*self.above, before] if self.place else self.above

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As `Prefill.update`."""
        keys, values, stop = self.level.keys[layer], self.level.values[layer], self.place + key.shape[2]
        keys[:, :, self.place : stop], values[:, :, self.place : stop] = key, value
        return key, value


def _reach(step: DecodeStep) -> Reach | None:
    rows = torch.arange(len(step.places))
    parents, counts, shared = list[Tensor](), list[Tensor](), 0.0
    for level in step.levels:
        held, width = len(level.keys[0]), level.keys[0].shape[2]
        parent = rows // (len(rows) // held) if level.row_map is None else level.row_map.parents
        count = torch.full((held,), width)
        if level.blocked is not None:
            count = width - level.blocked.sum(1)
            if not torch.equal(level.blocked, ~length_mask(count, width)):
                return None
        parents.append(parent)
        counts.append(count[parent])
        shared += counts[-1].float().mean().item() if held < len(rows) else 0.0
    together = torch.stack([*counts, step.places + 1], 1)
    return Reach(torch.stack([*parents, rows], 1), together, shared, together.sum(1).float().mean().item() - shared)
