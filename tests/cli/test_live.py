from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from foresight.agents.live import loops
from foresight.agents.live.settings import SETTINGS, Config, Settings, read, write
from foresight.agents.live.store import Store
from foresight.cli import screen
from foresight.cli.live import live
from foresight.cli.main import main
from foresight.errors import UserError
from foresight.planning.generation.server import Server
from foresight.sandbox import process
from foresight.training.options import Tuning
from tests import forks, tiny_language
from tests.agents.live.test_learn import TEMPLATE
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
    for temperature in (0.0, -1.0, 1e-5, 20.0):  # the engine refuses it, or its turns could not be trained on
        with pytest.raises(UserError, match=r"more than 0 \(at least 0.0001\), and at most 10"):
            Settings(temperature=temperature)
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
        (["RUN", "--score", "other.py:rate"], "is rules.py:rate and does not change"),
        (["RUN", "--batch", "4"], "--batch of"),
        (["RUN", "--lora", "8"], "is 4 and does not change"),
        (["RUN", "--lora", "16"], "is 4 and does not change"),  # the default of a new run
        (["RUN", "--mode", "both"], "is directive and does not change"),
        (["smollm2", "--hint-guidance", "1.5"], "--hint-guidance is given without --hint-top-k"),
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


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "{}", '{"settings": {}}', '{"settings": {}, "config": {"tuning": {}, "gone": 1}}',
        '{"settings": {"prt": 1}, "config": {"tuning": {}}}', '{"settings": [], "config": {"tuning": 4}}',
        '{"settings": {}, "config": {"batch": "many", "tuning": {}}}',
    ],
)  # fmt: skip
def test_damaged_settings_are_named(run: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / SETTINGS).write_text(text)
    assert main(["live", str(run), "--status"]) == 2
    assert f"{run / SETTINGS} cannot be read" in " ".join(capsys.readouterr().err.split())


def test_the_help_has_the_defaults() -> None:
    """The command has none of its own, so that it knows what is given for a run that is continued."""
    words, served, config = " ".join((live.__doc__ or "").split()), Settings(), Config()
    values = {f.name: f.default for f in dataclasses.fields(Config)} | {"lora": config.tuning.lora}
    for name in ("batch", "staleness", "learning_rate", "lora", "hint_top_k", "hint_guidance", "kl_coef", "kl_bound"):
        stated = words.split(f" {name}: ", 1)[1].split("default: ", 1)[1].split()[0].rstrip(".,")
        assert float(stated) == values[name], name
    assert config.mode == "both" and config.rehearsal == 0 and served.temperature == 1 and served.check == ""


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_a_missing_extra_is_named_before_anything_is_started(
    run: Path, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "foresight.agents.live.serve", raising=False)
    monkeypatch.delattr("foresight.agents.live.serve", raising=False)
    assert main(["live", "smollm2", "--out", str(run.parent / "new"), "--port", free_port()]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"The package '{package}' is missing: pip install 'foresight[studio]'" in said and "Serving" not in said
    assert not (run.parent / "new").exists()


@sabotaged_by("foresight.planning.generation.server.without_user", lambda real: lambda url: url)
def test_the_password_of_a_scorer_stands_in_no_file_and_reaches_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    url, folder = "http://ann:hunter2@scorer/v1", tmp_path / "live"
    monkeypatch.setattr(Server, "_ask", lambda self, path, body=None: {"data": [{"id": "m"}]})
    monkeypatch.setattr(loops, "_with_parent", lambda parent: None)
    monkeypatch.setattr(loops, "run", lambda loop, store, given, config: seen.append(given.score))
    monkeypatch.setattr(loops, "supervise", lambda folder, report, stop: loops.main("score", folder))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv(loops.SCORER, "")  # restored at the end
    monkeypatch.setenv(loops.TOKEN, "")
    port = ["--port", free_port()]
    assert main(["live", tiny_language.folder(), "--out", str(folder), "--score", url, *port]) == 0
    files = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    shown = capsys.readouterr()
    assert b"hunter2" not in files and "hunter2" not in shown.out + shown.err and b"http://scorer/v1" in files
    main(["live", str(folder), *port])
    main(["live", str(folder), "--score", url, *port])
    assert seen == [url, "http://scorer/v1", url]


@sabotaged_by("foresight.nets.language.pretrained.absolute", lambda real: lambda name: name)
def test_a_run_names_its_model_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path, monkeypatch, lambda folder, report, stop: None)
    store = Store(tmp_path / "live")
    assert store.folder_of(0) == read(store.folder)[1].model == str((tmp_path / "model").resolve())
    store.close()


