"""Conversations between a language model and environments that answer it, in token ids.

Token ids go in and come out: what the model sampled is kept as sampled, and what an environment answers is tokenized
once, as the chat template renders it after the model's turn. So the next prompt is the last one, extended; nothing is
tokenized again, and what was trained on is what was sampled. Tokens of the environment are not the model's own
(`TokenBatch.own`): they are in no loss, and advantages pass over them without discount. They are data: a special token
in them is written with other brackets, so that an environment cannot end its message or begin a turn of the model.

A turn may begin the conversations of sub-agents (`envs.tools.episode.TeamEpisode`), for which the one that delegated
waits; their answers are its next message. How all of them are sampled is `multi_turn`'s business.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from foresight.data.text import TokenBatch, pad
from foresight.envs.text.task import Example, TextTask
from foresight.envs.tools import tool
from foresight.envs.tools.episode import Episode, Reply, TeamEpisode, close, graded, in_time
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.tokenizer import apply_chat_template, ids_of, special_texts

MARK = "MARK-OF-A-TURN"


@dataclasses.dataclass
class Dialogue:
    """One conversation: its first prompt, everything after it, and which of that the model sampled."""

    episode: Episode
    prompt: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprob: list[float] = dataclasses.field(default_factory=list)
    own: list[bool] = dataclasses.field(default_factory=list)
    begun: int = 0  # the place of the model's present turn in `tokens`
    fed: int = 0  # tokens that the model has read
    text: str = ""  # of both sides, for people
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # the same, message by message
    limit: int = 1  # of turns
    turns: int = 0
    failed: list[int] = dataclasses.field(default_factory=list)  # calls of each turn that returned an error
    seconds: list[float] = dataclasses.field(default_factory=list)  # of each turn: writing it, and its answer
    clock: float = 0.0  # when the present turn began
    over: bool = False  # the environment ended it
    cut: bool = False  # a limit ended it: of tokens, of turns, of the context, or of seconds
    path: tuple[int, ...] = ()  # its number and, of a sub-agent, before it the path of the one that delegated
    draws: list[float] = dataclasses.field(default_factory=list)  # in [0, 1): one decides a token
    parent: Dialogue | None = None
    members: list[Dialogue] = dataclasses.field(default_factory=list)  # its sub-agents
    waiting: int = 0  # sub-agents that have not ended
    sampled: int = 0  # tokens that the model wrote
    left: float = math.inf  # seconds of its environment
    late: bool = False  # the environment took longer

    @property
    def done(self) -> bool:
        """Whether no turn follows."""
        return self.over or self.cut

    def room(self, context: int, max_new_tokens: int) -> int:
        """The most tokens of its present turn: also what is left of the context and, in a team, of its budget."""
        left = getattr(self.episode, "tokens_left", max_new_tokens)
        return min(max_new_tokens, left, context - len(self.prompt) - self.begun)


@dataclasses.dataclass(frozen=True)
class Dialogues:
    """Finished conversations of P examples in groups of G: tokens, texts, and the parts of their rewards by name.

    `transcripts` are the messages of each; those of the model also have `tokens` and their summed `logprob`. `turns`
    are the failed calls and the seconds of each turn, `rows` the conversations themselves, with those of their
    sub-agents. A part that an episode does not have is NaN.
    """

    batch: TokenBatch
    texts: list[str]
    parts: dict[str, list[float]]
    transcripts: list[list[dict[str, Any]]]
    turns: list[list[tuple[int, float]]]
    rows: list[Dialogue] = dataclasses.field(default_factory=list)


def begin(policy: LanguageModel, task: TextTask, examples: Sequence[Example], group: int) -> list[Dialogue]:
    """`group` conversations about each example, before their first turn. Raises what `multi_turn.converse` does."""
    if task.episode is None:
        raise UserError(f"'{task.name}' has no environment to converse with.")
    if policy.tokenizer.chat_template is None:
        raise UserError(
            "A conversation needs a chat template, which this model does not have: choose one that has one, such as "
            "smollm2."
        )
    rows = list[Dialogue]()
    for example in examples:
        limit, seconds = (example.columns.get(name, getattr(task, name)) for name in ("turns", "episode_seconds"))
        start = functools.partial(in_time, seconds, task.name)
        episodes = [start(functools.partial(task.episode, example)) for _ in range(group)]
        opening = start(episodes[0].messages)
        prompt = policy.encode([as_data(policy, message) for message in opening])
        for episode in episodes:
            path = (len(rows),)
            rows.append(Dialogue(episode, list(prompt), messages=list(opening), limit=limit, path=path, left=seconds))
    return rows


def end_turn(
    policy: LanguageModel,
    row: Dialogue,
    stopped: bool,
    max_new_tokens: int,
    lock: threading.Lock | None = None,
) -> None:
    """Add the environment's answer to the sampled turn of a conversation, in place. `lock`: of the tokenizer.

    If it begins the conversations of sub-agents, these are its last `members`, and it is `waiting` for them.
    """
    before = getattr(row.episode, "failed", 0)
    _end_turn(policy, row, stopped, max_new_tokens, lock or threading.Lock())
    now = time.monotonic()
    row.failed.append(getattr(row.episode, "failed", 0) - before)
    row.seconds.append(now - (row.clock or now))
    row.clock = now


def _end_turn(policy: LanguageModel, row: Dialogue, stopped: bool, max_new_tokens: int, held: threading.Lock) -> None:
    turn = row.tokens[row.begun :]
    with held:
        text = policy.decode(turn)
    row.text += text
    logprob = sum(row.logprob[row.begun :])
    row.messages.append({"role": "assistant", "content": text, "tokens": len(turn), "logprob": logprob})
    row.turns += 1
    if in_team(row):
        cast(TeamEpisode, row.episode).spend(len(turn))
    if not stopped:
        row.cut = True
        return
    reply = _ask(row, lambda: row.episode.turn(text))
    if row.late:
        return
    if not reply.members:
        _answer(policy, row, reply, max_new_tokens, held)
        return
    first = len(row.members)
    for number, episode in enumerate(reply.members, first):
        opening = episode.messages()
        with held:
            prompt = policy.encode([as_data(policy, message) for message in opening])
        path = (*row.path, number)
        one = Dialogue(episode, prompt, messages=list(opening), limit=row.limit, path=path, parent=row, left=row.left)
        one.cut = one.room(policy.context, max_new_tokens) < 1
        row.members.append(one)
    row.waiting = sum(not one.done for one in row.members[first:])
    if not row.waiting:
        join(policy, row, max_new_tokens, held)


def in_team(row: Dialogue) -> bool:
    """Whether the conversation may have sub-agents."""
    return callable(getattr(row.episode, "joined", None))


def join(policy: LanguageModel, row: Dialogue, max_new_tokens: int, lock: threading.Lock | None = None) -> None:
    """Add the answers of the sub-agents to the conversation that waited for them, in place."""
    row.waiting = 0
    reply = _ask(row, cast(TeamEpisode, row.episode).joined)
    if not row.late:
        _answer(policy, row, reply, max_new_tokens, lock or threading.Lock())


def _ask(row: Dialogue, call: Callable[[], Any]) -> Any:
    """What the environment returns. One that takes longer than the seconds that are left is `late`, and left behind."""
    if row.left == math.inf:
        return call()
    began = time.monotonic()
    found = tool.within(max(row.left, 0.0), call)
    row.left -= time.monotonic() - began
    if found.done():
        return found.result()
    row.late = row.cut = True
    return None


def _answer(policy: LanguageModel, row: Dialogue, reply: Reply, max_new_tokens: int, lock: threading.Lock) -> None:
    """Add an environment's message, unless it or a limit ends the conversation."""
    if reply.message is None:
        row.over = True
        return
    with lock:
        after = between(policy, reply.message, row.tokens[row.begun :])
    begun = len(row.tokens) + len(after)
    if row.turns >= row.limit or not after or canceled(row) or len(row.prompt) + begun >= policy.context:
        row.cut = True
        return
    row.logprob += [0.0] * len(after)
    row.own += [False] * len(after)
    row.text += f"\n{reply.message['content']}\n"
    row.messages.append(reply.message)
    row.begun = begun
    row.cut = row.room(policy.context, max_new_tokens) < 1  # such as an empty budget
    row.tokens += after  # last: the tokens are read as soon as they stand here


