"""A language model whose completions a function writes: for experiments with known error rates, and for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foresight.data.text import TokenBatch, pad

END = 0  # the token that ends a completion; every other token is a character


class Scripted:
    """`reply(text, draw)` continues a text; `draw` is seeded by the generator. A token is a character.

    It has what the methods of `planning.reasoning` need of a `LanguageModel`, and is its own `Completer`.
    """

    stop_ids = (END,)

    def __init__(self, reply: Callable[[str, random.Random], str], context: int = 1 << 20, chat: bool = False) -> None:
        self.reply, self.context, self.chat = reply, context, chat
        self.completer: Any = self

    def encode(self, prompt: Any, tools: Sequence[Any] | None = None) -> list[int]:
        """The characters of a prompt, or of the messages of a conversation, as code points."""
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        return list(map(ord, text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without the end."""
        return "".join(chr(token) for token in tokens if token != END)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        group: int = 1,
        max_new_tokens: int = 16,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
    ) -> TokenBatch:
        """See `planning.generation.decoding.generate`. Log-probabilities are 0: they are not known."""
        seeds = torch.randint(2**31 - 1, (len(prompts), group), generator=generator).tolist()
        rows, stopped = list[list[int]](), list[bool]()
        for prompt, few in zip(prompts, seeds, strict=True):
            for seed in few:
                text = self.reply(self.decode(prompt), random.Random(seed))
                ends = [text.find(word) + len(word) for word in stop if word in text]
                row = [*map(ord, text[: min(ends)])] if ends else [*map(ord, text), END]
                rows.append(row[:max_new_tokens])
                stopped.append(len(row) <= max_new_tokens)
        prompt_ids, prompt_length = pad(prompts)
        completion, length = pad(rows)
        shape = (len(prompts), group)
        logprob = torch.zeros(*shape, completion.shape[1])
        return TokenBatch(
            prompt_ids,
            prompt_length,
            completion.view(*shape, -1),
            length.view(shape),
            logprob,
            torch.tensor(stopped).view(shape),
            logprob,
        )
