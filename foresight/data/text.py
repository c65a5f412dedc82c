"""Token batches: prompts and the completions sampled for them; masks come from lengths, never from pad ids."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresight.errors import UserError


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-pad rows of token ids with zeros. Returns `[rows, longest]` int64 and lengths `[rows]`."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    tokens = torch.zeros(len(rows), int(lengths.max()) if len(rows) else 0, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return tokens, lengths


def check_characters(value: Any, place: str) -> None:
    """Raise UserError for half of a surrogate pair in the texts of `value`, which `place` names in the message.

    JSON can write one, and a byte that is not UTF-8 becomes one on the command line, but no tokenizer takes it.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place}: {error.object[max(error.start - 20, 0) : error.start + 1]!r} ends with half of a surrogate "
            "pair, which is no character (so is a byte that is not UTF-8): write the whole one, or remove it."
        ) from error


def encoded(words: str, size: int) -> NDArray[np.uint8]:
    """An instruction as `size` UTF-8 bytes, padded with zeros. Raises UserError if it has more, or no characters."""
    check_characters(words, "The instruction")
    text = words.encode()
    if len(text) > size:
        raise UserError(
            f"The instruction '{words}' has {len(text)} bytes, but an observation has room for {size}: shorten it."
        )
    return np.frombuffer(text.ljust(size, b"\0"), np.uint8)


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """`[...]` lengths to `[..., width]` booleans that are true at the first `length` positions."""
    return torch.arange(width, device=lengths.device) < lengths[..., None]


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """The length of the rows' shared prefix, which leaves each row at least one token."""
    longest = min(len(row) for row in rows) - 1
    first = rows[0]
    for i in range(longest):
        if any(row[i] != first[i] for row in rows):
            return i
    return longest


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """P prompts with G completions each: a trajectory of text, one token per step.

    - `prompt` `[P, S]` and `prompt_length` `[P]`: right-padded ids;
    - `completion` `[P, G, T]` and `length` `[P, G]`: the sampled ids, with the stop token, right-padded;
    - `logprob` `[P, G, T]`: of each sampled id under the sampling distribution;
    - `stopped` `[P, G]`: true where a stop token (or a stop text) ended the row, false where the length limit did;
    - `model_logprob` `[P, G, T]`: of each sampled id under the model at temperature 1, without truncation, if computed;
    - `own` `[P, G, T]`: false on tokens of a completion that the model did not sample, such as the next question of a
      conversation or a tool's result; None: all are the model's own;
    - `staleness` `[P]`: updates between the weights that sampled and those that are trained; None: 0.
    """

    prompt: Tensor
    prompt_length: Tensor
    completion: Tensor
    length: Tensor
    logprob: Tensor
    stopped: Tensor
    model_logprob: Tensor | None = None
    own: Tensor | None = None
    staleness: Tensor | None = None

    @property
    def stale(self) -> bool:
        """Whether weights of an earlier update sampled some of it: π_old is then the stored `logprob`."""
        return self.staleness is not None and bool((self.staleness > 0).any())

    @property
    def mask(self) -> Tensor:
        """`[P, G, T]`, true on sampled tokens: not on padding, and not where `own` is false."""
        known = length_mask(self.length, self.completion.shape[-1])
        return known if self.own is None else known & self.own

    def steps(self) -> Tensor:
        """`[P, G, T]`: the places of a row's sampled tokens, in their order, then all others.

        A sampled token is a step: `x.gather(-1, steps())` has the steps side by side, whatever was written between two
        turns, and `scatter(-1, steps(), y)` puts them back.
        """
        return (~self.mask).byte().argsort(dim=-1, stable=True)

    def last(self) -> Tensor:
        """`[P, G]`: the place of a row's last sampled token; a message of an environment may stand after it."""
        return (self.mask * torch.arange(self.completion.shape[-1], device=self.mask.device)).amax(-1)

    def longest_turn(self) -> Tensor:
        """`[P, G]`: sampled tokens of the longest turn of a conversation; of any other completion, its length."""
        count = self.mask.long().cumsum(-1)
        before = count.masked_fill(self.mask, 0).cummax(-1).values  # sampled tokens of the turns that have ended
        return (count - before).amax(-1)

    def scored(self, rewards: Tensor, whole: bool = False) -> Tensor:
        """`[P, G, T]`, true on sampled tokens of completions whose reward `[P, G]` is not NaN (unscorable).

        With `whole`, only of completions that stopped before the length limit.
        """
        counts = ~rewards.isnan() & self.stopped if whole else ~rewards.isnan()
        return self.mask & counts[..., None]

    def prompts(self) -> list[list[int]]:
        """The prompts as lists of ids, without padding."""
        return [row[:n].tolist() for row, n in zip(self.prompt, self.prompt_length.tolist(), strict=True)]

    def distinct(self) -> Tensor:
        """The number of distinct prefixes among each prompt's completions (nodes of their prefix tree): `[P]`."""
        counts = []
        for rows, lengths in zip(self.completion.tolist(), self.length.tolist(), strict=True):
            found: dict[tuple[int, int], int] = {}
            for row, length in zip(rows, lengths, strict=True):
                place = -1
                for token in row[:length]:
                    place = found.setdefault((place, token), len(found))
            counts.append(len(found))
        return torch.tensor(counts)

    def select(self, groups: Tensor) -> TokenBatch:
        """The batch of the prompts at indices `groups`, trimmed to the longest prompt and completion left."""
        length, prompt_length = self.length[groups], self.prompt_length[groups]
        width, prompt_width = int(length.max()), int(prompt_length.max())
        return TokenBatch(
            self.prompt[groups][:, :prompt_width],
            prompt_length,
            self.completion[groups][..., :width],
            length,
            self.logprob[groups][..., :width],
            self.stopped[groups],
            None if self.model_logprob is None else self.model_logprob[groups][..., :width],
            None if self.own is None else self.own[groups][..., :width],
            None if self.staleness is None else self.staleness[groups],
        )

    @staticmethod
    def concat(batches: Sequence[TokenBatch]) -> TokenBatch:
        """Batches of one group size as one, padded to the longest."""

        def stack(tensors: Sequence[Tensor]) -> Tensor:
            width = max(x.shape[-1] for x in tensors)
            return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in tensors])

        ragged = {"prompt", "completion", "logprob", "model_logprob", "own"}
        parts = {f.name: [getattr(batch, f.name) for batch in batches] for f in dataclasses.fields(TokenBatch)}
        known = {name: x for name, x in parts.items() if all(part is not None for part in x)}
        return TokenBatch(**{name: stack(x) if name in ragged else torch.cat(x) for name, x in known.items()})
