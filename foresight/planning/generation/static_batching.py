"""Static batching, for models that cannot share prefixes: each row is computed as in transformers.

See `nets.language.architecture` for which models these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foresight.nets.language.model import LanguageModel


class StaticBatchScheduler:
    """Which row each slot decodes, as in `ContinuousBatchScheduler`; a new batch starts when all rows have ended.

    If the model's own KV cache is exact, a batch has rows with equally long prompts, and a token costs one step.
    Otherwise a batch has any rows, and each row is recomputed from its start for every token.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Sequence[int]], group: int, slots: int) -> None:
        self.model, self.prompts, self.group, self.slots = model, prompts, group, slots
        order = sorted(range(len(prompts)), key=lambda p: len(prompts[p]))
        self.queue = [p * group + g for p in order for g in range(group)]
        self.row, self.hidden = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        self.texts: list[list[int]] = []
        self.cache: Any = None

    def live(self) -> Tensor:
        """The slots that have a row."""
        return (self.row >= 0).nonzero()[:, 0]

    def fill(self) -> bool:
        """Start the next batch when the last one has ended. Returns False when all rows have ended."""
        if not len(self.live()) and self.queue:
            batch = self.queue[: self.slots]
            if self.model.capabilities.cached:
                width = len(self._prompt(batch[0]))
                batch = [row for row in batch if len(self._prompt(row)) == width]
            self.queue = self.queue[len(batch) :]
            self.row, self.texts = torch.tensor(batch), [list(self._prompt(row)) for row in batch]
            self.cache = None
            self._read(self.texts)
        return bool(len(self.live()))

    def free(self, slots: Tensor) -> None:
        """Free the slots of rows that ended."""
        self.row[slots] = -1

    def step(self, tokens: Tensor) -> None:
        """Decode the tokens just sampled, one for each live slot."""
        live = self.live().tolist()
        if not live:
            return
        for slot, token in zip(live, tokens.tolist(), strict=True):
            self.texts[slot].append(token)
        if self.model.capabilities.cached:
            self._read([text[-1:] for text in self.texts])  # a row that ended repeats its last token
            return
        few = torch.tensor(live)
        self.row, self.texts = self.row[few], [self.texts[slot] for slot in live]
        self._read(self.texts)

    def _prompt(self, row: int) -> Sequence[int]:
        return self.prompts[row // self.group]

    def _read(self, rows: list[list[int]]) -> None:
        if self.model.capabilities.cached:
            tokens = torch.tensor(rows, device=self.model.device)
            self.hidden, self.cache = self.model.continue_rows(tokens, self.cache)
            return
        hidden = self.model.read_rows(rows)
        ends = torch.tensor([len(row) - 1 for row in rows], device=hidden.device)
        self.hidden = hidden[torch.arange(len(rows), device=hidden.device), ends]
