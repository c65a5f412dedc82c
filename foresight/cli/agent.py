"""`foresight agent`: a language model with tools, of this library or of MCP servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import tyro

from foresight.cli import fields, screen
from foresight.errors import UserError


def agent(
    model: Annotated[str, tyro.conf.Positional],
    question: Annotated[str | None, tyro.conf.Positional] = None,
    *,
    tools: tuple[str, ...] = (),
    mcp: tuple[str, ...] = (),
    approve: Literal["ask", "all", "none"] = "ask",
    instruction: str = "",
    turns: int = 10,
    tool_seconds: float = 30.0,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Let a language model use tools until it answers. Without a question, ask questions line by line.

    Args:
        model: "smollm2", a run directory with an export, a Hugging Face folder, a hub id, or the URL of an
            OpenAI-compatible server.
        question: what to do.
        tools: calculator, python (sandboxed), notebook, search:FOLDER.
        mcp: MCP servers: a command each, in quotes, or a URL.
        approve: whether tools that write run: ask (on the terminal), all, or none.
        instruction: the system prompt before the tools.
        turns: maximum turns of the model for one question.
        tool_seconds: maximum seconds of a call.
        max_new_tokens: maximum tokens of a turn.
        temperature: sampling temperature; 0 is greedy.
        seed: sampling seed.
        device: auto, cpu, cuda, cuda:1 or mps.
        json: print one JSON document: the messages in OpenAI's form, and the counts of calls. It is also printed of a
            conversation that an error or Ctrl-C ends.
    """
    import contextlib

    from foresight.agents import agent as agents

    if turns < 1 or max_new_tokens < 1:
        raise UserError(f"--turns and --max-new-tokens must be at least 1, not {turns} and {max_new_tokens}.")
    fields.check_seed(seed)
    if not tool_seconds > 0:
        raise UserError(f"--tool-seconds must be above 0, not {tool_seconds:g}.")
    allowed = agents.toolbox(tools)
    with contextlib.ExitStack() as stack:
        if mcp:
            from foresight.agents.mcp import connect

            taken = [one.name for one in allowed]
            allowed = [*allowed, *stack.enter_context(connect(mcp, tool_seconds, taken))]
        turn = _turn(model, max_new_tokens, temperature, seed, device)
        decide = {"ask": _ask, "all": None, "none": lambda tool, arguments: False}[approve]
        messages: list[dict[str, Any]] = [{"role": "system", "content": instruction}] if instruction else []
        counts = {"calls": 0, "failed_calls": 0, "answered": 0, "questions": 0}
        try:
            for line in [question] if question is not None else _lines():
                messages.append({"role": "user", "content": line})
                counts["questions"] += 1
                for event in agents.run(turn, allowed, messages, turns, decide, tool_seconds):
                    counts["calls"] += event.kind == "call"
                    counts["failed_calls"] += event.kind == "error"
                    counts["answered"] += event.kind == "answer"
                    if not json:
                        _show(event)
                    elif event.kind == "limit":
                        screen.note(event.text)
        except (UserError, KeyboardInterrupt):
            if json and any(one["role"] == "assistant" for one in messages):
                _emit(model, counts, messages)
            raise
    if json:
        _emit(model, counts, messages)
    return 0 if counts["answered"] == counts["questions"] else 1


def _emit(model: str, counts: dict[str, int], messages: list[dict[str, Any]]) -> None:
    from foresight.planning.generation.server import without_user

    screen.emit({"model": without_user(model), **counts, "messages": messages})


def _turn(model: str, max_new_tokens: int, temperature: float, seed: int, device: str) -> Any:
    from foresight.agents import agent as agents

    if model.startswith(("http://", "https://")):
        from foresight.planning.generation.server import Server

        return agents.served(Server(model, None, report=screen.note), max_new_tokens, temperature, seed)
    from foresight.planning.generation import chat
    from foresight.runtime import machine
    from foresight.runtime.reasoning import think as thinking

    policy = thinking.model(model, machine.pick_device(device))
    advice = "lower --max-new-tokens or --turns, or ask in another conversation, since all lines are in one"
    return agents.local(chat.local(policy, max_new_tokens, temperature, seed, advice))


def _lines() -> Iterator[str]:
    """Questions from the terminal or a pipe, until its end."""
    while True:
        if sys.stdin.isatty():
            screen.stderr().print("> ", end="")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _ask(tool: Any, arguments: dict[str, Any]) -> bool:
    """Ask on the terminal; without one, nothing that writes is approved."""
    if not sys.stdin.isatty():
        screen.note(f"{tool.name} writes and is not approved: there is no terminal to ask on. Give --approve all.")
        return False
    screen.stderr().print(f"Run {tool.name} with {arguments}? [y/N] ", end="", markup=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _show(event: Any) -> None:
    styles = {"call": "cyan", "result": "dim", "error": "red", "answer": "", "limit": "red"}
    screen.stdout().print(event.text, style=styles[event.kind], markup=False, highlight=False, soft_wrap=True)
