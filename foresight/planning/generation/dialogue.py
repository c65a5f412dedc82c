"""Multi-turn rollouts: conversations between a language model and environments that answer it.

Token ids go in and come out: what the model sampled is kept as sampled, and what an environment answers is tokenized
once, as the chat template renders it after the model's turn. So the next prompt is the last one, extended; nothing is
tokenized again, and what was trained on is what was sampled. Tokens of the environment are not the model's own
(`TokenBatch.own`): they are in no loss, and advantages pass over them without discount. They are data: a special token
in them is written with other brackets, so that an environment cannot end its message or begin a turn of the model.

All conversations that are not over take their next turn together. Left out: turns of different conversations that
overlap, and a cache of keys and values that is kept between turns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from foresight.data.text import TokenBatch, pad
from foresight.envs.text.task import Example, TextTask
from foresight.envs.tools import tool
from foresight.envs.tools.episode import Episode
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.tokenizer import apply_chat_template, special_texts
from foresight.planning.generation.decoding import Completer, generate

MARK = "MARK-OF-A-TURN"


@dataclasses.dataclass
class Dialogue:
    """One conversation: its first prompt, everything after it, and which of that the model sampled."""

    episode: Episode
    prompt: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprob: list[float] = dataclasses.field(default_factory=list)
    own: list[bool] = dataclasses.field(default_factory=list)
    text: str = ""  # of both sides, for people
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # the same, message by message
    turns: int = 0
    over: bool = False  # the environment ended it
    cut: bool = False  # a limit ended it: of tokens, of turns, or of the context

    @property
    def done(self) -> bool:
        """Whether no turn follows."""
        return self.over or self.cut


@dataclasses.dataclass(frozen=True)
class Dialogues:
    """Finished conversations of P examples in groups of G: tokens, texts, and the parts of their rewards by name.

    `transcripts` are the messages of each; those of the model also have `tokens` and their summed `logprob`.
    """

    batch: TokenBatch
    texts: list[str]
    parts: dict[str, list[float]]
    transcripts: list[list[dict[str, Any]]]


def converse(
    policy: LanguageModel,
    task: TextTask,
    examples: Sequence[Example],
    group: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Dialogues:
    """`group` conversations about each example; a turn has at most `max_new_tokens` tokens, temperature 0 is greedy.

    Besides the parts of the episodes, `turns` is the number of the model's turns. A conversation that a limit ends
    keeps the outcome that its environment gives it then. Raises UserError for a model without a chat template, and
    for a first prompt that does not fit into the context.
    """
    if task.episode is None:
        raise UserError(f"'{task.name}' has no environment to converse with.")
    if policy.tokenizer.chat_template is None:
        raise UserError(
            "A conversation needs a chat template, which this model does not have: choose one that has one."
        )
    sampler: Completer = policy.completer or functools.partial(generate, policy)
    rows = []
    for example in examples:
        episodes = [task.episode(example) for _ in range(group)]
        opening = episodes[0].messages()
        prompt = policy.encode([as_data(policy, message) for message in opening])
        rows += [Dialogue(episode, list(prompt), messages=list(opening)) for episode in episodes]
    first = True
    while live := [row for row in rows if not row.done]:
        if first:  # the completions of one prompt share its computation
            prompts, count = [row.prompt for row in rows[::group]], group
        else:
            prompts, count = [row.prompt + row.tokens for row in live], 1
        batch = sampler(prompts, count, max_new_tokens, temperature, generator, stop=task.stop)
        sampled = zip(
            live, batch.completion.flatten(0, 1).tolist(), batch.logprob.flatten(0, 1).tolist(),
            batch.length.flatten().tolist(), batch.stopped.flatten().tolist(), strict=True,
        )  # fmt: skip
        for row, tokens, logprobs, length, stopped in sampled:
            take_turn(policy, row, tokens[:length], logprobs[:length], stopped, task.turns, max_new_tokens)
        first = False
    return gather(rows, group)


def take_turn(
    policy: LanguageModel,
    row: Dialogue,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    stopped: bool,
    turns: int,
    max_new_tokens: int,
) -> None:
    """Add a sampled turn and the environment's answer to a conversation, in place."""
    text = policy.decode(tokens)
    row.tokens += tokens
    row.logprob += logprobs
    row.own += [True] * len(tokens)
    row.text += text
    row.messages.append({"role": "assistant", "content": text, "tokens": len(tokens), "logprob": sum(logprobs)})
    row.turns += 1
    if not stopped:
        row.cut = True
        return
    reply = row.episode.turn(text)
    if reply.message is None:
        row.over = True
        return
    after = between(policy, reply.message, tokens)
    if row.turns >= turns or len(row.prompt) + len(row.tokens) + len(after) + max_new_tokens > policy.context:
        row.cut = True
        return
    row.tokens += after
    row.logprob += [0.0] * len(after)
    row.own += [False] * len(after)
    row.text += f"\n{reply.message['content']}\n"
    row.messages.append(reply.message)


def as_data(policy: LanguageModel, message: dict[str, str]) -> dict[str, str]:
    """A message of an environment in which nothing is a special token."""
    return {**message, "content": tool.escaped(message["content"], special_texts(policy.tokenizer))}


def between(policy: LanguageModel, message: dict[str, str], tokens: Sequence[int]) -> list[int]:
    """The ids from the end of a turn to the beginning of the next one, with `message` in between.

    The template's text after a turn, without the stop token if the turn `tokens` already ends with it.
    """
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "question"}, {"role": "assistant", "content": MARK}, as_data(policy, message),
    ]  # fmt: skip
    rendered = apply_chat_template(policy.tokenizer, conversation, add_generation_prompt=True, tokenize=False)
    _, mark, tail = str(rendered).partition(MARK)
    if not mark:
        raise UserError("The chat template of the model leaves out earlier turns: use a model whose template has them.")
    ids = list(policy.tokenizer.encode(tail, add_special_tokens=False))
    if tokens and ids and tokens[-1] == ids[0] and tokens[-1] in policy.stop_ids:
        ids = ids[1:]
    return ids


def gather(rows: Sequence[Dialogue], group: int) -> Dialogues:
    """Finished conversations, example by example, as one batch with the parts of their rewards."""
    prompts, lengths = pad([row.prompt for row in rows[::group]])
    tokens, length = pad([row.tokens for row in rows])
    shape = (len(rows) // group, group, tokens.shape[1])
    logprob, own = torch.zeros(tokens.shape), torch.zeros(tokens.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        logprob[i, : len(row.logprob)] = torch.tensor(row.logprob)
        own[i, : len(row.own)] = torch.tensor(row.own)
    batch = TokenBatch(
        prompts, lengths, tokens.view(shape), length.view(shape[:2]), logprob.view(shape),
        torch.tensor([row.over for row in rows]).view(shape[:2]), own=own.view(shape),
    )  # fmt: skip
    measured = [{**row.episode.parts(), "turns": float(row.turns)} for row in rows]
    parts = {name: [one[name] for one in measured] for name in measured[0]}
    return Dialogues(batch, [row.text for row in rows], parts, [row.messages for row in rows])
