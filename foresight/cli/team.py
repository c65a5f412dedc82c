"""`foresight team`: a manager and sub-agents of one language model, and the trace of what they did."""

from __future__ import annotations

import json as jsons
import re
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import tyro

from foresight.cli import fields, screen
from foresight.errors import UserError

LONGEST = 1_000_000  # characters of a document


def team(
    model: Annotated[str, tyro.conf.Positional],
    goal: Annotated[str, tyro.conf.Positional],
    *,
    tools: tuple[str, ...] = (),
    documents: tuple[str, ...] = (),
    depth: int = 1,
    budget: int = 2_000,
    instruction: str = "",
    turns: int = 10,
    seconds: float = float("inf"),
    tool_seconds: float = 30.0,
    writes: bool = False,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    device: str = "auto",
    out: str | None = None,
    json: bool = False,
) -> int:
    """Let a manager and its sub-agents work on a goal. Writes the trace; the exit code is 1 without an answer.

    Args:
        model: "smollm2", a run directory with an export, a Hugging Face folder, a hub id, or the URL of an
            OpenAI-compatible server.
        goal: what to do.
        tools: of the manager, which may give them to sub-agents: calculator, python (sandboxed), notebook,
            search:FOLDER.
        documents: text files. The manager reads their names, and a sub-agent those that it is given.
        depth: how far agents may delegate: 0 is one agent, 1 a manager with sub-agents.
        budget: sampled tokens of the whole team, at most.
        instruction: the system prompt before the tools.
        turns: maximum turns of each agent.
        seconds: maximum seconds of the whole; Ctrl-C cancels too, and writes the trace.
        tool_seconds: maximum seconds of a call.
        writes: let tools that write run, without asking.
        max_new_tokens: maximum tokens of a turn.
        temperature: sampling temperature; 0 is greedy.
        seed: sampling seed.
        device: auto, cpu, cuda, cuda:1 or mps.
        out: the trace to write; default: runs/team/GOAL.json.
        json: print the trace instead of the answer.
    """
    from foresight.agents import agent as agents
    from foresight.agents import team as teams
    from foresight.runtime.checkpoints import checkpoint

    if turns < 1 or max_new_tokens < 1:
        raise UserError(f"--turns and --max-new-tokens must be at least 1, not {turns} and {max_new_tokens}.")
    fields.check_seed(seed)
    if not tool_seconds > 0:
        raise UserError(f"--tool-seconds must be above 0, not {tool_seconds:g}.")
    texts = {agents.readable(Path(name).name): _read(name) for name in documents}
    if len(texts) < len(documents):
        raise UserError("Two --documents have the same name: rename one, since agents ask for documents by name.")
    approve = None if writes else lambda tool, arguments: False
    one = teams.Team(
        goal, agents.toolbox(tools), budget, depth, texts, instruction, seconds, tool_seconds, approve,
    )  # fmt: skip
    path = Path(out or f"runs/team/{re.sub('[^a-z0-9]+', '-', goal.lower()).strip('-')[:40] or 'goal'}.json")
    fields.check_file(path)
    before = _cancel_on_interrupt(one)
    try:
        if model.startswith(("http://", "https://")):
            from foresight.planning.generation.server import PATIENCE, Server

            server = Server(model, None, patience=min(seconds, PATIENCE), report=screen.note)
            found = teams.ask(agents.served(server, max_new_tokens, temperature, seed), one, turns, model)
        else:
            from foresight.runtime import machine
            from foresight.runtime.reasoning import think as thinking

            policy = thinking.model(model, machine.pick_device(device))
            found = teams.run(policy, one, turns, max_new_tokens, temperature, seed, model)
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    if json:
        screen.emit(found)
    else:
        _show(found, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write_atomic(path, jsons.dumps(found, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"Cannot write to {path}: {error.strerror or error}. Choose another --out.") from error
    return 0 if found["root"]["answer"] is not None else 1


def _show(found: dict[str, Any], path: Path) -> None:
    def lines(node: dict[str, Any]) -> None:
        indent = "  " * (len(node["path"]) - 1)
        answer = node["refused"] or "(no answer)" if node["answer"] is None else node["answer"]
        screen.stdout().print(
            f"{indent}{node['goal']} [{node['tokens']} tokens] {answer}", markup=False, highlight=False, soft_wrap=True
        )
        for one in node["members"]:
            lines(one)

    lines(found["root"])
    left = f"{found['tokens']} of {found['budget']} tokens"
    screen.stdout().print(f"{left}{', canceled' if found['canceled'] else ''}: {path}", markup=False, soft_wrap=True)


def _cancel_on_interrupt(team: Any) -> Any:
    """Let Ctrl-C cancel the team, and again interrupt. Returns the former handler; None outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    before = signal.getsignal(signal.SIGINT)

    def cancel(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        team.cancel()

    signal.signal(signal.SIGINT, cancel)
    return before


def _read(name: str) -> str:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is no text: give --documents in UTF-8.") from error
    except OSError as error:
        raise UserError(f"Cannot read {name}: {error.strerror}. Give --documents that exist.") from error
    if len(text) > LONGEST:
        raise UserError(f"{name} has {len(text):,} characters: a document has at most {LONGEST:,}.")
    return text
