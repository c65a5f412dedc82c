"""Tools: functions with a JSON schema, the calls of them in a completion, and what they return, as text.

A call is written as Qwen and Hermes models write it: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. What
a tool returns is data: it is marked, and marks inside it are escaped, so that it can neither end its own block nor
begin a call. Errors of tools are observations, and so are calls that cannot be read: the answer has the schema.
A tool that does not return in time is an error too. One that writes runs only if it is approved.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import threading
import typing
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from foresight.errors import UserError

CALL, END = "<tool_call>", "</tool_call>"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
LONGEST = 2_000  # characters of a result that the model reads
SECONDS = 30.0  # of a call
MARKS = (CALL, END, RESULT, RESULT_END, "<|im_start|>", "<|im_end|>")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,), "array": (list,),
    "object": (dict,),
}  # fmt: skip
NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}
_WRITES = "_foresight_writes"  # the attribute of a function that `writes` marks
_OTHER = str.maketrans("<>[]", "‹›⟦⟧")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_NAMED = re.compile(r'"name"\s*:\s*"([A-Za-z0-9_.-]{1,128})"')
_CALLS = re.compile(re.escape(CALL) + r"(.*?)(?:" + re.escape(END) + r"|\Z)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call: `run(**arguments)` returns anything that `str` shows.

    `parameters` is a JSON schema of type object, as in OpenAI's function calling. A tool that `writes` changes
    something outside the conversation. Raises UserError for a name or a schema that is none.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    run: Callable[..., Any]
    writes: bool = False

    def __post_init__(self) -> None:
        """Check the name and the schema."""
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise UserError(f"{self.name!r} is no name of a tool: 1 to 128 letters, digits, '_', '.' and '-' are.")
        if problem := _no_schema(self.parameters):
            raise UserError(
                f"The parameters of the tool '{self.name}' are no JSON schema of an object: {problem}. Write "
                '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}.'
            )

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


Approve = Callable[[Tool, dict[str, Any]], bool]  # whether a tool that writes may run with these arguments
Written = typing.TypeVar("Written", bound=Callable[..., Any])
Returned = typing.TypeVar("Returned")


def writes(function: Written) -> Written:
    """Mark a function or method as a tool that writes."""
    setattr(function, _WRITES, True)
    return function


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
    return Tool(name, inspect.getdoc(function) or name, schema, function, getattr(function, _WRITES, False))


def calls(text: str) -> list[Call]:
    """The calls in a completion, in order; a block that is not closed counts."""
    return [_read(body) for body in _CALLS.findall(text)]


def answer(text: str) -> str:
    """The text of a completion besides its calls."""
    return _CALLS.sub("", text).strip()


def write(name: str, /, **arguments: Any) -> str:
    """A call as a completion writes it."""
    return block(json.dumps({"name": name, "arguments": arguments}))


def block(body: str) -> str:
    """The JSON of a call between marks. Marks inside it begin with an escape, so that no argument ends the block."""
    for mark in MARKS:
        body = body.replace(mark, f"\\u003c{mark[1:]}")
    return f"{CALL}{body}{END}"


def malformed(tools: Sequence[Tool], call: Call) -> str:
    """Why a call cannot be executed, with the schema of its tool, as `encodable` text; "" if it can."""
    known = {tool.name: tool for tool in tools}
    if call.name not in known:
        problem = call.problem or f"there is no tool '{call.name[:80]}'"
        return encodable(f"{problem}. Tools: {', '.join(known)}")
    schema = known[call.name].parameters
    problem = call.problem or mismatch(schema, call.arguments)
    return encodable(f"{problem}. The parameters of {call.name} are {json.dumps(schema)}") if problem else ""


def execute(
    tools: Sequence[Tool], call: Call, seconds: float = SECONDS, approve: Approve | None = None
) -> tuple[str, bool]:
    """What the model reads after a call, and whether the call succeeded.

    A tool that does not return within `seconds` is left behind in its thread. `approve` is asked before a tool that
    writes runs; None approves.
    """
    if problem := malformed(tools, call):
        return f"error: {problem}", False
    tool = next(one for one in tools if one.name == call.name)
    if tool.writes and approve is not None and not approve(tool, call.arguments):
        return "error: this call was not approved, and nothing was changed", False
    found = within(seconds, lambda: shown(tool.run(**call.arguments)))
    if not found.done():
        return f"error: the tool did not answer within {seconds:g} seconds", False
    error = found.exception()  # whatever a tool raises, the model reads, and the episode continues
    return (found.result(), True) if error is None else (f"error: {type(error).__name__}: {_message(error)}", False)


def within(seconds: float, call: Callable[[], Returned]) -> Future[Returned]:
    """A call in a thread, which is done unless it takes longer than `seconds`: then it is left behind."""
    found: Future[Returned] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(seconds, threading.TIMEOUT_MAX))
    return found


def shown(value: object) -> str:
    """A result as text: at most `LONGEST` characters, with marks of calls and results and control codes replaced."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else "" if value is None else str(value)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} ... ({len(text) - LONGEST:,} characters left out)"
    return escaped(_CONTROL.sub("\ufffd", encodable(text))) if text.strip() else "(nothing)"


