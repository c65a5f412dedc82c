"""Greedy decoding of SmolLM2-135M, one answer at a time: 4 prompts, 128 tokens each.

Both sides use all cores and compute in bfloat16 if the processor is fast in it; llama.cpp reads the weights from a GGUF
file in that format. Seconds include reading the prompt. `of_bandwidth` is the share of the limit at which every token
reads every weight once. The peer is compiled on the machine that it runs on and needs an environment of its own:
`--peer-python`.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from benchmarks import _language

UNIT = "tokens/s"
PEER = "llama-cpp-python"
TARGET = 1.0
TOKENS, ROOM = 128, 256
WARMUP = 32  # tokens before the clock starts: enough for both to load and convert what they keep
PROMPTS = (
    "Tell me a long story about a fox who learns to sail.",
    "Explain how a bicycle stays upright.",
    "Describe a day in the life of a lighthouse keeper.",
    "Write a letter from a river to the sea.",
)


def ours() -> dict[str, Any]:
    """`planning.generation.decoding.generate`, with its cache."""
    import torch

    from foresight.nets.language import pretrained
    from foresight.planning.generation.decoding import generate
    from foresight.runtime.machine import POOL, configure_malloc

    configure_malloc(POOL)  # as `foresight generate` does
    policy = pretrained.load(_language.model())
    prompts = [policy.encode(prompt) for prompt in PROMPTS]
    with torch.no_grad():
        generate(policy, prompts[:1], 1, WARMUP, 0.0)
        begun = time.perf_counter()
        tokens = sum(int(generate(policy, [prompt], 1, TOKENS, 0.0).length.sum()) for prompt in prompts)
        seconds = time.perf_counter() - begun
    return _measured(tokens, seconds, sum(weight.numel() for weight in policy.parameters()))


def peer() -> dict[str, Any]:
    """llama.cpp through its Python bindings."""
    import os
    from pathlib import Path

    import llama_cpp
    import torch

    from foresight.nets.language import gguf, pretrained

    policy = pretrained.load(_language.model())
    kind = "bf16" if _language.dtype() == torch.bfloat16 else "f16"
    cores = os.cpu_count()
    with tempfile.TemporaryDirectory() as folder:
        file = gguf.write(_language.model(), Path(folder) / "model.gguf", kind)
        model = llama_cpp.Llama(str(file), n_ctx=ROOM, n_threads=cores, n_threads_batch=cores, verbose=False)

        def answer(prompt: str, most: int) -> int:
            model.reset()
            written = 0
            for token in model.generate(policy.encode(prompt), temp=0.0, top_k=1, repeat_penalty=1.0):
                written += 1
                if written == most or token in policy.stop_ids:
                    break
            return written

        answer(PROMPTS[0], WARMUP)
        begun = time.perf_counter()
        tokens = sum(answer(prompt, TOKENS) for prompt in PROMPTS)
        seconds = time.perf_counter() - begun
    return _measured(tokens, seconds, sum(weight.numel() for weight in policy.parameters()))


def _measured(tokens: int, seconds: float, weights: int) -> dict[str, Any]:
    limit = _language.bandwidth() / (weights * _language.width())
    return {"rate": tokens / seconds, "tokens": tokens, "of_bandwidth": tokens / seconds / limit}
