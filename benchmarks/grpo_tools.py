"""GRPO over conversations with a tool: 4 prompts x 8 conversations of two turns, one update per rollout.

Both sides train the same model on `calculator`, after ten updates of imitation: it calls the tool, reads the product,
and answers. Rewards are random numbers, so that every group has a gradient: those of
this model would be equal, and such groups are skipped here. Learning rate 1e-5, AdamW, clip 0.2, no KL term, float32
weights and bfloat16 matrix products where the processor supports them. The first update is warm-up; three are measured.
`calls` are those of a conversation. The model:

foresight data demonstrations --task calculator --prompts 240 --out runs/data/calculator.jsonl
foresight train sft --preset smollm2-calculator
"""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

from benchmarks import _language
from foresight.envs.tools.calculator import Calculator, evaluate
from foresight.training.options import build_config

UNIT = "completions/s"
PEER = "trl"
TARGET = 3.0
UPDATES = 3
SETTINGS = {"prompts": 4, "group": 8, "max_new_tokens": 48, "learning_rate": 1e-5, "temperature": 1.0}
TURNS = 6
TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' }}{% if message.role == 'tool' %}{{
'user\n<tool_response>' + message.content + '</tool_response>' }}{% else %}{{ message.role + '\n' }}{%
if message.tool_calls %}{% for call in message.tool_calls %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>'
}}{% endfor %}{% else %}{{ message.content }}{% endif %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{%
if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


class Drawn:
    """The calculator, whose conversations have random rewards."""

    instruction = Calculator.instruction
    questions = staticmethod(Calculator.questions)

    def reset(self, row: dict[str, Any]) -> str:
        """The question about one product."""
        return Calculator().reset(row)

    def calculate(self, expression: str) -> int:
        """Compute an expression of integers with + - * // % and parentheses."""
        return evaluate(expression)

    def reward(self, answer: str) -> float:
        """A number in [0, 1)."""
        return random.random()


def _model() -> str:
    from foresight.errors import UserError

    found = Path(os.environ.get("FORESIGHT_BENCH_MODEL") or "runs/sft-smollm2-calculator-0/export")
    if not found.is_dir():
        raise UserError("There is no model that calls the calculator: foresight train sft --preset smollm2-calculator")
    return str(found.resolve())


def _measured(seconds: list[float], rewards: list[float], calls: list[float]) -> dict[str, Any]:
    from foresight.runtime import machine  # late: it imports torch, which a peer sets up itself

    completions = SETTINGS["prompts"] * SETTINGS["group"]
    return {
        "rate": completions * len(seconds) / sum(seconds),
        "seconds_per_update": sum(seconds) / len(seconds),
        "rewards": rewards,
        "calls": calls,
        "peak_gib": machine.peak_gib(),
    }


def ours() -> dict[str, Any]:
    """This library's `grpo.train`, as a user runs it."""
    from foresight.algorithms.language import grpo
    from foresight.envs.tools.make import make
    from foresight.runtime.machine import POOL, configure_malloc

    configure_malloc(POOL)  # as `foresight train` does
    config = build_config(grpo.Config, model=_model(), steps=UPDATES + 1, **SETTINGS)
    task = make("calculator", Drawn, turns=TURNS)
    state = grpo.build(config)
    found, begun = [], time.perf_counter()
    for _, metrics, _ in grpo.train(config, task, state):
        found.append((time.perf_counter() - begun, metrics["reward"], metrics["calls"]))
        begun = time.perf_counter()
    return _measured(*(list(column) for column in zip(*found[1:], strict=True)))


def peer() -> dict[str, Any]:
    """TRL's GRPOTrainer with the tool as a function, at the same settings."""
    import tempfile

    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_schema, qwen3_template

    from foresight.envs.tools.make import make

    task = make("calculator", Drawn, turns=TURNS)
    rows = [{"prompt": task.episode(one).messages()} for one in task.train]
    rewards: list[float] = []
    called: list[float] = []

    def calculate(expression: str) -> int:
        """
        Compute an expression of integers with + - * // % and parentheses.

        Args:
            expression: the expression.
        """
        return evaluate(expression)

    def drawn(completions: list[Any], **_: Any) -> list[float]:
        scores = [random.random() for _ in completions]
        rewards.append(sum(scores) / len(scores))
        called.append(sum(one["role"] == "tool" for c in completions for one in c) / len(completions))
        return scores

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            marks.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(_model())
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template, tokenizer.response_schema = qwen3_template, qwen3_schema
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **_language.trl_settings(folder, UPDATES),
            per_device_train_batch_size=SETTINGS["prompts"] * SETTINGS["group"],
            num_generations=SETTINGS["group"],
            max_completion_length=2 * SETTINGS["max_new_tokens"],  # of a conversation: it is not reached
            max_tool_calling_iterations=TURNS - 1,
            temperature=SETTINGS["temperature"],
            learning_rate=SETTINGS["learning_rate"],
            beta=0.0,
            loss_type="grpo",
        )
        trainer = GRPOTrainer(
            model=_model(),
            processing_class=tokenizer,
            reward_funcs=drawn,
            args=config,
            train_dataset=Dataset.from_list(rows),
            tools=[calculate],
            callbacks=[Clock()],
        )
        trainer.train()
    return _measured([b - a for a, b in itertools.pairwise(marks)], rewards[1:], called[1:])
