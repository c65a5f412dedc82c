"""GRPO on SmolLM2-135M: 8 prompts x 8 completions x 16 new tokens, temperature 1, one update per rollout.

Both sides are trained on `addition` from the same model folder: learning rate 1e-5, AdamW, clip 0.2, no KL term,
float32 weights and bfloat16 matrix products where the processor supports them. The first update is warm-up; six are
measured.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from benchmarks import _language
from foresight.training.options import build_config

UNIT = "completions/s"
PEER = "trl"
TARGET = 5.0
UPDATES = 6
SETTINGS = {"prompts": 8, "group": 8, "max_new_tokens": 16, "learning_rate": 1e-5, "temperature": 1.0}


def _measured(seconds: list[float], rewards: list[float]) -> dict[str, Any]:
    from foresight.runtime import machine  # late: it imports torch, which a peer sets up itself

    completions = SETTINGS["prompts"] * SETTINGS["group"]
    return {
        "rate": completions * len(seconds) / sum(seconds),
        "seconds_per_update": sum(seconds) / len(seconds),
        "rewards": rewards,
        "peak_gib": machine.peak_gib(),
    }


def ours() -> dict[str, Any]:
    """This library's `grpo.train`, as a user runs it."""
    from foresight.algorithms.language import grpo
    from foresight.envs.text.make import make
    from foresight.runtime.machine import POOL, configure_malloc

    configure_malloc(POOL)  # as `foresight train` does
    config = build_config(grpo.Config, steps=UPDATES + 1, **SETTINGS)
    task = make("addition")
    state = grpo.build(config)
    seconds, rewards, begun = [], [], time.perf_counter()
    for _, metrics, _ in grpo.train(config, task, state):
        seconds.append(time.perf_counter() - begun)
        rewards.append(metrics["reward"])
        begun = time.perf_counter()
    return _measured(seconds[1:], rewards[1:])


def peer() -> dict[str, Any]:
    """TRL's GRPOTrainer at the same settings."""
    import tempfile

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from foresight.envs.text.graders import last_integer
    from foresight.envs.text.make import make
    from foresight.nets.language import pretrained

    rows = [{"prompt": [{"role": "user", "content": e.prompt}], "answer": e.answer} for e in make("addition").train]
    rewards: list[float] = []

    def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        scores = [float(last_integer(c[0]["content"]) == int(a)) for c, a in zip(completions, answer, strict=True)]
        rewards.append(sum(scores) / len(scores))
        return scores

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **_language.trl_settings(folder, UPDATES),
            per_device_train_batch_size=SETTINGS["prompts"] * SETTINGS["group"],
            num_generations=SETTINGS["group"],
            max_completion_length=SETTINGS["max_new_tokens"],
            temperature=SETTINGS["temperature"],
            learning_rate=SETTINGS["learning_rate"],
            beta=0.0,
            loss_type="grpo",
        )
        trainer = GRPOTrainer(
            model=str(pretrained.packaged()),
            reward_funcs=correct,
            args=config,
            train_dataset=Dataset.from_list(rows),
            callbacks=[Clock()],
        )
        trainer.train()
    return _measured([b - a for a, b in itertools.pairwise(marks)], rewards[1:])