def canceled(row: Dialogue) -> bool:
    """Whether the conversation of a team was canceled."""
    return bool(getattr(row.episode, "canceled", False))


def _parts(row: Dialogue) -> dict[str, float]:
    """The reward of a finished conversation by part: an outcome of 0 where the environment is late."""
    parts = None if row.late else _ask(row, lambda: graded(row.episode))
    late = {} if row.left == math.inf else {"late": float(row.late)}
    return {**(parts or {"outcome": 0.0}), "turns": float(row.turns), **late}


def document(row: Dialogue) -> dict[str, Any]:
    """A finished conversation with those of its sub-agents, for a trace: messages, sampled tokens, reward by part."""
    return {
        "path": list(row.path),
        "messages": row.messages,
        "tokens": row.sampled,
        "read": len(row.prompt) + len(row.tokens) - row.sampled if row.prompt else None,  # None: text of a server
        "ended": row.over,
        "parts": _parts(row),
        "members": [document(one) for one in row.members],
    }


def transcript(row: Dialogue) -> list[dict[str, Any]]:
    """The messages of a conversation; one with sub-agents ends with a message of the role "team": their documents."""
    team = [{"role": "team", "content": "", "members": [document(one) for one in row.members]}] if row.members else []
    return [*row.messages, *team]


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
    ids = ids_of(policy.tokenizer, tail, add_special_tokens=False)
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
    measured = [_parts(row) for row in rows]
    for row in rows:
        _ask(row, functools.partial(close, row.episode))
    names = dict.fromkeys(name for one in measured for name in one)
    parts = {name: [one.get(name, math.nan) for one in measured] for name in names}
    turns = [list(zip(row.failed, row.seconds, strict=True)) for row in rows]
    return Dialogues(batch, [row.text for row in rows], parts, [transcript(row) for row in rows], turns, list(rows))
