"""Conversations of a random model with an environment that rewards vowels: what tests of dialogues share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from foresight.envs.text.task import Example, TextTask
from foresight.envs.tools.episode import Reply
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation import decoding, multi_turn
from tests import tiny_language

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


class Echo:
    """Answers every turn but the last with a digit; rewards vowels in the turns."""

    def __init__(self, question: str, turns: int) -> None:
        self.question, self.left, self.texts = question, turns, list[str]()

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]

    def turn(self, text: str) -> Reply:
        self.texts.append(text)
        self.left -= 1
        return Reply({"role": "user", "content": str(self.left)} if self.left else None)

    def parts(self) -> dict[str, float]:
        letters = "".join(self.texts)
        return {"outcome": sum(letters.count(vowel) for vowel in "aeiou") / max(len(letters), 1)}


def model(seed: int = 0) -> LanguageModel:
    """A fresh copy of the random model, with a template for conversations."""
    return conversational(tiny_language.model(seed))


def conversational(policy: LanguageModel) -> LanguageModel:
    """With a template; digits end a turn too, because a random model hardly samples its end token."""
    policy.tokenizer.chat_template = TEMPLATE
    policy.stop_ids = sorted({*policy.stop_ids, *policy.tokenizer.convert_tokens_to_ids(list("0123456789"))})
    return policy


def task(turns: int = 3, most: int = 9) -> TextTask:
    """Ten questions, each of which begins a conversation of at most `turns` turns."""
    questions = [Example(f"{i}") for i in range(10)]
    return TextTask(
        "echo",
        questions,
        questions,
        None,
        metric="outcome",
        episode=lambda one: Echo(str(one.prompt), turns),
        turns=most,
    )


def converse(policy: LanguageModel, what: TextTask, group: int = 2, tokens: int = 4, temperature: float = 1.0) -> Any:
    """`group` conversations about each of the first three questions, always with the same random numbers."""
    generator = torch.Generator().manual_seed(1)
    return multi_turn.converse(policy, what, what.train[:3], group, tokens, temperature, generator)


class Concurrent:
    """Samples as a server does: from several threads."""

    concurrent = True

    def __init__(self, policy: LanguageModel) -> None:
        self.policy, self.lock = policy, threading.Lock()

    def deliver(self) -> None:
        pass

    def __call__(self, prompts: Any, *settings: Any, **options: Any) -> Any:
        assert len(prompts) == 1
        with self.lock:
            return decoding.generate(self.policy, prompts, *settings, **options)


def where_they_are(steps: Callable[..., Any]) -> Callable[..., Any]:
    """A mutation of `TokenBatch.steps`: the model's tokens are not brought together over what was written between."""
    return lambda batch: torch.arange(batch.completion.shape[-1]).expand(batch.completion.shape)
