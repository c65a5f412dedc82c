"""Shared by the benchmarks of language models: the model, training rows, and the limits of the machine."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foresight.training.options import build_config

ROOT = Path(__file__).resolve().parents[1]
MODEL = "FORESIGHT_BENCH_MODEL"  # environment variable with another model's folder, to try a benchmark in seconds
TRIES = 10  # measurements of a limit, of which the fastest counts


def model() -> str:
    """The folder of the model that both sides load."""
    from foresight.nets.language import pretrained

    return os.environ.get(MODEL) or str(pretrained.packaged())


def train(out: Path, arguments: Sequence[str]) -> None:
    """`foresight train` with these arguments, in a process of its own: a stopped run resumes, a finished one is left.

    Exits if the run at `out` has other settings.
    """
    if (out / "config.yaml").is_file():
        from foresight.cli.fields import options
        from foresight.cli.train import parse
        from foresight.runtime.config import resolve, settings

        asked, given = parse(arguments[0], arguments[1:])
        wanted = resolve.resolve(
            arguments[0], preset=asked.preset, env=asked.env, task=asked.task, env_options=options(asked.env_options),
            episodes=asked.evaluation_episodes, given=given,
        )  # fmt: skip
        if changed := settings.differences(settings.Settings.read(out), wanted):
            sys.exit(f"{out} was trained with another {', '.join(changed)}: choose another --runs, or move it away.")
        command = ["resume", str(out)]
    else:
        command = ["train", *arguments, "--out", str(out)]
    if not (out / "summary.json").is_file():
        subprocess.run([sys.executable, "-m", "foresight", *command], cwd=ROOT, check=True)


def rows(count: int = 400, seed: int = 0) -> list[dict[str, Any]]:
    """Questions with a right and a wrong answer of one to eight sentences."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        steps = [f"First {a} and {i + 1} of {b} make {a + i + 1}." for i in range(draw.randrange(8))]
        text = " ".join([*steps, "So {} + {} = {}."])
        wrong = a + b + draw.choice((-10, -1, 1, 10))
        found.append(
            {
                "prompt": f"What is {a} + {b}?",
                "chosen": text.format(a, b, a + b),
                "rejected": text.format(a, b, wrong),
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
    """A row in TRL's conversational form, so that TRL applies the chat template, as this library always does."""
    role = {key: "user" if key == "prompt" else "assistant" for key in row}
    return {key: [{"role": role[key], "content": text}] for key, text in row.items()}


def tokens_per_row(kind: str) -> float:
    """Mean number of tokens of a row as the model gets it: each answer with its prompt."""
    from foresight.nets.language import pretrained
    from foresight.training.corpus import encode

    policy = pretrained.load(model())
    sides = ("chosen",) if kind == "demonstrations" else ("chosen", "rejected")
    lengths = [sum(len(part) for side in sides for part in encode(policy, r["prompt"], r[side])) for r in rows()]
    return sum(lengths) / len(lengths)


def flops_per_token(passes: float) -> float:
    """Operations per token of a row: 2 per weight and forward pass; a backward pass counts as two."""
    from transformers import AutoModelForCausalLM

    return 2 * passes * sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(model()).parameters())


def dtype() -> Any:
    import torch

    from foresight.nets import precision as precisions

    return torch.bfloat16 if precisions.fast_bfloat16("cpu") else torch.float32


def _best(work: Callable[[], Any]) -> float:
    seconds = float("inf")
    for _ in range(TRIES):
        begun = time.perf_counter()
        work()
        seconds = min(seconds, time.perf_counter() - begun)
    return seconds


def products() -> float:
    """The fastest rate of matrix products with the size of a feed-forward layer of this model, in operations/s."""
    import torch

    a, b = torch.randn(512, 576, dtype=dtype()), torch.randn(576, 1536, dtype=dtype())
    return 20 * 2 * 512 * 576 * 1536 / _best(lambda: [a @ b for _ in range(20)])


def bandwidth() -> float:
    """The fastest rate at which memory is read, in bytes per second."""
    import torch

    block = torch.ones(2**26)  # 256 MiB, which no cache holds
    return 4 * len(block) / _best(block.sum)


def width() -> int:
    """Bytes of a weight in the matrix products of both sides."""
    return int(dtype().itemsize)


UPDATES, BATCH = 5, 16  # measured updates, after one warm-up update; rows per update


def trained(module: Any, kind: str, passes: int) -> dict[str, Any]:
    """Measure an algorithm's `train` on the rows of `kind`, as a user runs it; `passes` forward passes per token."""
    from foresight.envs.text.make import make
    from foresight.runtime.machine import POOL, configure_malloc

    configure_malloc(POOL)  # as `foresight train` does
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        task = make(str(write(folder, kind)))
        config = build_config(
            module.Config, model(), steps=UPDATES + 1, batch_size=BATCH, learning_rate=1e-5, anneal_lr=False
        )
        state = module.build(config)
        begun = time.perf_counter()
        for _ in module.train(config, task, state):
            seconds.append(time.perf_counter() - begun)
            begun = time.perf_counter()
    return _measured(seconds[1:], kind, passes)


def trl_settings(folder: str, updates: int) -> dict[str, Any]:
    """What all benchmarks set in TRL's configs: this library's precision, `updates` after a warm-up, no reports."""
    from foresight.nets import precision as precisions

    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": precisions.fast_bfloat16("cpu"),
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,  # faster; memory is not compared
        "max_steps": updates + 1,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
    }


def trained_by_trl(trainer: Any, config: Any, kind: str, passes: int, **options: Any) -> dict[str, Any]:
    """The same with a trainer of TRL and its config, with equal settings and those in `options`."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from foresight.data import forms
    from foresight.nets.language import pretrained

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        found = forms.read(str(write(folder, kind)))
        chat = pretrained.load(model()).tokenizer.chat_template is not None
        settings = config(
            **trl_settings(folder, UPDATES), per_device_train_batch_size=BATCH, learning_rate=1e-5, **options
        )
        trainer(
            model=model(),
            args=settings,
            train_dataset=Dataset.from_list([conversational(row) if chat else row for row in found]),
            callbacks=[Clock()],
        ).train()
    return _measured([b - a for a, b in itertools.pairwise(marks)], kind, passes)


def _measured(seconds: list[float], kind: str, passes: int) -> dict[str, Any]:
    from foresight.runtime import machine  # late: it imports torch, which a peer sets up itself

    peak = machine.peak_gib()
    rate = BATCH * tokens_per_row(kind) * len(seconds) / sum(seconds)
    return {
        "rate": rate,
        "seconds_per_update": sum(seconds) / len(seconds),
        "of_products": rate * flops_per_token(passes) / products(),
        "peak_gib": peak,
    }
