"""DPO of SmolLM2-135M: 16 pairs per update, answers of one to eight sentences, a frozen reference, beta 0.1.

Both sides train on the same rows from the same model folder: learning rate 1e-5, AdamW, float32 weights and bfloat16
products where the processor supports them. The first update is warm-up; five are measured. The tokens of a row are
those of its prompt and answers, however often they are computed; `of_products` is the share of the matrix-multiply
limit at 4 forward passes per token (a backward pass counts as two).
"""

from __future__ import annotations

from typing import Any

from benchmarks import _language

UNIT = "tokens/s"
PEER = "trl"
TARGET = 1.5
KIND, PASSES = "preferences", 4


def ours() -> dict[str, Any]:
    """This library's `dpo.train`, as a user runs it."""
    from foresight.algorithms.language import dpo

    return _language.trained(dpo, KIND, PASSES)


def peer() -> dict[str, Any]:
    """TRL's DPOTrainer at the same settings."""
    from trl import DPOConfig, DPOTrainer

    return _language.trained_by_trl(DPOTrainer, DPOConfig, KIND, PASSES, beta=0.1)