def encodable(text: str) -> str:
    """The text with "?" for each half of a surrogate pair, which no tokenizer and no file in UTF-8 takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def escaped(text: str, marks: Sequence[str] = MARKS) -> str:
    """The text with other brackets in `marks`, so that they mean nothing to the model."""
    for mark in marks:
        if mark in text:
            other = mark.translate(_OTHER)
            text = text.replace(mark, other if other != mark else f"{mark[0]} {mark[1:]}")
    return text


def _message(error: BaseException) -> str:
    try:
        return shown(error)
    except Exception:
        return "(its message cannot be shown)"


def mismatch(schema: dict[str, Any], arguments: dict[str, Any]) -> str:
    """Why arguments do not fit the schema of an object; "" if they do.

    Checked are required names, unknown names (unless there are no properties, or `additionalProperties`), types and
    enums, of the arguments but not inside them.
    """
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"the argument '{name}' is missing"
    for name, value in arguments.items():
        if name not in properties:
            if properties and not schema.get("additionalProperties"):
                return f"there is no argument '{name[:80]}'"
            continue
        rule = properties[name] if isinstance(properties[name], dict) else {}
        kinds = rule.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds and not any(_is(value, kind) for kind in kinds):
            return f"the argument '{name}' must be of type {' or '.join(kinds)}, not {_brief(value)}"
        if "enum" in rule and value not in rule["enum"]:
            return f"the argument '{name}' must be one of {rule['enum']}"
    return ""


def _is(value: Any, kind: str) -> bool:
    if kind == "null" or kind not in TYPES:
        return kind != "null" or value is None
    return isinstance(value, TYPES[kind]) and (not isinstance(value, bool) or kind == "boolean")


def _brief(value: Any) -> str:
    return json.dumps(value, default=str)[:80]


def _no_schema(schema: Any) -> str:
    """Why this is no JSON schema of an object; "" if it is one."""
    if not isinstance(schema, dict):
        return f"a {type(schema).__name__}"
    if schema.get("type", "object") != "object":
        return f"its type is {_brief(schema['type'])}"
    if not isinstance(schema.get("properties", {}), dict):
        return f"its properties are {_brief(schema['properties'])}"
    for name, rule in schema.get("properties", {}).items():
        kinds = rule.get("type", []) if isinstance(rule, dict) else []
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(rule, dict | bool) or not isinstance(kinds, list):
            return f"its property '{name}' is {_brief(rule)}"
        for kind in kinds:
            if kind not in (*TYPES, "null"):
                return f"its property '{name}' has the type {_brief(kind)}"
        if isinstance(rule, dict) and not isinstance(rule.get("enum", []), list):
            return f"its property '{name}' has the enum {_brief(rule['enum'])}, which is no list"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"its required names are {_brief(required)}"
    return ""


def _read(body: str) -> Call:
    try:
        found = json.loads(body)
        # Its escapes may name half a pair. NaN and infinity, which JSON does not have, raise ValueError.
        found = json.loads(encodable(json.dumps(found, ensure_ascii=False, allow_nan=False)))
    except (ValueError, RecursionError):
        named = _NAMED.search(body)
        problem = f"the call is not JSON: {shown(body.strip())[:80]}. Write {write('NAME', ARGUMENT='VALUE')}"
        return Call(named[1] if named else "", problem=problem)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call(problem=f"a call has a name and arguments: {write('NAME', ARGUMENT='VALUE')}")
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(found["name"], problem="the arguments of a call are a JSON object")
    return Call(found["name"], arguments)
