"""Conversations with tools in OpenAI's form, to and from the form that models here are trained on.

In OpenAI's form, the calls of an assistant are `tool_calls` beside its `content`, and a result is a message of the role
"tool". Here both are text with marks (`envs.tools.tool`), for which a chat template needs only a user and an assistant
who take turns: a model is served and asked exactly as it is trained.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from foresight.envs.tools import tool
from foresight.envs.tools.episode import describe
from foresight.envs.tools.tool import Tool
from foresight.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")


def plain(messages: Sequence[Any], tools: Sequence[Any] = ()) -> list[dict[str, str]]:
    """Messages in OpenAI's form as messages with text alone; `tools` are described in the system prompt.

    Results of tools are data: they are marked, and marks inside them are escaped. Raises UserError for what is no
    conversation.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UserError('messages must be a list such as [{"role": "user", "content": "Hello"}].')
    found: list[dict[str, str]] = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise UserError(f"The role of message {number} is {role!r}: use {', '.join(ROLES)}.")
        text = text_of(message) if role == "assistant" else content(message)
        if role == "tool":
            role, text = "user", f"{tool.RESULT}{tool.shown(text)}{tool.RESULT_END}"
            if found and found[-1]["role"] == "user" and found[-1]["content"].endswith(tool.RESULT_END):
                found[-1]["content"] += f"\n{text}"  # results of one turn are one message
                continue
        elif role == "developer":
            role = "system"
        found.append({"role": role, "content": text})
    if tools:
        described = describe([_tool(one) for one in tools])
        if found[0]["role"] == "system":
            found[0]["content"] = f"{found[0]['content']}\n{described}"
        else:
            found = [{"role": "system", "content": described}, *found]
    return found


def reply(text: str) -> dict[str, Any]:
    """A completion as an assistant's message in OpenAI's form: calls that can be read are `tool_calls`.

    A call that cannot be read stays in the text, so that the client sees it.
    """
    calls = tool.calls(text)
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text.strip()}
    made = [
        {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
         "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in calls
    ]  # fmt: skip
    return {"role": "assistant", "content": tool.answer(text) or None, "tool_calls": made}


def text_of(message: Mapping[str, Any]) -> str:
    """An assistant's message in OpenAI's form as the text of a turn; white space before its calls is left out."""
    calls = "".join(_written(call) for call in message.get("tool_calls") or ())
    return content(message).strip() + calls if calls else content(message)


def content(message: Mapping[str, Any]) -> str:
    """The text of a message; parts that are no text are named. Raises UserError if it is neither text nor parts."""
    found = message.get("content")
    if found is None or isinstance(found, str):
        return found or ""
    if not isinstance(found, Sequence):
        raise UserError(f"The content of a message must be a text or a list of parts, not a {type(found).__name__}.")
    parts = [part if isinstance(part, Mapping) else {} for part in found]
    return "\n".join(str(part["text"]) if "text" in part else f"({part.get('type', 'a part')})" for part in parts)


def _written(call: Any) -> str:
    """A call of OpenAI's form as a turn writes it. Arguments that are no JSON object are kept as they are."""
    try:
        function = call["function"]
        name, given = str(function["name"]), function.get("arguments") or "{}"
        arguments = json.loads(given) if isinstance(given, str) else given
    except (KeyError, TypeError, AttributeError, ValueError):
        return tool.block(json.dumps(call, default=str))
    return tool.block(json.dumps({"name": name, "arguments": arguments}))


def _tool(given: Any) -> Tool:
    try:
        function = given["function"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        return Tool(function["name"], str(function.get("description") or ""), parameters, lambda: None)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError('A tool must be {"type": "function", "function": {"name": ..., "parameters": ...}}.') from error
