"""Speculative decoding of SmolLM2-135M at batch size 1 with its own multi-token heads.

Held-out prompts are answered greedily, alternately without and with speculation; `rate` is with speculation. The peer
is `model.generate` of transformers with its cache, on the same prompts. The heads predict the model's own answers to
the task `addition`. They are trained at the first call, on a frozen trunk:

foresight train mtp_critic --preset smollm2-drafts --out runs/mtp_critic-smollm2-drafts-0
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

UNIT = "tokens/s"
PEER = "transformers"
TARGET = 1.0
PROMPTS, TURN, TOKENS = 24, 6, 48
RUN = Path("runs/mtp_critic-smollm2-drafts-0")
DRAFTS = {"ahead": 1, "draft_vocabulary": 8192}  # more drafts per pass take more time than they save


def _model() -> str:
    import foresight

    if not (RUN / "export").is_dir():
        foresight.train("mtp_critic", preset="smollm2-drafts", out=RUN)
    return str(RUN / "export")


def _prompts(policy: Any) -> list[list[int]]:
    from foresight.envs.text.make import make

    return [policy.encode(example.prompt) for example in make("addition").test[:PROMPTS]]


def _rows(batch: Any) -> list[list[int]]:
    """The completions of a batch, a group of one each."""
    return [row[:n] for row, n in zip(batch.completion[:, 0].tolist(), batch.length[:, 0].tolist(), strict=True)]


def ours() -> dict[str, Any]:
    """`planning.generation.speculative` with heads, and `planning.generation.decoding` for comparison."""
    import torch

    from foresight.nets.language import pretrained
    from foresight.planning.generation.decoding import generate
    from foresight.planning.generation.speculative import speculate

    policy, heads = pretrained.load(_model()), pretrained.load_heads(_model())
    prompts = _prompts(policy)
    with torch.no_grad():
        generate(policy, prompts[:1], 1, TOKENS, 0.0)
        speculate(policy, prompts[:1], heads, 1, TOKENS, 0.0, **DRAFTS)
    seconds = {"plain": 0.0, "speculative": 0.0}
    tokens, same, drafted, accepted, passes = 0, 0, 0, 0, 0
    for first in range(0, PROMPTS, TURN):  # alternately, so that both see the same load of the machine
        some = prompts[first : first + TURN]
        begun = time.perf_counter()
        plain = generate(policy, some, 1, TOKENS, 0.0, slots=1)
        between = time.perf_counter()
        found = speculate(policy, some, heads, 1, TOKENS, 0.0, **DRAFTS)
        seconds["speculative"] += time.perf_counter() - between
        seconds["plain"] += between - begun
        tokens += int(found.batch.length.sum())
        pairs = zip(_rows(plain), _rows(found.batch), strict=True)
        same += sum(one == other for one, other in pairs)
        drafted, accepted, passes = drafted + found.drafted, accepted + found.accepted, passes + found.passes
    return {
        "rate": tokens / seconds["speculative"],
        "plain": tokens / seconds["plain"],
        "speed_up": seconds["plain"] / seconds["speculative"],
        "acceptance": accepted / drafted,
        "tokens_per_pass": tokens / passes,
        "equal_texts": same / len(prompts),  # below 1 only where rounding decides a near tie
    }


def peer() -> dict[str, Any]:
    """`model.generate` of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from foresight.nets.language import pretrained

    policy = pretrained.load(_model())
    prompts = _prompts(policy)
    module = AutoModelForCausalLM.from_pretrained(_model(), dtype=policy.autocast or torch.float32)
    tokens, seconds = 0, 0.0
    with torch.no_grad(), policy.precision():
        for i, prompt in enumerate([prompts[0], *prompts]):
            row = torch.tensor([prompt])
            begun = time.perf_counter()
            out = module.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=TOKENS, do_sample=False)
            if i:  # the first is warm-up
                seconds += time.perf_counter() - begun
                tokens += out.shape[1] - row.shape[1]
    return {"rate": tokens / seconds}
