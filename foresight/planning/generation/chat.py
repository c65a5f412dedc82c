"""Language models as functions from a conversation to the next message: a local one, or a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from foresight.envs.text.task import Example
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation.dialogue import as_data
from foresight.planning.generation.rollout import complete, texts
from foresight.planning.generation.server import Server

Chat = Callable[[Sequence[dict[str, str]]], str]


def local(
    policy: LanguageModel,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    advice: str = "shorten the conversation, or lower --max-new-tokens",
) -> Chat:
    """A local model. Raises UserError if it has no chat template, or the conversation does not fit its context.

    `advice`: what to do about a conversation that is too long, with the options of the command.
    """
    if policy.tokenizer.chat_template is None:
        raise UserError("The model has no chat template, so it cannot hold a dialogue: choose one that has.")
    generator = torch.Generator().manual_seed(seed)

    def chat(messages: Sequence[dict[str, str]]) -> str:
        example = Example([as_data(policy, message) for message in messages])
        length = len(policy.encode(example.prompt))
        if length + max_new_tokens > policy.context:
            raise UserError(
                f"The dialogue has {length} tokens; with --max-new-tokens {max_new_tokens} it does not fit the model's "
                f"context of {policy.context}: {advice}."
            )
        return texts(policy, complete(policy, [example], 1, max_new_tokens, temperature, generator))[0]

    return chat


def served(url: str, max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> Chat:
    """The model of an OpenAI-compatible server, with its own chat template."""
    server = Server(url, None)
    return lambda messages: server.chat(messages, max_new_tokens, temperature, seed)
