"""What a completion may be and where it ends: answers from a list, and texts that stop it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel

Trie = dict[int, Any]  # from a token to the trie of what may follow it; empty after the token that ends


def tries(model: LanguageModel, choices: Sequence[str] | Sequence[Sequence[str]], prompts: int) -> list[Trie]:
    """The answers allowed to each of so many prompts, as tries of tokens that end with a stop token.

    `choices` is one list for all prompts, or a list for each. An answer is allowed in the tokens that the tokenizer
    writes it in, and in no others. Raises UserError where there is nothing to choose from.
    """
    if not model.stop_ids:
        raise UserError("The model has no token that ends an answer, so it cannot be held to a list of answers.")
    shared = all(isinstance(choice, str) for choice in choices)
    lists: list[Any] = [choices] if shared else list(choices)
    if not shared and len(lists) != prompts:
        raise UserError(f"There are {len(lists)} lists of choices for {prompts} prompts: give one for all, or each.")
    found = [_trie(model, answers) for answers in lists]
    return found * prompts if shared else found


def _trie(model: LanguageModel, answers: Sequence[str]) -> Trie:
    root: Trie = {}
    for answer in answers:
        node = root
        for token in model.tokenizer.encode(answer, add_special_tokens=False):
            node = node.setdefault(token, {})
        node.update({stop: {} for stop in model.stop_ids})  # whichever of them the model ends its answers with
    if not root:
        raise UserError("A list of choices is empty: give at least one answer.")
    return root


def depth(trie: Trie) -> int:
    """Tokens of the longest answer, the one that ends it among them."""
    return 1 + max(depth(after) for after in trie.values()) if trie else 0


def only(logits: Tensor, nodes: Sequence[Trie]) -> Tensor:
    """Logits `[B, V]` with -inf on every token that may not follow in the row's node of its trie."""
    tokens = [list(node) for node in nodes]
    rows = torch.tensor([i for i, row in enumerate(tokens) for _ in row], device=logits.device)
    columns = torch.tensor([token for row in tokens for token in row], device=logits.device)
    kept = torch.full_like(logits, -torch.inf)
    kept[rows, columns] = logits[rows, columns]
    return kept


def stops_at(model: LanguageModel, tokens: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether one of the texts `stop` was completed by the last of the tokens, wherever tokens begin and end.

    Only as many tokens are read as a text can be made of: each has a byte of it at least, and one more stands before
    them, because some tokenizers drop a leading space.
    """
    window = 1 + max(len(text.encode()) for text in stop)
    read = model.tokenizer.decode(tokens[-window:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(text in read for text in stop)
