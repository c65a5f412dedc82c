"""Sampling from SmolLM2-135M: 192 prompts in batches of 64, completions of 1 to 128 tokens, temperature 1.

Both sides answer the same questions, short and long ones mixed; the tokens up to the end of each completion are
counted. `model.generate` gets a model whose weights already have the dtype of the matrix products; it pads prompts on
the left, and each batch waits for its longest row. `of_bandwidth` is the share of the limit at which each step of 64
rows reads every weight once.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks import _language

UNIT = "tokens/s"
PEER = "transformers"
TARGET = 3.0
PROMPTS, BATCH, TOKENS = 192, 64, 128


def _questions() -> list[str]:
    """The questions; every fourth one has a long answer."""
    return [
        f"Count from 1 to {i % 40 + 5} in words." if i % 4 == 0 else f"What is {i} + {2 * i % 31}? Just the number."
        for i in range(PROMPTS)
    ]


def _measured(tokens: int, seconds: float, weights: int) -> dict[str, Any]:
    limit = BATCH * _language.bandwidth() / (weights * _language.width())
    return {
        "rate": tokens / seconds,
        "tokens": tokens,
        "tokens_per_completion": tokens / PROMPTS,
        "of_bandwidth": tokens / seconds / limit,
    }


def ours() -> dict[str, Any]:
    """`planning.generation.rollout.complete`, as training samples."""
    import torch

    from foresight.nets.language import pretrained
    from foresight.planning.generation.rollout import complete
    from foresight.runtime.machine import POOL, configure_malloc

    configure_malloc(POOL)  # as `foresight train` does
    policy, questions = pretrained.load(_language.model()), _questions()
    room = min(TOKENS, policy.context // 2)
    complete(policy, questions[:8], 1, 4, 1.0, torch.Generator().manual_seed(1))
    begun = time.perf_counter()
    batch = complete(policy, questions, 1, room, 1.0, torch.Generator().manual_seed(0))
    seconds = time.perf_counter() - begun
    return _measured(int(batch.length.sum()), seconds, sum(weight.numel() for weight in policy.parameters()))


def peer() -> dict[str, Any]:
    """`model.generate` of transformers, a batch at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    from foresight.nets.language import pretrained

    policy = pretrained.load(_language.model())
    prompts = [policy.encode(question) for question in _questions()]
    stops, room = torch.tensor(policy.stop_ids), min(TOKENS, policy.context // 2)
    model = AutoModelForCausalLM.from_pretrained(_language.model(), dtype=_language.dtype()).eval()

    def answer(rows: list[list[int]], most: int) -> int:
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        written = model.generate(
            ids, attention_mask=mask, max_new_tokens=most, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            eos_token_id=policy.stop_ids, pad_token_id=policy.stop_ids[0],
        )[:, longest:]  # fmt: skip
        ended = torch.isin(written, stops)
        first = torch.where(ended.any(1), ended.int().argmax(1) + 1, written.shape[1])
        return int(first.sum())

    torch.manual_seed(0)
    answer(prompts[:8], 4)
    begun = time.perf_counter()
    tokens = sum(answer(prompts[i : i + BATCH], room) for i in range(0, PROMPTS, BATCH))
    return _measured(tokens, time.perf_counter() - begun, sum(weight.numel() for weight in model.parameters()))
