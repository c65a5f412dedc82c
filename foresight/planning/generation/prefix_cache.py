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


class PrefixCache:
    """Segments of tokens by all ids up to their last one. What does not fit into `limit` bytes is not kept."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.used = limit, 0
        # By ids: the place of the first token, and keys and values `[2, L, KV, T, D]`.
        self.segments: dict[tuple[int, ...], tuple[int, Tensor]] = {}
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
        parts = [[x[row, :, first:stop] for x in buffers] for buffers in (level.keys, level.values)]
        size = 2 * len(parts[0]) * parts[0][0].numel() * parts[0][0].element_size()
        if self.used + size > self.limit:
            return
        self.used += size
        self.segments[key] = start, torch.stack([torch.stack(part) for part in parts])
        self.lengths.add(len(key))

    def read(self, ids: Sequence[int], first: int = 0) -> Tensor:
        """Keys and values `[2, L, KV, T, D]` of the kept prefix `ids` from the token `first` on."""
        parts, stop = list[Tensor](), len(ids)
        while stop > first:
            start, segment = self.segments[tuple(ids[:stop])]
            parts.append(segment[..., max(0, first - start) :, :])
            stop = start
        return torch.cat(parts[::-1], -2)

    def clear(self) -> None:
        """Forget everything."""
        self.segments.clear()
        self.lengths.clear()
        self.used = 0


def level_of(rows: Sequence[Tensor | None], like: Tensor) -> Level:
    """Rows of kept tokens `[2, L, KV, T, D]` (None: no token) as a level, right-padded to the longest."""
    width = max(row.shape[-2] for row in rows if row is not None)
    packed = like.new_zeros(*like.shape[:2], len(rows), like.shape[2], width, like.shape[4])
    blocked = torch.ones(len(rows), width, dtype=torch.bool, device=like.device)
    for place, row in enumerate(rows):
        if row is not None:
            packed[:, :, place, :, : row.shape[-2]] = row
            blocked[place, : row.shape[-2]] = False
    return Level(list(packed[0]), list(packed[1]), blocked if bool(blocked.any()) else None)
