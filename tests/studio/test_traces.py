"""Teams on the page: a run whose conversations have sub-agents, and traces of `foresight team`, hostile ones too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from foresight.agents import team
from foresight.runtime.monitoring.log import Log
from foresight.studio import app, samples
from foresight.studio.runs import identity
from tests.agents.test_team import SECRETS, halves, play
from tests.envs.tools.test_delegation import converse, task
from tests.tiny_conversations import model

HOSTILE = '<img src=x onerror="window.hacked=1">'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of the task `delegation` as a run logs them, and two traces."""
    found = tmp_path_factory.mktemp("teams")
    run = found / "delegates"
    run.mkdir()
    (run / "config.yaml").write_text("algorithm: grpo\nkind: text\nenv: delegation\nseed: 0\nconfig: {steps: 9}\n")
    talks, log = converse(model(), task()), Log(run)
    for i, transcript in enumerate(talks.transcripts):
        parts = {name: values[i] for name, values in talks.parts.items()}
        row = {"prompt": talks.rows[i].messages[0]["content"], "completion": talks.texts[i], "reward": parts["reward"]}
        log.samples(1, [{**row, "parts": parts, "transcript": transcript}])
    log.close()
    (found / "team").mkdir()
    done = play(halves, team.Team("Both words", documents=SECRETS))
    done["board"] = [{"by": [0, 1], "text": HOSTILE}]
    (found / "team" / "both-words.json").write_text(json.dumps(done, indent=1))
    odd = {
        "format": 1,
        "goal": HOSTILE,
        "root": {"path": "x", "messages": [3, {"role": HOSTILE}], "members": [None, {}]},
    }
    (found / "team" / "odd.json").write_text(json.dumps(odd))
    (found / "team" / "deep.json").write_text('{"format": 1, "goal": "' + 'a", "root": ' + "[" * 100_000)
    (found / "team" / "other.json").write_text('{"goal": "not a trace"}')
    return found


def client(folder: Path) -> TestClient:
    return TestClient(app.create([folder]), base_url="http://127.0.0.1:8765")


def every(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [node, *(below for one in node["members"] for below in every(one))]


def rows(folder: Path) -> list[dict[str, Any]]:
    return samples.Log().read(folder / "delegates" / "media" / "samples.jsonl")


def test_a_conversation_has_its_sub_agents(folder: Path) -> None:
    asked = client(folder)
    (listed,) = asked.get("/api/agents").json()
    page = asked.get(f"/api/runs/{listed['id']}/samples").json()["rows"]
    logged = rows(folder)
    assert max(row["members"] for row in page) == 2 and min(row["transcript"] for row in page) >= 2
    first = asked.get(f"/api/runs/{listed['id']}/samples?sort=team&count=1").json()["rows"]
    assert [row["members"] for row in first] == [2]
    for row in page:
        found = asked.get(f"/api/runs/{listed['id']}/conversation/{row['index']}").json()
        last = logged[row["index"]]["transcript"][-1]
        written = last["members"] if last["role"] == "team" else []
        assert len(found["turns"]) == row["transcript"] and "team" not in {turn["role"] for turn in found["turns"]}
        assert [one["tokens"] for one in found["members"]] == [one["tokens"] for one in written]
        assert [one["goal"] for one in found["members"]] == [one["messages"][0]["content"] for one in written]
        assert [one["parts"] for one in found["members"]] == [one["parts"] for one in written]
        assert [one["path"] for one in found["members"]] == [[0, i] for i in range(len(written))]


def test_traces_of_teams_are_found_and_broken_ones_left_out(folder: Path) -> None:
    asked = client(folder)
    listed = {one["name"]: one["id"] for one in asked.get("/api/traces").json()}
    assert set(listed) == {"both-words", "odd"}
    found = asked.get(f"/api/traces/{listed['both-words']}").json()
    written = json.loads((folder / "team" / "both-words.json").read_text())
    nodes, originals = every(found["root"]), every(written["root"])
    assert [one["path"] for one in nodes] == [[0], [0, 0], [0, 1]]
    for one, other in zip(nodes, originals, strict=True):
        assert {key: one[key] for key in ("goal", "answer", "budget", "tokens", "parts")} == {
            key: other[key] for key in ("goal", "answer", "budget", "tokens", "parts")
        }
        assert len(one["turns"]) == len(other["messages"])
    assert nodes[0]["turns"][1]["calls"][0]["arguments"]["documents"] == ["a.txt"]
    odd = asked.get(f"/api/traces/{listed['odd']}").json()
    assert [one["path"] for one in every(odd["root"])] == [[], []] and odd["goal"] == HOSTILE
    answer = asked.get("/api/traces/nothing")
    assert answer.status_code == 400 and "no trace" in answer.json()["error"]


def test_sub_agents_of_sub_agents_end_somewhere() -> None:
    deep: dict[str, Any] = {"members": []}
    for _ in range(100):
        deep = {"messages": [], "members": [deep] * 2}
    found = samples.member(deep)
    assert len(every(found)) <= samples.MOST + 1


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    browser = pytest.importorskip("tests.studio.browser")
    with browser.served(folder) as address:
        yield address


@pytest.mark.slow
def test_the_tree_of_delegations_is_opened(address: str, folder: Path) -> None:
    browser = pytest.importorskip("tests.studio.browser")
    logged = next(row for row in rows(folder) if row["transcript"][-1]["role"] == "team")
    second = logged["transcript"][-1]["members"][1]
    with browser.opened(address) as page:
        page.goto(f"{address}#/agents?run={identity((folder / 'delegates').resolve())}&row={logged['index']}")
        page.wait_for_selector("h2:has-text('A team of 3')")
        assert page.locator("ul.team button").count() == 3
        page.click("ul.team ul li:nth-child(2) button")
        page.wait_for_selector("h2:has-text('Sub-agent 0.1')")
        assert f"{second['tokens']} tokens sampled" in page.inner_text("main")
        assert page.inner_text(".turn.user pre") == second["messages"][0]["content"]
        page.goto(f"{address}#/agents?trace={identity((folder / 'team' / 'both-words.json').resolve())}")
        page.wait_for_selector("text=Answer: heron and otter")
        assert page.locator("ul.team button").count() == 3
        assert HOSTILE in page.inner_text("main") and page.evaluate("window.hacked") is None
        page.click("ul.team button[aria-label^='0.1: Word of b.txt']")
        page.wait_for_selector("text=documents: b.txt")
        page.goto(f"{address}#/agents?trace={identity((folder / 'team' / 'odd.json').resolve())}")
        page.wait_for_selector("h2:has-text('A team of 2')")
        assert page.evaluate("window.hacked") is None
