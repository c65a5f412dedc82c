"""A team: a manager delegates to sub-agents, which work in parallel, read nothing of one another, and answer by schema.

A manager calls `delegate` with a goal, the names of allowed tools and of documents, a budget of sampled tokens, and the
JSON schema of the answer. Several calls of one turn run in one batch (`planning.generation.multi_turn`). A sub-agent
reads its goal and its documents alone. What all may read is the board, to which `post` adds and from which nothing is
removed. A budget is taken from that of the manager, and what is left of it is given back: the tokens of a team never
exceed the budget of its first manager. An answer that does not fit the schema is counted and answered with the schema.

The trace of a team is one JSON document:

    {"format": 1, "goal": "...", "model": "runs/mine", "depth": 1, "budget": 2000, "canceled": false,
     "tokens": 412,                                  sampled by all of the team
     "board": [{"by": [0, 1], "text": "..."}, ...],  by: the path of the conversation that posted
     "root": NODE}

    NODE = {"path": [0, 1],                          its number, after the path of the one that delegated
            "goal": "...", "tools": ["..."], "budget": 500, "documents": ["..."],
            "answer": "..." or null,                 null: there is none
            "refused": "",                           why its last turn was not written, such as a full context
            "messages": [{"role": "system" | "user" | "assistant", "content": "...",
                          "tokens": 31, "logprob": -2.5}, ...],  the last two of an assistant alone
            "version": "...",                        of the weights that sampled: the model as it was named
            "tokens": 98, "read": 240,               sampled by this conversation, and read by it (null: not known)
            "ended": true,                           false: a limit or a cancellation ended it
            "parts": {"outcome": 1.0, "malformed": 0.0, "calls": 2.0, "failed_calls": 0.0, "members": 0.0,
                      "team_tokens": 98.0, "turns": 2.0, ...},  the reward by part
            "members": [NODE, ...]}                  its sub-agents, in the order of their delegation
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from foresight.agents import protocol
from foresight.envs.text.task import Example, TextTask
from foresight.envs.tools import tool
from foresight.envs.tools.episode import Reply
from foresight.envs.tools.tool import Call, Tool
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation import dialogue, multi_turn
from foresight.planning.generation.dialogue import Dialogue
from foresight.planning.generation.server import without_user

FORMAT = 1
LEAST = 8  # tokens: no shorter budget holds an answer
ANSWER: dict[str, Any] = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
DELEGATE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "goal": {"type": "string"}, "tools": {"type": "array"}, "budget": {"type": "integer"},
        "documents": {"type": "array"}, "schema": {"type": "object"},
    },
    "required": ["goal", "budget"],
}  # fmt: skip
TOKEN = 4  # characters that count as a token of a server


@dataclasses.dataclass
class Team:
    """What the conversations of one team share. Raises UserError for limits without room for an answer.

    `budget` is in sampled tokens, `seconds` in seconds of the whole (infinity: no limit), `tool_seconds` in those of
    a call, which ends with the whole. `grade` returns the outcome of the manager's answer, in [0, 1]; without it, an
    answer is 1.
    """

    goal: str
    tools: Sequence[Tool] = ()
    budget: int = 2_000
    depth: int = 1  # how far sub-agents may delegate; 0: one agent
    documents: Mapping[str, str] = dataclasses.field(default_factory=dict)
    instruction: str = ""
    seconds: float = float("inf")
    tool_seconds: float = tool.SECONDS
    approve: tool.Approve | None = None
    grade: Callable[[str], float] | None = None

    def __post_init__(self) -> None:
        """Check the limits."""
        if self.budget < LEAST:
            raise UserError(f"The budget is {self.budget}: a team needs at least {LEAST} tokens for one answer.")
        if self.depth < 0 or not self.seconds > 0:
            raise UserError(f"depth is {self.depth} and seconds {self.seconds:g}: use at least 0, and more than 0.")
        if not self.tool_seconds > 0:
            raise UserError(f"tool_seconds is {self.tool_seconds:g}: use more than 0.")
        if taken := {one.name for one in self.tools} & {"delegate", "post", "read_board"}:
            raise UserError(f"The tool '{min(taken)}' has a name of the team's own tools: rename it.")
        self._posts: list[dict[str, Any]] = []
        self._canceled = threading.Event()
        self._end = time.monotonic() + self.seconds

    @property
    def board(self) -> tuple[dict[str, Any], ...]:
        """What was posted, in order: copies, since the board only grows."""
        return tuple(dict(post) for post in self._posts)

    def post(self, by: Sequence[int], text: str) -> None:
        """Add a line to the board: a line break would let a post look like that of another."""
        self._posts.append({"by": list(by), "text": " ".join(text.splitlines())})

    def cancel(self) -> None:
        """End all conversations at their next token."""
        self._canceled.set()

    @property
    def canceled(self) -> bool:
        """Whether the team was canceled, or its time is over."""
        return self._canceled.is_set() or time.monotonic() > self._end

    @property
    def left(self) -> float:
        """Seconds of the whole that are left."""
        return max(0.0, self._end - time.monotonic())

    def in_time(self, turn: Callable[[], str]) -> str | None:
        """The text of a turn; None, and the team is canceled, if its time is over before."""
        if self._end == math.inf:
            return turn()
        found = tool.within(self.left, turn)
        if not found.done():
            self.cancel()
            return None
        return found.result()


class Member:
    """The conversation of one agent of a team (`envs.tools.episode.TeamEpisode`)."""

    def __init__(
        self,
        team: Team,
        goal: str,
        tools: Sequence[Tool],
        budget: int,
        documents: Sequence[str],
        schema: dict[str, Any] | None = None,
        path: tuple[int, ...] = (0,),
    ) -> None:
        self.team, self.goal, self.allowed, self.budget, self.schema = team, goal, list(tools), budget, schema
        self.documents, self.path = list(documents), path
        self.tokens_left, self.tokens = budget, 0
        self.answer: str | None = None
        self.refused = ""  # why its next turn could not be written, such as a full context
        self.called = self.failed = self.malformed = 0
        self.members: list[Member] = []
        self._blocks: list[str | Member] = []  # of the last turn: results, and sub-agents that are not joined yet
        self.tools = [*self.allowed, *self._own()]

    @property
    def canceled(self) -> bool:
        """Whether the team was canceled."""
        return self.team.canceled

    @property
    def manages(self) -> bool:
        """Whether it may delegate."""
        return len(self.path) <= self.team.depth

    def _own(self) -> list[Tool]:
        """The tools of the team: none in a team of one agent."""
        if not self.team.depth:
            return []

        def post(text: str) -> str:
            """Add a line to the board of the team."""
            self.team.post(self.path, text)
            return "posted"

        def read_board(start: int = 0) -> str:
            """How many lines the board of the team has, and those from number start on."""
            lines = [f"{'.'.join(map(str, one['by']))}: {one['text']}" for one in self.team.board]
            return "\n".join([f"lines on the board: {len(lines)}; from {start} on:", *lines[start:]])

        own = [tool.of(post), tool.of(read_board)]
        if self.manages:
            about = "Let a sub-agent work on a goal. It reads only the goal and the documents that you name."
            own = [Tool("delegate", about, DELEGATE, lambda **given: None), *own]
        return own

    def opening(self) -> list[dict[str, str]]:
        """The instruction and the goal, with the documents that it reads."""
        system = [{"role": "system", "content": self.team.instruction}] if self.team.instruction else []
        text = self.goal
        if self.documents and self.manages:  # a manager reads names, and gives the documents to sub-agents
            text += "\nDocuments: " + ", ".join(self.documents)
        elif self.documents:
            text += "".join(f"\n{name}:\n{self.team.documents[name]}" for name in self.documents)
        if self.schema is not None:
            text += f"\nAnswer with JSON of this schema: {json.dumps(self.schema)}"
        return [*system, {"role": "user", "content": text}]

    def messages(self) -> list[dict[str, str]]:
        """The conversation before the first turn, with the tools in the system prompt, as in training."""
        return protocol.plain(self.opening(), [one.schema for one in self.tools])

    def spend(self, tokens: int) -> None:
        """Count the sampled tokens of a turn."""
        self.tokens, self.tokens_left = self.tokens + tokens, self.tokens_left - tokens

    def turn(self, text: str) -> Reply:
        """The results of the calls in `text`, or sub-agents; without a call, `text` is the answer."""
        found = tool.calls(text)
        if not found:
            return self._answered(tool.answer(text))
        self._blocks = []
        for call in found:
            self._blocks.append(self._delegated(call) if call.name == "delegate" else self._executed(call))
        new = tuple(one for one in self._blocks if isinstance(one, Member))
        return Reply(None, new) if new else self._results()

    def _answered(self, text: str) -> Reply:
        if self.schema is None:
            self.answer = text
            return Reply(None)
        try:
            given = json.loads(text)
            problem = tool.mismatch(self.schema, given) if isinstance(given, dict) else "it is no JSON object"
        except (ValueError, RecursionError):
            problem = "it is not JSON"
        if problem:
            self.malformed += 1
            return Reply(_user(f"error: the answer does not fit: {problem}. The schema is {json.dumps(self.schema)}"))
        self.answer = text
        return Reply(None)

    def _executed(self, call: Call) -> str:
        seconds = min(self.team.tool_seconds, self.team.left)
        result, succeeded = tool.execute(self.tools, call, seconds, self.team.approve)
        self.called, self.failed = self.called + 1, self.failed + (not succeeded)
        self.malformed += bool(tool.malformed(self.tools, call))
        return result

    def _delegated(self, call: Call) -> str | Member:
        self.called += 1
        problem, given = self._problem(call), call.arguments
        if problem:
            self.failed += 1
            return f"error: {problem}"
        names = given.get("tools", [])
        chosen = [one for one in self.allowed if one.name in names]
        path, schema = (*self.path, len(self.members)), given.get("schema", ANSWER)
        member = Member(
            self.team, given["goal"], chosen, given["budget"], given.get("documents", []), schema, path,
        )  # fmt: skip
        self.members.append(member)
        self.tokens_left -= member.budget
        return member

    def _problem(self, call: Call) -> str:
        """Why a delegation is refused; "" if it is not."""
        if not self.manages:
            return f"the depth limit of {self.team.depth} is reached: do it yourself"
        if problem := tool.malformed(self.tools, call):
            self.malformed += 1
            return problem
        given, known = call.arguments, [one.name for one in self.allowed]
        for name in given.get("tools", []):
            if name not in known:
                return f"there is no tool {str(name)[:80]!r} to give. Tools: {', '.join(known) or 'none'}"
        for name in given.get("documents", []):
            if name not in self.documents:
                return f"there is no document {str(name)[:80]!r}. Documents: {', '.join(self.documents) or 'none'}"
        most = self.tokens_left - LEAST  # the manager has to answer too
        if not LEAST <= given["budget"] <= most:
            return f"the budget is {given['budget']}: it must be from {LEAST} to {most} tokens, which are left"
        if "schema" in given:
            try:
                Tool("answer", "", given["schema"], lambda: None)
            except UserError as error:
                self.malformed += 1
                return str(error)
        return ""

    def joined(self) -> Reply:
        """The results of a turn with sub-agents; what they did not use is given back."""
        for one in self._blocks:
            if isinstance(one, Member):
                self.tokens_left += one.tokens_left
        return self._results()

    def _results(self) -> Reply:
        texts = [one._result() if isinstance(one, Member) else one for one in self._blocks]
        return Reply(_user("\n".join(f"{tool.RESULT}{text}{tool.RESULT_END}" for text in texts)))

    def _result(self) -> str:
        if self.answer is not None:
            return tool.shown(self.answer)
        why = "the team was canceled" if self.canceled else f"{self.tokens} tokens of {self.budget} were used"
        why = self.refused or why
        return f"error: the sub-agent {'.'.join(map(str, self.path))} gave no answer: {why}"

    def parts(self) -> dict[str, float]:
        """The outcome, counts, and the sampled tokens of this conversation and its sub-agents'."""
        graded = self.team.grade if self.path == (0,) else None
        outcome = 0.0 if self.answer is None else 1.0 if graded is None else float(graded(self.answer))
        counts = {"malformed": self.malformed, "calls": self.called, "failed_calls": self.failed}
        counts |= {"members": len(self.members), "team_tokens": self.team_tokens()}
        return {"outcome": outcome, **{name: float(count) for name, count in counts.items()}}

    def team_tokens(self) -> int:
        """The sampled tokens of this conversation and of its sub-agents'."""
        return self.tokens + sum(member.team_tokens() for member in self.members)


