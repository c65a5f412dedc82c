from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path

import pytest

from foresight.agents.live import loops
from foresight.agents.live.settings import Config, Settings, read, write
from foresight.agents.live.store import Store
from foresight.cli.main import main
from foresight.planning.generation.server import Server
from foresight.training.options import Tuning
from tests import tiny_language
from tests.sabotage import sabotaged_by


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "live"
    store = Store(folder)
    write(folder, Settings(port=9000, score="rules.py:rate"), Config(mode="directive", tuning=Tuning(lora=4)))
    for number in range(3):
        store.publish(number, str(number), {"turns": 8.0, "kl": 0.1}, [])
    store.close()
    return folder


def test_settings_are_read_as_written(run: Path) -> None:
    settings, config = read(run)
    assert settings == Settings(port=9000, score="rules.py:rate")
    assert config == Config(mode="directive", tuning=Tuning(lora=4))


def test_a_run_is_looked_at_and_rolled_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", str(run), "--rollback", "1"]) == 0
    assert main(["live", str(run), "--status", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["active"] == 1 and [v["number"] for v in document["versions"]] == [0, 1, 2]
    assert document["events"] == [{"kind": "activated", "text": "version 1"}] and not document["paused"]
    assert main(["live", str(run), "--status"]) == 0
    assert "active: version 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["RUN", "--rollback", "9"], "no version 9"),
        (["nowhere", "--status"], "no live run"),
        (["smollm2", "--port", "0"], "--port must be"),
        (["smollm2", "--port", "TAKEN"], "Cannot listen on"),
        (["smollm2", "--score", "nowhere.py:rate"], "no file"),
        (["smollm2", "--batch", "0"], "batch must be"),
        (["smollm2", "--out", "RUN"], "is a live run"),
        (["smollm2", "--check", "orders"], "without tools"),
    ],
)
def test_mistakes_get_a_sentence(
    run: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        known = {"RUN": str(run), "TAKEN": str(taken.getsockname()[1])}
        out = [] if "--out" in arguments else ["--out", str(run.parent / "new")]
        port = [] if "--port" in arguments else ["--port", str(free.getsockname()[1])]
        free.close()
        assert main(["live", *[known.get(one, one) for one in arguments], *out, *port]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (run.parent / "new").exists()


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_a_missing_extra_is_named_before_anything_is_started(
    run: Path, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "foresight.agents.live.serve", raising=False)
    monkeypatch.delattr("foresight.agents.live.serve", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    assert main(["live", "smollm2", "--out", str(run.parent / "new"), "--port", port]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"The package '{package}' is missing: pip install 'foresight[studio]'" in said and "Serving" not in said
    assert not (run.parent / "new").exists()


@sabotaged_by("foresight.planning.generation.server.without_user", lambda real: lambda url: url)
def test_the_password_of_a_judge_stands_in_no_file_and_reaches_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    judge, folder = "http://ann:hunter2@judge/v1", tmp_path / "live"
    monkeypatch.setattr(Server, "_ask", lambda self, path, body=None: {"data": [{"id": "m"}]})
    monkeypatch.setattr(loops, "_with_parent", lambda parent: None)
    monkeypatch.setattr(loops, "run", lambda loop, store, given, config: seen.append(given.score))
    monkeypatch.setattr(loops, "supervise", lambda folder, report, stop: loops.main("score", folder))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv(loops.JUDGE, "")  # restored at the end
    monkeypatch.setenv(loops.TOKEN, "")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = ["--port", str(free.getsockname()[1])]
    assert main(["live", tiny_language.folder(), "--out", str(folder), "--score", judge, *port]) == 0
    files = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    shown = capsys.readouterr()
    assert b"hunter2" not in files and "hunter2" not in shown.out + shown.err and b"http://judge/v1" in files
    main(["live", str(folder), *port])
    main(["live", str(folder), "--score", judge, *port])
    assert seen == [judge, "http://judge/v1", judge]
