"""An agent: a language model that calls tools until it answers.

The prompt is that of training (`envs.tools.episode`): tools in the system prompt, calls and results as marked text. So
what `foresight train grpo --task` trains is what acts here. A model on a server is asked in OpenAI's form instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from foresight.agents import protocol
from foresight.envs.tools import tool
from foresight.envs.tools.calculator import Calculator
from foresight.envs.tools.episode import tools_of
from foresight.envs.tools.notebook import Notebook
from foresight.envs.tools.python import Python
from foresight.envs.tools.search import Index
from foresight.envs.tools.tool import Tool
from foresight.errors import UserError, unknown
from foresight.planning.generation.server import Server

Messages = list[dict[str, Any]]
Turn = Callable[[Messages, Sequence[Tool]], str]  # the next turn of the model, as text with marks
BUNDLED: dict[str, type[Any]] = {"calculator": Calculator, "python": Python, "notebook": Notebook}
SUFFIXES = (".md", ".txt", ".rst", ".py", ".html", ".csv", ".json", ".yaml", ".toml")  # of files that are searched
LARGEST_FILE = 1_000_000  # bytes of a file that is searched


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened: a `call` of a tool, its `result`, an `error` of a call, or the final `answer`.

    A `limit` ended the question without an answer: of turns, of the context, or an error of the model's server.
    """

    kind: Literal["call", "result", "error", "answer", "limit"]
    text: str
    name: str = ""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


def run(
    turn: Turn,
    tools: Sequence[Tool],
    messages: Messages,
    turns: int = 10,
    approve: tool.Approve | None = None,
    seconds: float = tool.SECONDS,
) -> Iterator[Event]:
    """Let a model act until it answers, at most `turns` turns; `messages` (OpenAI's form) are extended in place.

    `approve` is asked before a tool that writes runs; None approves. Errors of tools are results that the model reads.
    An error of `turn`, such as a full context, is a limit; before the model's first turn of all, it is raised.
    """
    for _ in range(turns):
        try:
            text = turn(messages, tools)
        except UserError as error:
            if not any(message["role"] == "assistant" for message in messages):
                raise
            yield Event("limit", str(error))
            return
        message = protocol.reply(text)
        messages.append(message)
        calls = tool.calls(text)
        if not calls:
            yield Event("answer", tool.answer(text))
            return
        made = message.get("tool_calls") or [None for _ in calls]  # none of them, if one cannot be read
        unread: list[str] = []
        for call, one in zip(calls, made, strict=True):
            written = call.problem or tool.write(call.name, **call.arguments)
            yield Event("call", written, call.name, call.arguments)
            result, succeeded = tool.execute(tools, call, seconds, approve)
            if one:
                messages.append({"role": "tool", "tool_call_id": one["id"], "content": result})
            else:
                unread.append(f"{tool.RESULT}{result}{tool.RESULT_END}")
            yield Event("result" if succeeded else "error", result, call.name)
        if unread:
            messages.append({"role": "user", "content": "\n".join(unread)})
    yield Event("limit", f"no answer after {turns} turns")


def local(chat: Callable[[Sequence[dict[str, str]]], str]) -> Turn:
    """The turns of a model in this process (`planning.generation.chat.local`), prompted as in training."""

    def turn(messages: Messages, tools: Sequence[Tool]) -> str:
        return chat(protocol.plain(messages, [one.schema for one in tools]))

    return turn


def served(server: Server, max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> Turn:
    """The turns of a model on an OpenAI-compatible server, which gets the tools in OpenAI's form."""

    def turn(messages: Messages, tools: Sequence[Tool]) -> str:
        options: dict[str, Any] = {"tools": [one.schema for one in tools]} if tools else {}
        return tool.encodable(protocol.text_of(server.message(messages, max_new_tokens, temperature, seed, **options)))

    return turn


def toolbox(names: Sequence[str]) -> list[Tool]:
    """The bundled tools by name: `calculator`, `python` (sandboxed), `notebook`, and `search:FOLDER` over its files.

    Raises UserError for an unknown name, and for two whose tools have a name in common.
    """
    found: list[Tool] = []
    owners: dict[str, str] = {}
    for name in names:
        kind, _, place = name.partition(":")
        if kind == "search" and place:
            new = documents(place)
        elif name in BUNDLED:
            new = tools_of(BUNDLED[name]())
        else:
            raise unknown("tool", name, [*BUNDLED, "search:FOLDER"])
        for one in new:
            if one.name in owners:
                raise UserError(
                    f"The tools {owners[one.name]} and {name} both have one named '{one.name}': leave one of them out"
                    f"{', or give search: a folder that holds both' if kind == 'search' else ''}."
                )
        owners |= {one.name: name for one in new}
        found += new
    return found


def documents(place: str) -> list[Tool]:
    """The tools `search` and `read` over the text files in a folder that can be read. Raises UserError without any."""
    folder = Path(place).expanduser()
    names, texts = list[str](), list[str]()
    for file in sorted(one for one in folder.rglob("*") if one.suffix in SUFFIXES):
        with contextlib.suppress(OSError):  # such as a file that another user alone may read
            if file.is_file() and file.stat().st_size <= LARGEST_FILE:
                name = readable(file.relative_to(folder))
                texts.append(f"{name}\n{file.read_text(errors='replace')}")
                names.append(name)
    if not texts:
        raise UserError(f"There are no text files to search in {place} ({', '.join(SUFFIXES)}).")
    index = Index(texts)

    def search(query: str) -> str:
        """Find files by words: their numbers, names and passages, the best first."""
        return "\n".join(f"[{n}] {names[n - 1]}: {text}" for n, text in index.search(query)) or "nothing was found"

    def read(number: int, start: int = 0) -> str:
        """Read a file by its number, from a character on."""
        return index.read(number)[start:]

    return [tool.of(search), tool.of(read)]


def readable(path: str | Path) -> str:
    """The name of a file as text: bytes that are no UTF-8 are replaced, as in its contents."""
    return os.fsencode(path).decode("utf-8", "replace")
