from __future__ import annotations

import json
from typing import Any

import pytest

from foresight.cli import agent
from foresight.cli.main import main
from foresight.errors import UserError
from foresight.planning.generation.server import Server
from foresight.runtime.reasoning import think
from tests import tiny_language


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A server that writes a note, then answers."""
    sent: list[Any] = []
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "write_note", "arguments": '{"name": "a", "text": "b"}'},
    }

    def ask(self: Server, path: str, body: Any = None) -> Any:
        if body is None:
            return {"data": [{"id": "m"}]}
        sent.append(body)
        message = {"content": "done"} if len(sent) % 2 == 0 else {"content": "", "tool_calls": [call]}
        return {"choices": [{"message": message}]}

    monkeypatch.setattr(Server, "_ask", ask)
    return sent


@pytest.mark.parametrize(("approve", "failed"), [("all", 0), ("none", 1), ("ask", 1)])
def test_an_agent_on_a_server(
    served: list[Any], approve: str, failed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    code = main(["agent", "http://x/v1", "Note b.", "--tools", "notebook", "--approve", approve, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0 and (document["calls"], document["failed_calls"], document["answered"]) == (1, failed, 1)
    assert [m["role"] for m in document["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_a_conversation_that_an_error_ends_is_printed(
    served: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Server._ask

    def ask(self: Server, path: str, body: Any = None) -> Any:
        if len(served) == 1:
            raise UserError("The server answers 400: too many tokens.")
        return real(self, path, body)

    monkeypatch.setattr(Server, "_ask", ask)
    assert main(["agent", "http://x/v1", "Note b.", "--tools", "notebook", "--approve", "all", "--json"]) == 1
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert [m["role"] for m in document["messages"]] == ["user", "assistant", "tool"]
    assert (document["calls"], document["answered"], document["questions"]) == (1, 0, 1) and "too many tokens" in err


def test_questions_come_from_a_pipe(
    served: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    (tmp_path / "in").write_text("one\n\ntwo\n")
    with open(tmp_path / "in") as questions:
        monkeypatch.setattr("sys.stdin", questions)
        assert main(["agent", "http://x/v1", "--tools", "notebook", "--approve", "all"]) == 0
    assert capsys.readouterr().out.count("done") == 2 and len(served) == 4


def test_a_conversation_that_an_error_ends_is_printed_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    def turn(messages: Any, tools: Any) -> str:
        if len(messages) > 1:
            raise UserError("The dialogue is too long.")
        return "first"

    monkeypatch.setattr(agent, "_turn", lambda *given: turn)
    (tmp_path / "in").write_text("one\ntwo\n")
    with open(tmp_path / "in") as questions:
        monkeypatch.setattr("sys.stdin", questions)
        assert main(["agent", "smollm2", "--json"]) == 1
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert [one["content"] for one in document["messages"]] == ["one", "first", "two"] and "too long" in shown.err
    assert (document["questions"], document["answered"]) == (2, 1)


def test_a_conversation_that_is_too_long_is_explained_by_the_options_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_language.model()
    model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    monkeypatch.setattr(think, "model", lambda *given: model)
    assert main(["agent", "m", "go " * model.context]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "lower --max-new-tokens or --turns, or ask in another conversation" in shown and "--rounds" not in shown


def test_a_tool_of_a_server_does_not_hide_one_of_the_toolbox(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mcpserver = pytest.importorskip("mcp.server.mcpserver")
    from foresight.agents import mcp

    real, made = mcp.connect, mcpserver.MCPServer("notes")
    made.add_tool(lambda: "elsewhere", name="write_note")
    monkeypatch.setattr(mcp, "connect", lambda servers, *given: real([made], *given))
    assert main(["agent", "http://x/v1", "Note b.", "--tools", "notebook", "--mcp", "x", "--approve", "all"]) == 0
    names = [one["function"]["name"] for one in served[0]["tools"]]
    assert sorted(names) == sorted({*names}) and {"write_note", "write_note_2"} <= {*names}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smollm2", "go", "--tools", "hammer"], "Unknown tool 'hammer'"),
        (["smollm2", "go", "--turns", "0"], "--turns"),
        (["smollm2", "go", "--tool-seconds", "0"], "--tool-seconds must be above 0, not 0"),
        (["smollm2", "go", "--tool-seconds", "nan", "--mcp", "x"], "--tool-seconds must be above 0, not nan"),
        (["TINY", "go"], "no chat template"),
        (["smollm2", "go", "--mcp", ""], "command of a server"),
    ],
)
def test_mistakes_get_a_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", *[tiny_language.folder() if one == "TINY" else one for one in arguments]]) == 2
    assert words in capsys.readouterr().err
