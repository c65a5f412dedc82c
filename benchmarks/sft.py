"""SFT of SmolLM2-135M: 16 demonstrations an update, one to eight sentences each, no packing.

Both sides learn the same rows from the same model folder: learning rate 1e-5, AdamW, float32 weights and bfloat16
products where the processor has them. The first update warms up; five are counted. A row has the tokens of its prompt
and answers, whether they are computed once or several times; `of_products` is the share of the matrix-multiply limit
of 3 forward passes a token (a backward pass is two).
"""

from __future__ import annotations

import itertools
import resource
import tempfile
import time
from typing import Any

from benchmarks import _language

UNIT = "tokens/s"
PEER = "trl"
TARGET = 1.5
UPDATES, BATCH, KIND, PASSES = 5, 16, "demonstrations", 3


def _measured(seconds: list[float]) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rate = BATCH * _language.tokens_per_row(KIND) * len(seconds) / sum(seconds)
    return {
        "rate": rate,
        "seconds_per_update": sum(seconds) / len(seconds),
        "of_products": rate * _language.flops_per_token(PASSES) / _language.products(),
        "peak_gib": peak,
    }


def ours() -> dict[str, Any]:
    """This library's `sft.train`, as a user runs it."""
    from foresight.algorithms.language import sft
    from foresight.envs.text import make
    from foresight.runtime.machine import keep_memory
    from foresight.runtime.session import PASSING

    keep_memory(PASSING)  # as `foresight train` does
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        task = make(str(_language.write(folder, KIND)))
        config = sft.Config(_language.model(), steps=UPDATES + 1, batch=BATCH, learning_rate=1e-5, anneal=False)
        state = sft.build(config)
        begun = time.perf_counter()
        for _ in sft.train(config, task, state):
            seconds.append(time.perf_counter() - begun)
            begun = time.perf_counter()
    return _measured(seconds[1:])


def peer() -> dict[str, Any]:
    """TRL's SFTTrainer at the same settings."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from foresight.data import forms
    from foresight.nets import pretrained

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        rows = forms.read(str(_language.write(folder, KIND)))
        chat = pretrained.load(_language.model()).tokenizer.chat_template is not None
        config = SFTConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=pretrained.fast_bfloat16("cpu"),
            per_device_train_batch_size=BATCH,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            completion_only_loss=True,
            gradient_checkpointing=False,  # faster; memory is not what is compared
            max_steps=UPDATES + 1,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = SFTTrainer(
            model=_language.model(),
            args=config,
            train_dataset=Dataset.from_list([_language.conversational(row) if chat else row for row in rows]),
            callbacks=[Clock()],
        )
        trainer.train()
    return _measured([b - a for a, b in itertools.pairwise(marks)])
