"""SFT of SmolLM2-135M: 16 demonstrations an update, one to eight sentences each, no packing.

Both sides learn the same rows from the same model folder: learning rate 1e-5, AdamW, float32 weights and bfloat16
products where the processor has them. The first update warms up; five are counted. A row has the tokens of its prompt
and answers, whether they are computed once or several times; `of_products` is the share of the matrix-multiply limit
of 3 forward passes a token (a backward pass is two).
"""

from __future__ import annotations

from typing import Any

from benchmarks import _language

UNIT = "tokens/s"
PEER = "trl"
TARGET = 1.5
KIND, PASSES = "demonstrations", 3


def ours() -> dict[str, Any]:
    """This library's `sft.train`, as a user runs it."""
    from foresight.algorithms.language import sft

    return _language.trained(sft, KIND, PASSES)


def peer() -> dict[str, Any]:
    """TRL's SFTTrainer at the same settings."""
    from trl import SFTConfig, SFTTrainer

    return _language.trained_by_trl(SFTTrainer, SFTConfig, KIND, PASSES, completion_only_loss=True)
