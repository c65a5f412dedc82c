from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import types
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from foresight.cli import studio
from foresight.runtime import lock
from foresight.studio import app, serve
from foresight.studio.runs import Library
from tests.studio import browser
from tests.studio.test_runs import make, rows

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "runs"
BASE = "http://127.0.0.1:8765"


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(app.create([FIXTURES]), base_url=BASE)


def test_the_page_is_built_from_these_sources() -> None:
    source = browser.SOURCE
    names = [
        "index.html",
        "package.json",
        "vite.config.ts",
        *(f"src/{path.name}" for path in (source / "src").iterdir()),
    ]
    found = hashlib.sha256()
    for name in sorted(names):
        found.update(f"{name}\n".encode() + (source / name).read_bytes())
    assert (app.PAGE / "source.txt").read_text().strip() == found.hexdigest(), "build the page again with: make page"


def test_the_page_is_what_a_build_makes(tmp_path: Path) -> None:
    packages = browser.packages()
    browser.require_node()
    subprocess.run([packages / ".bin" / "tsc", "--noEmit"], cwd=browser.SOURCE, check=True, timeout=150)
    build = ["node", packages / "vite/bin/vite.js", "build", "--outDir", tmp_path / "page", "--logLevel", "error"]
    subprocess.run(build, cwd=browser.SOURCE, check=True, timeout=150)
    built = {path.name: path.read_bytes() for path in (tmp_path / "page").iterdir()}
    assert built == {path.name: path.read_bytes() for path in app.PAGE.iterdir()}


def test_the_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200 and "app.js" in answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "script-src 'self'" in policy and "http" not in policy
    assert sum(path.stat().st_size for path in app.PAGE.iterdir()) < 1_000_000


