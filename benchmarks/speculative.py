"""Speculative decoding of SmolLM2-135M at batch size 1 with its own multi-token heads.

First the heads are trained on a frozen trunk to predict the model's answers to the task `addition`. Then held-out
prompts are answered greedily, alternately without and with speculation; `rate` is with speculation. The peer is
`model.generate` of transformers with its cache, on the same prompts.
"""

from __future__ import annotations

import time
from typing import Any

from foresight.training.options import build_config

UNIT = "tokens/s"
PEER = "transformers"
TARGET = 1.0
PROMPTS, TURN, TOKENS, HEADS, UPDATES = 24, 6, 48, 4, 24
AHEAD = 1  # drafts per pass: with these heads a second and third draft take more time than they save


def _prompts(policy: Any) -> list[list[int]]:
    from foresight.envs.text.make import make

    return [policy.encode(example.prompt) for example in make("addition").test[:PROMPTS]]


def _rows(batch: Any) -> list[list[int]]:
    """The completions of a batch, a group of one each."""
    return [row[:n] for row, n in zip(batch.completion[:, 0].tolist(), batch.length[:, 0].tolist(), strict=True)]


def ours() -> dict[str, Any]:
    """`planning.generation.speculative` with heads, and `planning.generation.decoding` for comparison."""
    import torch

    from foresight.algorithms.language import mtp_critic
    from foresight.envs.text.make import make
    from foresight.planning.generation.decoding import generate
    from foresight.planning.generation.speculative import speculate

    config = build_config(
        mtp_critic.Config,
        steps=UPDATES,
        prompts=32,
        predict_tokens=HEADS,
        max_new_tokens=TOKENS,
        learning_rate=0.0,  # of the model, which is frozen
        value_coef=0.0,
        token_coef=1.0,
    )
    *_, (_, metrics, state) = mtp_critic.train(config, make("addition"))
    prompts = _prompts(state.policy)
    with torch.no_grad():
        generate(state.policy, prompts[:1], 1, TOKENS, 0.0)
        speculate(state.policy, prompts[:1], state.heads, 1, TOKENS, 0.0, ahead=AHEAD)
    seconds = {"plain": 0.0, "speculative": 0.0}
    tokens, same, drafted, accepted, passes = 0, 0, 0, 0, 0
    for first in range(0, PROMPTS, TURN):  # alternately, so that both see the same load of the machine
        some = prompts[first : first + TURN]
        begun = time.perf_counter()
        plain = generate(state.policy, some, 1, TOKENS, 0.0, slots=1)
        between = time.perf_counter()
        found = speculate(state.policy, some, state.heads, 1, TOKENS, 0.0, ahead=AHEAD)
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
        "heads_acceptance_sampled": metrics["acceptance"],
    }


def peer() -> dict[str, Any]:
    """`model.generate` of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from foresight.nets.language import pretrained

    policy = pretrained.load("smollm2")
    prompts = _prompts(policy)
    module = AutoModelForCausalLM.from_pretrained(pretrained.packaged(), dtype=policy.autocast or torch.float32)
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
