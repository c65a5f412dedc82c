"""Continuous batching: a row that ends gives its slot to the next row of the queue (Yu et al. 2022, Orca)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foresight.nets.language.model import LanguageModel
from foresight.planning.generation.cache_allocator import CacheAllocator
from foresight.planning.generation.prefix_cache import PrefixCache

FREE = 8  # prompts are read when 1 / FREE of the slots are free: reading few takes as long as reading many


class ContinuousBatchScheduler:
    """Which row of a batch each slot decodes. Rows are P · G, prompt by prompt; they start in that order."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        group: int,
        slots: int,
        max_new_tokens: int,
        kept: PrefixCache | None = None,
    ) -> None:
        self.model, self.group, self.total = model, group, len(prompts) * group
        self.growing = False
        count = min(slots, self.total)
        self.row = torch.full((count,), -1)  # the row in each slot; -1: free
        self.next = 0  # the first row of the queue
        merged = group == 1 or count == 1
        self.cache = CacheAllocator(model, prompts, count, max_new_tokens, merged, kept)

    def grow(self, slots: int) -> None:
        """Let rows be added while others are decoded, one for each prompt, in `slots` slots. Call it first.

        The room of a slot is then the `max_new_tokens` given, with its prompt.
        """
        self.growing, self.row = True, torch.full((slots,), -1)
        limit, prompts = self.cache.limit, self.cache.prompts
        self.cache = CacheAllocator(self.model, prompts, slots, limit - max(map(len, prompts)), merged=True)

    def add(self, prompt: Sequence[int]) -> None:
        """Add a row, after `grow`."""
        self.cache.prompts.append(list(prompt))
        self.total += 1

    @property
    def hidden(self) -> Tensor:
        """The last hidden state of each slot, `[slots, D]`."""
        return self.cache.hidden

    def live(self) -> Tensor:
        """The slots that have a row."""
        return (self.row >= 0).nonzero()[:, 0]

    def fill(self) -> bool:
        """Start rows of the queue in free slots, and read prompts when enough slots are free.

        Returns False when all rows have ended.
        """
        while self.next < self.total:
            for slot in self._free():
                if self.next == self.total or not self.cache.has(self.next // self.group):
                    break
                self.row[slot] = self.next
                self.cache.assign(slot, self.next // self.group)
                self.next += 1
            free = len(self._free())
            if self.next == self.total or FREE * free < len(self.row):
                break
            self.cache.read(self.next // self.group, -(-free // self.group), self.live())
        if self.next == self.total and not self.growing:
            self.drop()
        return bool((self.row >= 0).any())

    def keep(self, slot: int, completion: Sequence[int]) -> None:
        """Keep what was read of the row in a slot for later prompts, if there is a cache of prefixes."""
        self.cache.keep_row(slot, int(self.row[slot]) // self.group, completion)

    def free(self, slots: Tensor) -> None:
        """Free the slots of rows that ended."""
        self.row[slots] = -1
        self.cache.free(slots)

    def step(self, tokens: Tensor, slots: Tensor | None = None) -> None:
        """Decode the tokens just sampled, one for each live slot; or one for each of `slots`, while the others rest."""
        live = self.live() if slots is None else slots
        if len(live):
            self.cache.step(live, tokens)

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Read several tokens in one slot."""
        self.cache.extend(slot, tokens)

    def drop(self) -> None:
        """With an empty queue, remove free slots and unused prompts once that is worth the copy."""
        live = self.live()
        if len(live) > 0.75 * len(self.row):
            return
        self.cache.keep(live)
        self.row = self.row[live]

    def _free(self) -> list[int]:
        return (self.row < 0).nonzero()[:, 0].tolist()
