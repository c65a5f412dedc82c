"""Constrained decoding: answers from a list of choices, and stop texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.tokenizer import ids_of

Trie = dict[int, Any]  # token -> trie of the tokens that may follow; empty after the end token


def tries(model: LanguageModel, choices: Sequence[str] | Sequence[Sequence[str]], prompts: int) -> list[Trie]:
    """The allowed answers of each prompt, as tries of tokens that end with a stop token.

    `choices` is one list for all prompts, or one for each. An answer is allowed only in its canonical tokenization.
    Raises UserError if there is nothing to choose from.
    """
    if not model.stop_ids:
        raise UserError(
            "The model has no end token, so choices cannot be used: choose a model with one, or leave choices out."
        )
    shared = all(isinstance(choice, str) for choice in choices)
    lists: list[Any] = [choices] if shared else list(choices)
    if not shared and len(lists) != prompts:
        raise UserError(
            f"There are {len(lists)} lists of choices for {prompts} prompts: give one list for all, or one each."
        )
    found = [_trie(model, answers) for answers in lists]
    return found * prompts if shared else found


def _trie(model: LanguageModel, answers: Sequence[str]) -> Trie:
    root: Trie = {}
    for answer in answers:
        node = root
        for token in ids_of(model.tokenizer, answer, add_special_tokens=False):
            node = node.setdefault(token, {})
        node.update({stop: {} for stop in model.stop_ids})  # any of the model's end tokens
    if not root:
        raise UserError("A list of choices is empty: give at least one answer.")
    return root


def depth(trie: Trie) -> int:
    """Tokens of the longest answer, including its end token."""
    count, level = 0, [trie]
    while level := [after for node in level for after in node.values()]:
        count += 1
    return count


def before(text: str, stop: Sequence[str]) -> str:
    """The text before the first of `stop` in it; the token that completed a stop text may hold more than that."""
    return min((text.partition(one)[0] for one in stop), key=len, default=text)


def mask_logits(logits: Tensor, nodes: Sequence[Trie]) -> Tensor:
    """Logits `[B, V]` with -inf on every token that is not a child of the row's trie node."""
    tokens = [list(node) for node in nodes]
    rows = torch.tensor([i for i, row in enumerate(tokens) for _ in row], device=logits.device)
    columns = torch.tensor([token for row in tokens for token in row], device=logits.device)
    kept = torch.full_like(logits, -torch.inf)
    kept[rows, columns] = logits[rows, columns]
    return kept


def stops_at(model: LanguageModel, tokens: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether the last token completes one of the texts `stop`, also across token boundaries.

    Only the last tokens are decoded: at least one byte each, and one more, because some tokenizers drop a leading
    space.
    """
    window = 1 + max(len(text.encode()) for text in stop)
    read = model.tokenizer.decode(tokens[-window:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(text in read for text in stop)