def manager(team: Team) -> Member:
    """The first conversation of a team, which has all its tools, documents and budget."""
    return Member(team, team.goal, team.tools, team.budget, list(team.documents))


def run(
    policy: LanguageModel,
    team: Team,
    turns: int = 10,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    name: str = "",
) -> dict[str, Any]:
    """Let a team of one model act until its manager has answered or a limit ends it; returns the trace.

    All its conversations are rows of one batch; with a server, each sends its requests in a thread. `turns` and
    `max_new_tokens` limit each conversation and turn; `name` is the version in the trace.
    """
    first = manager(team)
    task = TextTask("team", (), (), None, episode=lambda example: first, turns=turns)
    generator = torch.Generator().manual_seed(seed)
    found = multi_turn.converse(policy, task, [Example(team.goal)], 1, max_new_tokens, temperature, generator)
    return trace(team, found.rows[0], name)


def ask(
    turn: Callable[[list[dict[str, Any]], Sequence[Tool]], str], team: Team, turns: int = 10, name: str = ""
) -> dict[str, Any]:
    """As `run`, with a function that writes the turns as text (`agents.agent.Turn`), such as a server's or a script.

    Sub-agents run in threads. Their tokens are not known: `TOKEN` characters count as one, and a turn counts no more
    than what is left of the budget. A turn that is not written when the time of the team is over is left behind in its
    thread. An error of `turn` ends that conversation alone, and its manager reads why; before the first turn of all, it
    is raised.
    """

    def hold(row: Dialogue) -> None:
        member: Member = row.episode  # type: ignore[assignment]
        while not row.done:
            if team.canceled or row.turns == turns or member.tokens_left < 1:
                row.cut = True
                return
            sent = [{"role": m["role"], "content": m["content"]} for m in row.messages]
            try:
                text = team.in_time(functools.partial(turn, sent, member.tools))
            except UserError as error:
                if row is root and not row.turns:
                    raise
                member.refused, row.cut = str(error), True
                return
            if text is None:
                continue
            tokens = -(-len(text) // TOKEN)
            over, tokens = tokens > member.tokens_left, min(tokens, member.tokens_left)
            row.turns, row.sampled = row.turns + 1, row.sampled + tokens
            row.messages.append({"role": "assistant", "content": text, "tokens": tokens})
            member.spend(tokens)
            if over:
                row.cut = True
                return
            reply = member.turn(text)
            if reply.members:
                new = [_row(one, row) for one in reply.members]  # type: ignore[arg-type]
                row.members += new
                with ThreadPoolExecutor(len(new)) as pool:
                    list(pool.map(hold, new))
                reply = member.joined()
            if reply.message is None:
                row.over = True
            else:
                row.messages.append(reply.message)

    root = _row(manager(team))
    hold(root)
    return trace(team, root, name)


def trace(team: Team, root: Dialogue, name: str = "") -> dict[str, Any]:
    """The trace of a finished team, as the docstring of this module has it; `name` without user and password."""
    name = without_user(name)
    return {
        "format": FORMAT,
        "goal": team.goal,
        "model": name,
        "depth": team.depth,
        "budget": team.budget,
        "canceled": team.canceled,
        "tokens": root.episode.team_tokens(),  # type: ignore[attr-defined]
        "board": list(team.board),
        "root": _node(root, name),
    }


def _node(row: Dialogue, name: str) -> dict[str, Any]:
    member: Member = row.episode  # type: ignore[assignment]
    return {
        **dialogue.document(row),
        "goal": member.goal,
        "tools": [one.name for one in member.allowed],
        "budget": member.budget,
        "documents": member.documents,
        "answer": member.answer,
        "refused": member.refused,
        "version": name,
        "members": [_node(one, name) for one in row.members],
    }


def _row(member: Member, parent: Dialogue | None = None) -> Dialogue:
    return Dialogue(member, [], messages=list(member.opening()), path=member.path, parent=parent)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
