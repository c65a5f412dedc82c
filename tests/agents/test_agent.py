from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from foresight.agents import agent
from foresight.envs.tools import tool
from foresight.envs.tools.tool import Tool
from foresight.errors import UserError
from foresight.planning.generation import chat
from foresight.planning.generation.server import Server
from tests import tiny_language
from tests.agents.live.test_learn import TEMPLATE
from tests.sabotage import sabotaged_by


def says(*texts: str) -> Any:
    """A model that writes these turns, and what it read before each."""
    left, seen = list(texts), list[Any]()

    def turn(messages: Any, tools: Any) -> str:
        seen.append([dict(message) for message in messages])
        return left.pop(0)

    turn.seen = seen  # type: ignore[attr-defined]
    return turn


def test_it_acts_until_it_answers() -> None:
    tools = agent.toolbox(["calculator"])
    turn = says(tool.write("calculate", expression="6*7"), "It is 42.")
    messages = [{"role": "user", "content": "6 times 7?"}]
    events = list(agent.run(turn, tools, messages))
    assert [(e.kind, e.text) for e in events[1:]] == [("result", "42"), ("answer", "It is 42.")]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"] and turn.seen[1][2]["content"] == "42"


def test_errors_are_read_and_limits_end_it() -> None:
    tools = agent.toolbox(["calculator"])
    turn = says(tool.write("calculate", expression="1//0"), f"{tool.CALL}?{tool.END}", tool.write("fly"))
    events = list(agent.run(turn, tools, [{"role": "user", "content": "go"}], turns=3))
    assert [e.kind for e in events] == ["call", "error"] * 3 + ["limit"]
    assert "division by zero" in events[1].text and "not JSON" in events[3].text and "no tool 'fly'" in events[5].text


def test_results_beside_a_call_that_cannot_be_read_are_marked_as_data() -> None:
    tools = agent.toolbox(["calculator"])
    turn = says(f"{tool.write('calculate', expression='6*7')}{tool.CALL}?{tool.END}", "It is 42.")
    messages = [{"role": "user", "content": "6 times 7?"}]
    events = list(agent.run(turn, tools, messages))
    assert [e.kind for e in events] == ["call", "result", "call", "error", "answer"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]
    marked = [f"{tool.RESULT}{e.text}{tool.RESULT_END}" for e in (events[1], events[3])]
    assert messages[2]["content"] == "\n".join(marked)


def test_a_full_context_ends_a_question_and_keeps_the_conversation() -> None:
    policy = tiny_language.model()
    policy.tokenizer.chat_template = TEMPLATE
    first, written = [tool.write("look")], agent.local(chat.local(policy, 8))

    def turn(messages: Any, tools: Any) -> str:
        return first.pop() if first else written(messages, ())

    def look() -> str:
        """Look."""
        return 200 * "a"

    messages = [{"role": "user", "content": "go"}]
    *_, last = events = list(agent.run(turn, [tool.of(look)], messages))
    assert [one.kind for one in events] == ["call", "result", "limit"]
    assert last.text.endswith("context of 64: shorten the conversation, or lower --max-new-tokens.")
    assert [one["role"] for one in messages] == ["user", "assistant", "tool"]
    with pytest.raises(UserError, match="does not fit"):  # nothing would be lost
        list(agent.run(turn, [], [{"role": "user", "content": 80 * "a"}]))


@sabotaged_by("foresight.envs.tools.tool.execute", lambda real: lambda tools, call, *rest: real(tools, call))
def test_a_tool_that_writes_waits_for_approval() -> None:
    turn = says(*[tool.write("write_note", name="a", text="b"), "done"] * 2)
    for approve, kind in ((lambda *_: False, "error"), (None, "result")):
        tools = agent.toolbox(["notebook"])
        events = list(agent.run(turn, tools, [{"role": "user", "content": "go"}], approve=approve))
        notes = next(one for one in tools if one.name == "list_notes").run()
        assert events[1].kind == kind and notes == ("a" if kind == "result" else "")


