"""An episode: a conversation between a language model and an environment that answers each of its turns.

A user writes one class (`--task FILE.py:CLASS`): `questions` (its episodes), `reset(row)`, which returns the first
message, public methods, which are the tools, and `reward(answer)`. `Toolbox` makes an `Episode` of it.
`envs.tools.adapters` makes such classes of TRL's and Gymnasium's environments.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from foresight.envs.tools import tool
from foresight.envs.tools.tool import Tool
from foresight.errors import LostError, UserError

NOT_TOOLS = ("reset", "reward", "questions", "script", "name", "instruction", "tools", "close")


@dataclasses.dataclass(frozen=True)
class Reply:
    """What the environment answers to a turn: a message for the model, or None at the end of the episode.

    With `members`, the conversations of sub-agents, there is no message yet: `joined` returns it when they have ended.
    """

    message: dict[str, str] | None
    members: tuple[Episode, ...] = ()


class Episode(Protocol):
    """One conversation, used once. It ends when `turn` returns no message, or when its caller ends it.

    With an attribute `slow` that is true, `turn` may run in a thread, so that other conversations do not wait for it.
    An attribute `failed` is the number of calls or actions so far that were answered with an error.
    A method `close()`, if there is one, is called when the episode is over and graded.
    """

    def messages(self) -> list[dict[str, str]]:
        """The conversation before the first turn of the model."""

    def turn(self, text: str) -> Reply:
        """Take the model's turn, as text without special tokens; returns the answer of the environment."""

    def parts(self) -> dict[str, float]:
        """The reward by part, after the episode: `outcome`, and whatever else it measures. All in [0, 1]."""


class TeamEpisode(Episode, Protocol):
    """An episode of a team, whose turns may begin those of sub-agents. Each is a conversation of its own."""

    tokens_left: int  # that it may still sample
    canceled: bool  # whether it ends at the next token

    def spend(self, tokens: int) -> None:
        """Count the sampled tokens of a turn; called before `turn`, also if a limit cut the turn."""

    def joined(self) -> Reply:
        """The answer to a turn with sub-agents, after the last of them has ended."""


class ToolEnv(Protocol):
    """What a user's class has. Every other public method is a tool; or `tools` is a list of them."""

    def reset(self, row: dict[str, Any]) -> str:
        """Begin an episode; returns the first message of the user."""

    def reward(self, answer: str) -> float | dict[str, float]:
        """The reward of the final answer, in [0, 1]; or its parts by name, of which one is the `outcome`."""


class Toolbox:
    """An `Episode` of a `ToolEnv`: calls of a turn are answered in one message; a turn without a call is the answer.

    The tools named in `without` are not offered.
    """

    def __init__(
        self,
        env: ToolEnv,
        row: dict[str, Any],
        instruction: str = "",
        seconds: float = tool.SECONDS,
        approve: tool.Approve | None = None,
        without: Sequence[str] = (),
    ) -> None:
        self.env = env
        self.question = env.reset(row)
        self.tools = [one for one in tools_of(env) if one.name not in without]
        self.instruction, self.seconds, self.approve = instruction, seconds, approve
        self.slow: bool = getattr(env, "slow", False)
        self.answer: str | None = None
        self.called = self.failed = self.malformed = 0

    def messages(self) -> list[dict[str, str]]:
        """The system prompt with the tools, if there is anything to state in it, and the question."""
        prompt = describe(self.tools, self.instruction)
        return [*([{"role": "system", "content": prompt}] if prompt else []), self._user(self.question)]

    def turn(self, text: str) -> Reply:
        """The results of the calls in `text`; without a call, the episode ends with `text` as its answer."""
        found = tool.calls(text)
        if not found:
            self.answer = tool.answer(text)
            return Reply(None)
        blocks = []
        for call in found:
            result, succeeded = tool.execute(self.tools, call, self.seconds, self.approve)
            self.called, self.failed = self.called + 1, self.failed + (not succeeded)
            self.malformed += bool(tool.malformed(self.tools, call))
            blocks.append(f"{tool.RESULT}{result}{tool.RESULT_END}")
        return Reply(self._user("\n".join(blocks)))

    def parts(self) -> dict[str, float]:
        """The env's reward of the answer, an `outcome` of 0 without one, and counts of calls.

        `failed_calls` are those that returned an error; of them `malformed_calls` could not be executed.
        """
        earned = {"outcome": 0.0} if self.answer is None else self.env.reward(self.answer)
        parts = earned if isinstance(earned, dict) else {"outcome": earned}
        counts = {"calls": self.called, "failed_calls": self.failed, "malformed_calls": self.malformed}
        return {**parts, **{name: float(count) for name, count in counts.items()}}

    def close(self) -> None:
        """Free what the env holds."""
        close(self.env)

    @staticmethod
    def _user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}


