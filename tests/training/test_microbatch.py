"""How a batch is split: by all of its tokens, those of the prompts among them."""

from __future__ import annotations

import torch

from foresight.data.text import TokenBatch, pad
from foresight.nets.language.model import token_tree
from foresight.training.microbatch import split
from tests.sabotage import sabotaged_by

PREFIX, PROMPTS = list(range(10)), [30, 5, 5, 20, 5, 5]  # what all prompts begin with, and the lengths of the rest


def _batch() -> TokenBatch:
    prompt, prompt_length = pad([PREFIX + [100 + i] * n for i, n in enumerate(PROMPTS)])
    completion = torch.arange(6 * 2 * 3).view(6, 2, 3)
    length = torch.full((6, 2), 3)
    return TokenBatch(prompt, prompt_length, completion, length, torch.zeros(6, 2, 3), length > 0)


def _sizes(tokens: int, groups: torch.Tensor) -> list[tuple[list[int], int]]:
    """The groups of each part, and how many tokens it computes."""
    batch = _batch()
    parts = [(part.tolist(), len(token_tree(batch.select(part))[0].tokens)) for part in split(batch, groups, tokens)]
    assert sorted(group for part, _ in parts for group in part) == groups.tolist()
    return parts


def longer(original):
    return lambda self: original(self) - self.prompt_length  # prompts are forgotten


@sabotaged_by("foresight.data.text.TokenBatch.distinct", longer)
def test_prompts_count():
    """A prompt of any length costs as much memory as a completion of that length.

    A group that is larger than the budget has a part of its own; the others fill theirs, and what all prompts begin
    with is counted once in each.
    """
    assert _sizes(32, torch.arange(6)) == [([0], 46), ([3], 36), ([1, 2], 32), ([4, 5], 32)]
    assert len(_sizes(31, torch.arange(6))) == 6
    assert len(_sizes(1, torch.arange(6))) == 6
    assert _sizes(54, torch.tensor([1, 2, 4, 5])) == [([1, 2, 4, 5], 54)]


@sabotaged_by("foresight.training.microbatch.common_prefix", lambda f: lambda rows: 0)
def test_what_prompts_share_counts_once():
    assert _sizes(54, torch.tensor([1, 2, 4, 5])) == [([1, 2, 4, 5], 54)]
