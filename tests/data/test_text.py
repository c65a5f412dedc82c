from __future__ import annotations

import dataclasses

import torch

from foresight.data import text
from tests.sabotage import sabotaged_by


def test_pad_keeps_every_token_and_its_length():
    tokens, lengths = text.pad([[5, 0, 7], [9], [1, 2]])
    assert tokens.tolist() == [[5, 0, 7], [9, 0, 0], [1, 2, 0]]
    assert lengths.tolist() == [3, 1, 2]


def everything(original):
    return lambda *args: torch.ones_like(original(*args))


def inverted(original):
    return lambda *args: ~original(*args)


@sabotaged_by("foresight.data.text.length_mask", everything, inverted)
def test_a_mask_comes_from_lengths_also_where_a_token_equals_the_padding():
    batch = _batch(torch.tensor([[[0, 0, 3], [4, 0, 0]]]), torch.tensor([[3, 1]]))
    assert batch.mask.tolist() == [[[True, True, True], [True, False, False]]]


def test_the_longest_turn_is_that_of_the_models_own_tokens():
    batch = _batch(torch.ones(1, 2, 6, dtype=torch.int64), torch.tensor([[6, 4]]))
    assert batch.longest_turn().tolist() == [[6, 4]]
    own = torch.tensor([[[True, False, True, True, False, True], [False, True, True, True, True, True]]])
    assert dataclasses.replace(batch, own=own).longest_turn().tolist() == [[2, 3]]


def test_the_last_sampled_token_may_stand_before_a_message():
    batch = _batch(torch.ones(1, 2, 4, dtype=torch.int64), torch.tensor([[4, 2]]))
    assert batch.last().tolist() == [[3, 1]]
    own = torch.tensor([[[True, False, True, False], [True, False, True, True]]])
    assert dataclasses.replace(batch, own=own).last().tolist() == [[2, 0]]


def test_common_prefix_leaves_every_row_a_token_of_its_own():
    assert text.common_prefix([[1, 2, 3], [1, 2, 4]]) == 2
    assert text.common_prefix([[1, 2], [1, 2]]) == 1
    assert text.common_prefix([[7], [7, 8]]) == 0
    assert text.common_prefix([[1, 2], [3, 2]]) == 0


def test_select_cuts_to_the_longest_that_is_left():
    batch = _batch(torch.arange(12).view(2, 2, 3), torch.tensor([[3, 1], [2, 1]]))
    part = batch.select(torch.tensor([1]))
    assert part.completion.tolist() == [[[6, 7], [9, 10]]]
    assert part.length.tolist() == [[2, 1]]
    assert part.prompts() == [[5]]


def _batch(completion: torch.Tensor, length: torch.Tensor) -> text.TokenBatch:
    prompts = completion.shape[0]
    prompt = torch.tensor([[4, 6], [5, 0]])[-prompts:]
    prompt_length = torch.tensor([2, 1])[-prompts:]
    logprob = torch.zeros(completion.shape)
    return text.TokenBatch(prompt, prompt_length, completion, length, logprob, length > 0)
