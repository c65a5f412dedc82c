"""A cache of prefixes: keys and values of what was read or sampled, for prompts that begin with it.

As RadixAttention (Zheng et al. 2024, arXiv:2312.07104, section 3), with segments that end where a request ended: a tree
of thoughts continues whole thoughts. The cache is for one state of the weights: make a new one after an update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foresight.nets.language.cache import Level

LIMIT = 2**29  # bytes
Kept = list[Tensor]  # keys `[KV, T, D]` of all layers, then values: some models have other sizes in each


class PrefixCache:
    """Segments of tokens by all ids up to their last one. What does not fit into `limit` bytes is not kept."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.used = limit, 0
        # By ids: the place of the first token, and what is kept of it and those after it.
        self.segments: dict[tuple[int, ...], tuple[int, Kept]] = {}
        self.lengths: set[int] = set()

    def known(self, ids: Sequence[int]) -> int:
        """Length of the longest kept prefix of `ids`; 0 if there is none."""
        fitting = sorted((n for n in self.lengths if n <= len(ids)), reverse=True)
        return next((n for n in fitting if tuple(ids[:n]) in self.segments), 0)

    def add(self, ids: Sequence[int], start: int, level: Level, row: int, first: int = 0) -> None:
        """Keep the tokens from `start` on, which are those from `first` on of a row of the level.

        `ids[:start]` must be kept already, or `start` 0; else nothing is.
        """
        key, stop = tuple(ids), first + len(ids) - start
        if start >= len(ids) or key in self.segments or (start and key[:start] not in self.segments):
            return
        parts = [x[row, :, first:stop] for x in (*level.keys, *level.values)]
        size = sum(part.numel() * part.element_size() for part in parts)
        if self.used + size > self.limit:
            return
        self.used += size
        self.segments[key] = start, [part.clone() for part in parts]
        self.lengths.add(len(key))

    def read(self, ids: Sequence[int], first: int = 0) -> Kept:
        """What is kept of the prefix `ids` from the token `first` on."""
        parts, stop = list[Kept](), len(ids)
        while stop > first:
            start, segment = self.segments[tuple(ids[:stop])]
            parts.append([x[:, max(0, first - start) :] for x in segment])
            stop = start
        return [torch.cat(of_one, 1) for of_one in zip(*parts[::-1], strict=True)]

    def clear(self) -> None:
        """Forget everything."""
        self.segments.clear()
        self.lengths.clear()
        self.used = 0


def level_of(rows: Sequence[Kept | None], like: Kept) -> Level:
    """Rows of kept tokens (None: no token), with the shapes of `like`, as a level, right-padded to the longest."""
    widths = [0 if row is None else row[0].shape[1] for row in rows]
    packed = [x.new_zeros(len(rows), x.shape[0], max(widths), x.shape[2]) for x in like]
    blocked = torch.ones(len(rows), max(widths), dtype=torch.bool, device=like[0].device)
    for place, row in enumerate(rows):
        if row is not None:
            for whole, one in zip(packed, row, strict=True):
                whole[place, :, : widths[place]] = one
            blocked[place, : widths[place]] = False
    layers = len(packed) // 2
    return Level(packed[:layers], packed[layers:], blocked if bool(blocked.any()) else None)
