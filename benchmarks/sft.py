"""SFT of SmolLM2-135M: 16 demonstrations per update, one to eight sentences each, no packing.

Both sides train on the same rows from the same model folder: learning rate 1e-5, AdamW, float32 weights and bfloat16
products where the processor supports them. The first update is warm-up; five are measured. The tokens of a row are
those of its prompt and answer, however often they are computed; `of_products` is the share of the matrix-multiply limit
at 3 forward passes per token (a backward pass counts as two).
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
