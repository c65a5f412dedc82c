"""Scorers: the token that completes a step."""

from __future__ import annotations

from foresight.nets.language import pretrained
from foresight.nets.language.scorer import completing
from tests import tiny_language


def test_a_step_ends_with_the_last_token_of_its_last_character(tmp_path):
    """A character of several tokens, as in byte-level tokenizers, is not written before the last of them."""
    policy = pretrained.load(str(tiny_language.byte_level(tmp_path / "model")), precision="float32")
    ids = policy.tokenizer.encode("a中\nb", add_special_tokens=False)
    last = len(policy.tokenizer.encode("a中", add_special_tokens=False)) - 1
    assert last == 3 and len(ids) == 6
    assert completing(policy, ids, [1, 2, 3, 4]) == [0, last, last + 1, last + 2]
    assert completing(policy, ids, [9]) == [len(ids) - 1]