def test_a_run_that_is_served_is_not_served_by_a_second_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def second(folder: Path, report: Any, stop: Any) -> None:
        monkeypatch.setattr(loops, "supervise", lambda *_: pytest.fail("it is supervised twice"))
        before = (folder / SETTINGS).read_text()
        assert main(["live", "live", "--port", free_port()]) == 2 and (folder / SETTINGS).read_text() == before

    assert begun(tmp_path, monkeypatch, second) == 0
    assert "live is being trained by another process" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(loops, "supervise", lambda *_: None)
    assert main(["live", "live", "--port", free_port()]) == 0  # the lock ended with the first


def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervise: Any) -> int:
    """The exit code of a run in `tmp_path` whose model is named by a relative path, with this supervisor."""
    (tmp_path / "model").symlink_to(tiny_language.folder())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loops, "supervise", supervise)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return main(["live", "model", "--out", "live", "--port", free_port()])


def free_port() -> str:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


RULES = "def rate(messages, reply, next):\n    return 1.0 if next['content'] == 'thanks' else 0.0\n"


@pytest.mark.slow
def test_a_turn_is_served_scored_and_trained_by_four_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, notes, children = list[Any](), list[str](), dict[str, Any]()
    folder, model = tmp_path / "live", tmp_path / "model"
    shutil.copytree(tiny_language.folder(), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "rules.py").write_text(RULES)

    def started(command: list[str], environment: dict[str, str]) -> Any:
        children[command[3]] = forks.start(command[1:], environment, session=True)
        return children[command[3]]

    monkeypatch.setattr(process, "start", started)
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append(handler))
    monkeypatch.setattr(screen, "note", notes.append)
    monkeypatch.setenv(loops.TOKEN, "")  # restored at the end
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def ask(*texts: str, token: str = "") -> tuple[int, Any]:
        """A request; the token that was printed, unless another is given. Repeated until the server listens."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        headers = {"X-Session-Id": "ann", "Authorization": f"Bearer {token or printed()}"}
        while time.monotonic() < end:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                client.request(
                    "POST", "/v1/chat/completions", json.dumps({"messages": messages, "max_tokens": 4}), headers
                )
                with contextlib.closing(client), client.getresponse() as answer:
                    return answer.status, json.loads(answer.read())
            except ConnectionError:
                time.sleep(0.05)
        raise TimeoutError("\n".join(notes))

    def printed() -> str:
        return next(note for note in notes if note.startswith("Token: ")).removeprefix("Token: ")

    def talk() -> tuple[int, int, list[str]]:
        while not handlers:
            time.sleep(0.05)
        try:
            refused = ask("hi", token="wrong")[0]
            status, first = ask("hi")
            models = [first["model"], ask("hi", first["choices"][0]["message"]["content"], "thanks")[1]["model"]]
            while not any(note.startswith("version 1 ") for note in notes) and time.monotonic() < end:
                time.sleep(0.05)
            while models[-1] != "live-1" and time.monotonic() < end:
                time.sleep(0.2)
                models.append(ask("ho")[1]["model"])
            return refused, status, models
        finally:
            handlers[0]()  # as Ctrl-C

    end = time.monotonic() + 120
    options = ["--score", f"{tmp_path / 'rules.py'}:rate", "--batch", "1", "--lora", "0", "--host", "0.0.0.0"]
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(talk)
        assert main(["live", str(model), "--out", str(folder), "--port", str(port), *options]) == 0
        refused, status, models = client.result()
    assert (refused, status, models[0], models[-1]) == (401, 200, "live-0", "live-1")
    store = Store(folder)
    assert [turn.reply for turn in store.turns("trained")] and store.counts()["trained"] == 1 and store.active() == 1
    store.close()
    assert sorted(children) == sorted(loops.LOOPS) and all(one.poll() is not None for one in children.values())
    assert all(printed().encode() not in file.read_bytes() for file in folder.rglob("*") if file.is_file())
    assert any(note.startswith("version 1 ") for note in notes)
