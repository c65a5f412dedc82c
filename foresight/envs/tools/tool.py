"""Tools: functions with a JSON schema, the calls of them in a completion, and what they return, as text.

A call is written as Qwen and Hermes models write it: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. What
a tool returns is data: it is marked, and marks inside it are escaped, so that it can neither end its own block nor
begin a call. Errors of tools are observations, and so are calls that cannot be read: the answer names the schema.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

from foresight.errors import UserError

CALL, END = "<tool_call>", "</tool_call>"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
LONGEST = 2_000  # characters of a result that the model reads
TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,), "array": (list,),
    "object": (dict,),
}  # fmt: skip
NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}
_CALLS = re.compile(re.escape(CALL) + r"(.*?)(?:" + re.escape(END) + r"|\Z)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call: `run(**arguments)` returns anything that `str` shows.

    `parameters` is a JSON schema of type object, as in OpenAI's function calling.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    run: Callable[..., Any]

    @property
    def schema(self) -> dict[str, Any]:
        """As the chat templates and the OpenAI protocol take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call in a completion: its tool and arguments, or `problem`: why it cannot be read."""

    name: str = ""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    problem: str = ""


def of(function: Callable[..., Any]) -> Tool:
    """A tool from a function: its name, docstring, and the types of its parameters (int, float, str, bool, list, dict).

    Raises UserError for a parameter without such a type.
    """
    name = getattr(function, "__name__", "tool")
    properties: dict[str, Any] = {}
    required = []
    hints = typing.get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name)
        kind = NAMES.get(typing.get_origin(hint) or hint)  # type: ignore[arg-type]
        if kind is None:
            raise UserError(
                f"The parameter '{parameter.name}' of the tool '{name}' needs a type hint: int, float, str, bool, list "
                "or dict."
            )
        properties[parameter.name] = {"type": kind}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    schema = {"type": "object", "properties": properties, "required": required}
    return Tool(name, inspect.getdoc(function) or name, schema, function)


def calls(text: str) -> list[Call]:
    """The calls in a completion, in order; a block that is not closed counts."""
    return [_read(body) for body in _CALLS.findall(text)]


def answer(text: str) -> str:
    """The text of a completion besides its calls."""
    return _CALLS.sub("", text).strip()


def write(name: str, **arguments: Any) -> str:
    """A call as a completion writes it."""
    return f"{CALL}{json.dumps({'name': name, 'arguments': arguments})}{END}"


def execute(tools: Sequence[Tool], call: Call) -> tuple[str, bool]:
    """What the model reads after a call, and whether the call succeeded."""
    known = {tool.name: tool for tool in tools}
    if call.problem:
        return f"error: {call.problem}", False
    if call.name not in known:
        return f"error: there is no tool '{call.name[:80]}'. Tools: {', '.join(known)}", False
    tool = known[call.name]
    problem = mismatch(tool.parameters, call.arguments)
    if problem:
        return f"error: {problem}. The parameters are {json.dumps(tool.parameters)}", False
    try:
        return shown(tool.run(**call.arguments)), True
    except Exception as error:  # whatever a tool raises, the model reads, and the episode continues
        return f"error: {type(error).__name__}: {shown(error)}", False


def shown(value: object) -> str:
    """A result as text: at most `LONGEST` characters, with marks of calls and results escaped."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else "" if value is None else str(value)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} ... ({len(text) - LONGEST:,} characters left out)"
    for mark in (CALL, END, RESULT, RESULT_END, "<|im_start|>", "<|im_end|>"):
        text = text.replace(mark, mark.replace("<", "‹").replace(">", "›"))
    return text


def mismatch(schema: dict[str, Any], arguments: dict[str, Any]) -> str:
    """Why arguments do not fit the schema of an object; "" if they do. Types, required names and enums are checked."""
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"the argument '{name}' is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"there is no argument '{name[:80]}'"
        kind = properties[name].get("type")
        wanted = TYPES.get(kind)
        if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and kind != "boolean")):
            return f"the argument '{name}' must be of type {kind}, not {json.dumps(value, default=str)[:80]}"
        if "enum" in properties[name] and value not in properties[name]["enum"]:
            return f"the argument '{name}' must be one of {properties[name]['enum']}"
    return ""


def _read(body: str) -> Call:
    try:
        found = json.loads(body)
    except ValueError:
        return Call(
            problem=f"the call is not JSON: {shown(body.strip())[:80]}. Write {write('NAME', ARGUMENT='VALUE')}"
        )
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call(problem=f"a call has a name and arguments: {write('NAME', ARGUMENT='VALUE')}")
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(found["name"], problem="the arguments of a call are a JSON object")
    return Call(found["name"], arguments)
