"""Trees of thoughts beside plain sampling: SmolLM2-135M, 24 questions side by side, 64 rows decoded at once.

Eight beams a question (DVTS, groups of four), four steps of up to 32 tokens, and a verifier that costs nothing, so that
only the engine is timed. The peer samples eight whole answers of up to 128 tokens a question. A search begins each step
with its prefixes, which are kept from the step before, and waits for its longest thought; `rate` counts sampled tokens
alone, so the ratio is the share of plain sampling that is left. `distinct`: of the tokens that a server without a cache
would read or sample, the share that differs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks import _language

UNIT = "tokens/s"
PEER = "foresight"
TARGET = 0.8
QUESTIONS, BEAMS, WIDTH, STEPS, STEP_TOKENS = 24, 8, 4, 4, 32


def ours() -> dict[str, Any]:
    """`planning.reasoning.beam.dvts`."""
    return _measure("dvts", STEP_TOKENS * STEPS, n=BEAMS, width=WIDTH, steps=STEPS, step_tokens=STEP_TOKENS)


def peer() -> dict[str, Any]:
    """The same engine without thoughts: `self_consistency`."""
    return _measure("self_consistency", STEP_TOKENS * STEPS, n=BEAMS)


def _measure(name: str, most: int, **options: Any) -> dict[str, Any]:
    from foresight.envs.text.task import Example, TextTask
    from foresight.nets.language import pretrained
    from foresight.planning.reasoning import methods
    from foresight.planning.reasoning.mind import Mind
    from foresight.runtime.machine import POOL, configure_malloc

    configure_malloc(POOL)  # as `foresight think` does
    policy = pretrained.load(_language.model())
    questions = [
        Example(
            f"Tom has {i + 3} boxes with {2 * i + 5} apples each, eats {i + 1} and buys {4 * i + 2} more. How many has "
            "he? Explain every step in a long sentence on a line of its own."
        )
        for i in range(QUESTIONS)
    ]
    task = TextTask("apples", questions, questions, None)
    methods.run("greedy", Mind(policy, 4), task, questions)  # warm-up
    mind = Mind(policy, most, verifier=_length)
    began = time.perf_counter()
    methods.run(name, mind, task, questions, **options)
    seconds = time.perf_counter() - began
    total = mind.total
    return {
        "rate": total.sampled_tokens / seconds,
        "sampled_tokens": total.sampled_tokens,
        "prompt_tokens": total.prompt_tokens,
        "distinct": total.distinct_tokens / (total.prompt_tokens + total.sampled_tokens),
    }


def _length(examples: Sequence[Any], texts: Sequence[str]) -> list[float]:
    """Scores that differ: the longer, the better."""
    return [1 - 1 / (1 + len(text)) for text in texts]