def test_files_of_a_folder_are_searched(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "fox.md").write_text("The fox is red.")
    (tmp_path / "dog.txt").write_text("The dog is brown.")
    (tmp_path / "cat.png").write_bytes(b"\x00fox")
    search, read = sorted(agent.toolbox([f"search:{tmp_path}"]), key=lambda one: one.name == "read")
    assert search.run(query="red foxes").startswith("[1]" if "fox" in read.run(number=1) else "[2]")
    assert "deep/fox.md" in search.run(query="fox") and read.run(number=1, start=4)
    for name, words in (
        ("search:", "tool 'search:'"),
        ("fly", "search:FOLDER"),
        (f"search:{tmp_path}/no", "no text files"),
    ):
        with pytest.raises(UserError, match=words):
            agent.toolbox([name])


def test_files_that_cannot_be_read_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fox.md").write_text("The fox is red.")
    (tmp_path / "locked.txt").write_text("The fox is locked.")
    (tmp_path / "behind.txt").write_text("The fox is behind.")
    real, state = Path.read_text, Path.stat

    def read_text(self: Path, *given: Any, **named: Any) -> str:
        if self.name == "locked.txt":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(self, *given, **named)

    def stat(self: Path, **named: Any) -> Any:
        if self.name == "behind.txt":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return state(self, **named)

    with monkeypatch.context() as patched:  # the user of a test may be one who can read all
        patched.setattr(Path, "read_text", read_text)
        patched.setattr(Path, "stat", stat)
        found = {one.name: one for one in agent.toolbox([f"search:{tmp_path}"])}
        assert found["search"].run(query="fox") == "[1] fox.md: fox.md\nThe fox is red."
        (tmp_path / "fox.md").unlink()
        with pytest.raises(UserError, match="no text files to search"):
            agent.toolbox([f"search:{tmp_path}"])


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The fox is red.")
    one, other = f"search:{tmp_path}", f"search:{tmp_path}/"
    with pytest.raises(UserError) as error:
        agent.toolbox([one, "notebook", other])
    assert str(error.value) == (
        f"The tools {one} and {other} both have one named 'search': leave one of them out, or give search: a folder "
        "that holds both."
    )
    with pytest.raises(UserError, match=r"calculator and calculator both have .* 'calculate': leave one of them out\."):
        agent.toolbox(["calculator", "calculator"])


def test_a_file_may_have_a_name_that_is_no_utf_8(tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("The fox is red.")
    except OSError:
        pytest.skip("this file system has names in UTF-8 alone")
    found = {one.name: one for one in agent.toolbox([f"search:{tmp_path}"])}
    assert found["search"].run(query="fox").startswith("[1] caf\ufffd.txt: ")
    assert found["read"].run(number=1).startswith("caf\ufffd.txt\nThe fox")


def test_a_model_on_a_server_gets_the_tools_and_its_calls_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    call = {"id": "c1", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "2+3"}'}}
    last = {"role": "assistant", "content": "5\ud83d"}  # half a pair
    answers = [{"role": "assistant", "content": None, "tool_calls": [call]}, last]

    def ask(self: Server, path: str, body: Any = None) -> Any:
        sent.append(body)
        return {"data": [{"id": "m"}]} if body is None else {"choices": [{"message": answers[len(sent) - 2]}]}

    monkeypatch.setattr(Server, "_ask", ask)
    messages: list[Any] = [{"role": "user", "content": "2+3?"}]
    events = list(agent.run(agent.served(Server("http://x", None), 32), agent.toolbox(["calculator"]), messages))
    assert [e.kind for e in events] == ["call", "result", "answer"] and events[-1].text == "5?"
    assert sent[1]["tools"][0]["function"]["name"] == "calculate" and sent[2]["messages"][2]["content"] == "5"


def test_a_tool_without_arguments_may_be_called_without() -> None:
    one = Tool("now", "The time.", {"type": "object", "properties": {}}, lambda: "noon")
    events = list(agent.run(says(f'{tool.CALL}{{"name": "now"}}{tool.END}', "noon"), [one], []))
    assert [e.text for e in events][1:] == ["noon", "noon"]