def test_views_answer_with_the_numbers_of_python(client: TestClient) -> None:
    runs = {row["name"]: row for row in client.get("/api/runs").json()}
    detail = client.get(f"/api/runs/{runs['ppo']['id']}").json()
    metric = detail["metrics"][0]
    curve = client.get("/api/curves", params={"run": runs["ppo"]["id"], "metric": metric}).json()["curves"][0]
    logged = [json.loads(line) for line in (FIXTURES / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert curve["last"] == [row[metric] for row in logged if metric in row]
    found = client.post(
        "/api/grid", json={"picture": ["S.G"], "slip": 0, "gamma": 0.5, "step_reward": 0, "step": 2}
    ).json()
    assert found["values"] == [0.5, 1.0, 0.0]


def test_a_game_is_played_by_the_rules_and_searched(client: TestClient) -> None:
    board = client.post("/api/board", json={"player": "connect_four", "moves": [3, 3], "simulations": 8}).json()
    assert [cell["stone"] for row in board["cells"]["rows"] for cell in row].count(None) == 40
    assert sum(move["visits"] for move in board["analysis"]["moves"]) == board["analysis"]["tree"]["visits"] - 1 == 8
    again = client.post("/api/board", json={"player": "connect_four", "moves": [3, 3], "simulations": 8}).json()
    assert again == board
    won = client.post(
        "/api/board", json={"player": "mcts-tic_tac_toe", "moves": [0, 3, 1, 4, 2], "simulations": 9}
    ).json()
    assert won["over"] and won["first_score"] == 1 and "analysis" not in won
    block = client.post(
        "/api/board", json={"player": "mcts-tic_tac_toe", "moves": [0, 4, 1], "simulations": 500}
    ).json()
    assert block["analysis"]["moves"][0]["name"] == "c1"


@pytest.mark.parametrize(
    ("path", "document", "words"),
    [
        ("/api/board", {"player": "connect_four", "moves": [9]}, "move"),
        ("/api/board", {"player": "connect_four", "moves": "3"}, "list of action numbers"),
        ("/api/board", {"player": "connect_four", "moves": [], "simulations": 10**9}, "simulations"),
        ("/api/board", {"player": "../../etc", "moves": []}, "no run"),
        ("/api/grid", {"picture": ["S?"]}, "characters"),
        ("/api/grid", {"picture": ["SG"], "seed": 2**40}, "seed must be between"),
        ("/api/dream", {"run": "nothing"}, "no run"),
        ("/api/dream", {"run": "nothing", "seed": 10**30}, "seed must be a whole number between"),
        ("/api/attention", {"steps": 10**30}, "steps must be a whole number between 1 and 160"),
        ("/api/attention", {"text": "\ud83d"}, "half of a surrogate pair"),
    ],
)
def test_bad_requests_get_a_sentence(client: TestClient, path: str, document: dict, words: str) -> None:
    answer = client.post(path, content=json.dumps(document), headers={"content-type": "application/json"})
    assert answer.status_code == 400 and words in answer.json()["error"]


def test_other_hosts_other_pages_and_other_types_are_refused(client: TestClient) -> None:
    assert client.get("/api/runs", headers={"Host": "evil.example"}).status_code == 421
    assert client.get("/api/runs", headers={"Host": "127.0.0.1.evil.example:8765"}).status_code == 421
    assert client.get("/api/runs", headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.post("/api/grid", content="{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert client.post("/api/grid", json={}, headers={"Origin": BASE}).status_code == 200
    for depth in (90_000, 200_000):  # the second is longer than a request may be
        answer = client.post("/api/grid", content=b"[" * depth, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400


@pytest.mark.parametrize(
    "path",
    ["/../pyproject.toml", "/%2e%2e/app.py", "/..%2fapp.py", "/app.py", "/api/nothing", "/a%00.js", f"/{300 * 'a'}.js"],
)
def test_only_the_page_is_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (404, 400) or '<div id="app">' in answer.text
    assert "def create" not in answer.text and "setuptools" not in answer.text


def test_a_token_is_asked_for_and_then_a_cookie_suffices() -> None:
    guarded = TestClient(app.create([FIXTURES], hosts=None, token="right"), base_url="http://farm.example")
    assert guarded.get("/api/runs").status_code == 401
    assert guarded.get("/api/runs?token=wrong").status_code == 401
    assert guarded.get("/?token=right").status_code == 200
    assert guarded.get("/api/runs").status_code == 200


def test_studios_with_tokens_in_one_browser_keep_their_cookies() -> None:
    """Cookies are those of a host, whatever the port."""
    jar: dict[str, str] = {}
    apps = {token: app.create([FIXTURES], hosts=None, token=token) for token in ("first", "second")}
    for token, one in apps.items():
        opened = TestClient(one, base_url=BASE)
        assert opened.get(f"/?token={token}").status_code == 200
        jar |= {str(cookie.name): str(cookie.value) for cookie in opened.cookies.jar}
    header = {"Cookie": "; ".join(f"{name}={value}" for name, value in jar.items())}
    for one in apps.values():
        assert TestClient(one, base_url=BASE).get("/api/runs", headers=header).status_code == 200


def test_one_right_token_suffices() -> None:
    guarded = TestClient(app.create([FIXTURES], hosts=None, token="right"), base_url=BASE)
    guarded.get("/?token=right")
    (cookie,) = guarded.cookies.jar
    guarded.cookies.clear()

    def ask(path: str, bearer: str) -> int:
        headers = {"Authorization": f"Bearer {bearer}", "Cookie": f"{cookie.name}=wrong"}
        return guarded.get(path, headers=headers).status_code

    assert ask("/api/runs", "right") == ask("/api/runs?token=wrong", "right") == 200
    assert ask("/api/runs", "wrong") == ask("/api/runs?token=wrong", "wrong") == 401


def test_no_table_is_older_than_its_request_and_those_who_wait_share_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library([tmp_path])
    table = app._Table(library)
    assert json.loads(table()) == []
    make(tmp_path / "run", rows(1))
    assert [row["step"] for row in json.loads(table())] == [1]
    ticks, made, first, others = itertools.count(), [], threading.Event(), threading.Semaphore(0)
    table._began = -1.0

    def monotonic() -> float:
        others.release()
        return float(next(ticks))

    def make_one() -> list[str]:
        made.append(1)
        if len(made) == 1:
            first.set()
            assert all(others.acquire(timeout=20) for _ in range(6))  # 2 of the first, and 4 have asked meanwhile
        return []

    monkeypatch.setattr(app, "time", types.SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(library, "table", make_one)
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(table)]
        assert first.wait(20)
        answers += [pool.submit(table) for _ in range(4)]
        assert [json.loads(answer.result()) for answer in answers] == [[]] * 5
    assert len(made) == 2


def test_it_is_read_only_without_control(client: TestClient) -> None:
    run = client.get("/api/runs").json()[0]["id"]
    for what in ("stop", "resume"):
        answer = client.post(f"/api/runs/{run}/{what}", json={})
        assert answer.status_code == 400 and "--control" in answer.json()["error"]


def test_with_control_only_what_can_be_is_stopped_or_resumed(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "ppo", tmp_path / "done")
    controlled = TestClient(app.create([tmp_path], control=True), base_url=BASE)
    (row,) = controlled.get("/api/runs").json()
    stopped, resumed = (controlled.post(f"/api/runs/{row['id']}/{what}", json={}) for what in ("stop", "resume"))
    assert stopped.status_code == resumed.status_code == 400
    assert "No process" in stopped.json()["error"] and "has finished" in resumed.json()["error"]
    other = controlled.post(f"/api/runs/{row['id']}/stop", json={}, headers={"Origin": "http://evil.example"})
    assert other.status_code == 403


def test_a_run_that_a_silent_process_trains_is_not_resumed(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "ppo", tmp_path / "busy", ignore=shutil.ignore_patterns("summary.json"))
    controlled = TestClient(app.create([tmp_path], control=True), base_url=BASE)
    (row,) = controlled.get("/api/runs").json()
    assert row["state"] == "stopped"
    with lock.held(tmp_path / "busy"):
        answer = controlled.post(f"/api/runs/{row['id']}/resume", json={})
    assert answer.status_code == 400 and f"(pid {os.getpid()})" in answer.json()["error"]
    assert not (tmp_path / "busy" / "resumed.log").exists()


def test_the_next_free_port_is_taken_and_the_address_has_the_token() -> None:
    first = serve.listen("127.0.0.1", 18_765)
    second = serve.listen("127.0.0.1", first.getsockname()[1])
    assert second.getsockname()[1] > first.getsockname()[1]
    first.close()
    second.close()
    assert serve.address("127.0.0.1", 80, None) == "http://127.0.0.1:80/"
    assert serve.address("0.0.0.0", 80, "abc").endswith(":80/?token=abc")


@pytest.mark.slow
def test_the_command_prints_its_address_at_once_and_answers_there() -> None:
    """Also where standard output is a pipe; Ctrl-C ends it without a traceback."""
    command = [sys.executable, "-m", "foresight", "studio", str(FIXTURES), "--no-browser", "--port", "28900"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().split()[-1]
        assert re.fullmatch(r"http://127\.0\.0\.1:289\d\d/", address)
        with urllib.request.urlopen(f"{address}api/runs", timeout=60) as answer:
            assert len(json.load(answer)) == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130) and "Traceback" not in process.stderr.read()


def test_the_demo_ends_with_the_address_and_the_command() -> None:
    """Without a terminal it does not serve; the address is the one that the command has by default."""
    made = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    port = inspect.signature(studio.studio).parameters["port"].default
    assert f"The page of this run is at {serve.address('127.0.0.1', port, None)} (or the next free port) after:" in made
    assert 'echo ".venv/bin/foresight studio $run"' in made
    assert "then .venv/bin/foresight studio $run" in made
