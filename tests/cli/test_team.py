from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from foresight.cli.main import main
from foresight.envs.tools import tool
from foresight.planning.generation.server import Server
from foresight.runtime.checkpoints import checkpoint
from tests import tiny_language
from tests.sabotage import sabotaged_by


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that delegates, and whose sub-agents answer with what they read."""

    def ask(self: Server, path: str, body: Any = None) -> Any:
        if body is None:
            return {"data": [{"id": "m"}]}
        question, last = body["messages"][0]["content"], body["messages"][-1]["content"]
        text = json.dumps({"answer": question.rpartition(" ")[2]})
        if question.startswith("Compare"):
            calls = tool.write("delegate", goal="Read", budget=200, documents=["a.txt"])
            text = calls if tool.RESULT not in last else "compared"
        return {"choices": [{"message": {"content": text}}]}

    monkeypatch.setattr(Server, "_ask", ask)


def test_a_team_on_a_server_writes_its_trace(served: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a heron")
    out = tmp_path / "team" / "trace.json"
    options = ["--documents", str(tmp_path / "a.txt"), "--out", str(out), "--budget", "600"]
    assert main(["team", "http://x/v1", "Compare these.", *options]) == 0
    trace = json.loads(out.read_text())
    (member,) = trace["root"]["members"]
    assert trace["root"]["answer"] == "compared" and member["documents"] == ["a.txt"] and member["answer"]
    assert trace["tokens"] == trace["root"]["tokens"] + member["tokens"] > 0
    assert "600 tokens" in capsys.readouterr().out


def test_the_trace_names_a_document_whose_name_is_no_utf_8(served: None, tmp_path: Path) -> None:
    document, out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")), tmp_path / "trace.json"
    try:
        document.write_text("a heron")
    except OSError:
        pytest.skip("this file system has names in UTF-8 alone")
    assert main(["team", "http://x/v1", "Say what.", "--documents", str(document), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["root"]["documents"] == ["caf\ufffd.txt"]


@sabotaged_by("foresight.planning.generation.server.without_user", lambda real: lambda url: url)
def test_the_password_of_a_server_stands_in_no_trace(
    served: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    assert main(["team", "http://ann:hunter2@x/v1", "Say what.", "--json", "--out", str(out)]) == 0
    written = out.read_text()
    shown = capsys.readouterr()
    assert json.loads(written)["model"] == json.loads(written)["root"]["version"] == "http://x/v1"
    assert not any(word in written + shown.out + shown.err for word in ("ann", "hunter2"))


def test_a_trace_that_cannot_be_written_costs_no_answer(
    served: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_atomic", full)
    assert main(["team", "http://x/v1", "Say what.", "--out", str(tmp_path / "trace.json")]) == 2
    shown = capsys.readouterr()
    assert "what." in shown.out and "No space left" in shown.err
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Server, "_ask", None)  # is not called
    assert main(["team", "http://x/v1", "Say what.", "--out", str(tmp_path / "file" / "trace.json")]) == 2
    assert "file is not a folder. Choose another --out." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "3"], "budget is 3"),
        (["--depth", "-1"], "depth is -1"),
        (["--tools", "hammer"], "Unknown tool 'hammer'"),
        (["--documents", "no.txt"], "Cannot read no.txt"),
        (["--turns", "0"], "--turns"),
        (["--tool-seconds", "-1"], "--tool-seconds must be above 0, not -1"),
        ([], "chat template"),
    ],
)
def test_mistakes_get_a_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["team", tiny_language.folder(), "go", *arguments]) == 2
    assert words in capsys.readouterr().err