def graded(episode: Episode) -> dict[str, float]:
    """The reward of an episode by part. NaN is a part that could not be scored.

    Raises LostError, naming the class, if it raises, or returns anything but numbers of which one is the `outcome`.
    """
    name = type(getattr(episode, "env", episode)).__name__
    try:
        parts = episode.parts()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise LostError(f"The reward of {name} raised {type(error).__name__}: {error}.") from error
    try:
        numbers = {part: float(value) for part, value in parts.items()}
    except (AttributeError, TypeError, ValueError):
        numbers = {}
    if "outcome" not in numbers or any(map(math.isinf, numbers.values())):
        raise LostError(
            f"The reward of {name} is {parts!r}: return a number from 0 to 1, or a dict of numbers of which one is the "
            "'outcome'."
        )
    return numbers


def in_time(seconds: float, name: str, begin: Callable[[], tool.Returned]) -> tool.Returned:
    """What the beginning of an episode returns. Raises LostError if it takes longer than `seconds`."""
    if seconds == math.inf:
        return begin()
    found = tool.within(seconds, begin)
    if not found.done():
        raise LostError(
            f"An episode of '{name}' did not begin within {seconds:g} seconds: raise episode_seconds, or look for what "
            "its reset waits for."
        )
    return found.result()


def close(episode: object) -> None:
    """Free what an episode holds, if it has a method `close`."""
    if callable(found := getattr(episode, "close", None)):
        found()


def tools_of(env: object) -> list[Tool]:
    """The public methods of a user's class as tools, or its list `tools`.

    Raises UserError if it has none, or a method without type hints.
    """
    given = getattr(env, "tools", None)
    if isinstance(given, list):
        return given
    methods = [
        method
        for name, method in inspect.getmembers(env, inspect.ismethod)
        if not name.startswith("_") and name not in NOT_TOOLS
    ]
    if not methods:
        raise UserError(f"{type(env).__name__} has no tools: give it a public method with type hints and a docstring.")
    return [tool.of(method) for method in methods]


def describe(tools: Sequence[Tool], instruction: str = "") -> str:
    """The system prompt: what the tools are and how they are called. A chat template needs no tools of its own."""
    if not tools:
        return instruction
    lines = [json.dumps(one.schema["function"]) for one in tools]
    head = f"{instruction}\n" if instruction else ""
    return f"{head}Tools:\n" + "\n".join(lines) + f"\nTo use one, write {tool.CALL}JSON{tool.END} and stop."


def scripted(episode: Episode, turns: int) -> list[list[dict[str, str]]]:
    """The messages of an episode that its env's `script` plays, which writes each turn from the messages so far.

    Those of its sub-agents follow. Demonstrations to train on. Raises UserError for an env without a script, and if the
    episode does not earn the whole outcome.
    """
    env = getattr(episode, "env", episode)
    script: Callable[[list[dict[str, str]]], str] | None = getattr(env, "script", None)
    if script is None:
        raise UserError(
            f"The class {type(env).__name__} has no script: write one, which plays an episode as it should be."
        )
    messages, others = episode.messages(), list[list[dict[str, str]]]()
    for _ in range(turns):
        text = script(messages)
        messages = [*messages, {"role": "assistant", "content": text}]
        reply = episode.turn(text)
        if reply.members:
            others += [one for member in reply.members for one in scripted(member, turns)]
            reply = cast(TeamEpisode, episode).joined()
        if reply.message is None:
            break
        messages = [*messages, reply.message]
    earned = graded(episode)["outcome"]
    if earned < 1:
        raise UserError(
            f"The script earns {earned:g}, not 1, in the episode that begins with {messages[-2]['content']!r}."
        )
    return [messages, *others]
