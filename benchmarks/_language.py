"""What the benchmarks of language models share: the model, rows to learn from, and the limits of the machine."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = "FORESIGHT_BENCH_MODEL"  # the variable with another model's folder, to try a benchmark in seconds
TRIES = 10  # of which the fastest counts as the limit


def model() -> str:
    """The folder of the model that both sides load."""
    from foresight.nets import pretrained

    return os.environ.get(MODEL) or str(pretrained.packaged())


def rows(count: int = 400, seed: int = 0) -> list[dict[str, Any]]:
    """Questions with a right and a wrong answer of one to eight sentences."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        steps = [f"First {a} and {i + 1} of {b} make {a + i + 1}." for i in range(draw.randrange(8))]
        told = " ".join([*steps, "So {} + {} = {}."])
        wrong = a + b + draw.choice((-10, -1, 1, 10))
        found.append(
            {
                "prompt": f"What is {a} + {b}?",
                "chosen": told.format(a, b, a + b),
                "rejected": told.format(a, b, wrong),
            }
        )
    return found


def write(folder: str, kind: str) -> Path:
    """The rows as JSONL: demonstrations (prompt, completion) or preferences (prompt, chosen, rejected)."""
    path = Path(folder) / "rows.jsonl"
    wanted = rows()
    if kind == "demonstrations":
        wanted = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in wanted]
    path.write_text("\n".join(json.dumps(row) for row in wanted), encoding="utf-8")
    return path


def conversational(row: dict[str, str]) -> dict[str, Any]:
    """A row as TRL takes it where a chat template is to be applied, as this library always does."""
    role = {key: "user" if key == "prompt" else "assistant" for key in row}
    return {key: [{"role": role[key], "content": text}] for key, text in row.items()}


def tokens_per_row(kind: str) -> float:
    """Mean tokens of a row, prompt and answers with their prompts, as they are given to the model."""
    from foresight.nets import pretrained
    from foresight.planning.corpus import encode

    policy = pretrained.load(model())
    sides = ("chosen",) if kind == "demonstrations" else ("chosen", "rejected")
    lengths = [sum(len(part) for side in sides for part in encode(policy, r["prompt"], r[side])) for r in rows()]
    return sum(lengths) / len(lengths)


def flops_per_token(passes: float) -> float:
    """Operations for a token of a row: 2 a weight and forward pass; a backward pass counts twice."""
    from transformers import AutoModelForCausalLM

    return 2 * passes * sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(model()).parameters())


def dtype() -> Any:
    import torch

    from foresight.nets import pretrained

    return torch.bfloat16 if pretrained.fast_bfloat16("cpu") else torch.float32


def _best(work: Callable[[], Any]) -> float:
    seconds = float("inf")
    for _ in range(TRIES):
        begun = time.perf_counter()
        work()
        seconds = min(seconds, time.perf_counter() - begun)
    return seconds


def products() -> float:
    """The fastest rate of matrix products as in a feed-forward layer of this model, in operations a second."""
    import torch

    a, b = torch.randn(512, 576, dtype=dtype()), torch.randn(576, 1536, dtype=dtype())
    return 20 * 2 * 512 * 576 * 1536 / _best(lambda: [a @ b for _ in range(20)])


def bandwidth() -> float:
    """The fastest rate at which memory is read, in bytes a second."""
    import torch

    block = torch.ones(2**26)  # 256 MiB, which no cache holds
    return 4 * len(block) / _best(block.sum)


def width() -> int:
    """Bytes of a weight in the products of both sides."""
    return int(dtype().itemsize)
