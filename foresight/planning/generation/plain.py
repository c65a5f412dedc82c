"""Decoding for models in which rows share nothing: each row is read as transformers reads it
(`nets.language.architecture`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foresight.nets.language.model import LanguageModel


class Rows:
    """The rows being decoded, as `planning.generation.decoding` has them: a wave of rows at a time, which ends with its
    last row.

    Where the model's own cache is right, a wave is of rows whose prompts are equally long, and a token costs a token.
    Elsewhere it is of any rows, and each is read from its beginning for every token.
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
        """Begin the next wave when the last one has ended, and say whether there is a row."""
        if not len(self.live()) and self.queue:
            wave = self.queue[: self.slots]
            if self.model.way.cached:
                width = len(self._prompt(wave[0]))
                wave = [row for row in wave if len(self._prompt(row)) == width]
            self.queue = self.queue[len(wave) :]
            self.row, self.texts = torch.tensor(wave), [list(self._prompt(row)) for row in wave]
            self.cache = None
            self._read(self.texts)
        return bool(len(self.live()))

    def free(self, slots: Tensor) -> None:
        """The rows in these slots have ended."""
        self.row[slots] = -1

    def step(self, tokens: Tensor) -> None:
        """The tokens just sampled are read, one for each slot that has a row."""
        live = self.live().tolist()
        if not live:
            return
        for slot, token in zip(live, tokens.tolist(), strict=True):
            self.texts[slot].append(token)
        if self.model.way.cached:
            self._read([text[-1:] for text in self.texts])  # of a row that has ended it is the last token once more
            return
        few = torch.tensor(live)
        self.row, self.texts = self.row[few], [self.texts[slot] for slot in live]
        self._read(self.texts)

    def _prompt(self, row: int) -> Sequence[int]:
        return self.prompts[row // self.group]

    def _read(self, rows: list[list[int]]) -> None:
        if self.model.way.cached:
            tokens = torch.tensor(rows, device=self.model.device)
            self.hidden, self.cache = self.model.go_on(tokens, self.cache)
            return
        hidden = self.model.rows(rows)
        ends = torch.tensor([len(row) - 1 for row in rows], device=hidden.device)
        self.hidden = hidden[torch.arange(len(rows), device=hidden.device), ends]
