"""The Thoughts view: what `foresight think` wrote, and what becomes of reports that are broken, hostile or old."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from foresight.studio import app, thoughts
from tests.studio.reports import think

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a report that the command wrote, with a scripted model."""
    folder = tmp_path_factory.mktemp("reports")
    think(folder / "think" / "small")
    return folder


@pytest.fixture(scope="module")
def client(reports: Path) -> TestClient:
    return TestClient(app.create([reports]), base_url="http://127.0.0.1:8765")


def test_a_report_is_shown_as_it_was_written(client: TestClient, reports: Path) -> None:
    (listed,) = client.get("/api/thoughts").json()
    assert listed["name"] == "small" and listed["methods"] == ["greedy", "self_consistency", "tree_of_thoughts"]
    found = client.get(f"/api/thoughts/{listed['id']}").json()
    written = json.loads((reports / "think" / "small" / "think.json").read_text())
    assert found["rows"] == written["rows"] and found["verifier"] == "exact"
    examples = json.loads((reports / "think" / "small" / "thoughts.json").read_text())["examples"]
    assert [one["question"] for one in found["examples"]] == [one["question"] for one in examples]
    for i, example in enumerate(examples):
        for result in example["results"]:
            asked = {"method": result["method"], "budget": result["budget"]}
            shown = client.get(f"/api/thoughts/{listed['id']}/{i}", params=asked).json()
            assert shown == {**result, "hidden": 0}


def test_accuracy_is_the_share_of_right_questions(client: TestClient) -> None:
    found = client.get(f"/api/thoughts/{client.get('/api/thoughts').json()[0]['id']}").json()
    for row in found["rows"]:
        rewards = [
            result["reward"]
            for example in found["examples"]
            for result in example["results"]
            if (result["method"], result["budget"]) == (row["method"], row["budget"])
        ]
        assert len(rewards) == 3 and sum(rewards) / 3 == pytest.approx(row["accuracy"])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none", "no report"),
        ("{id}/9?method=greedy&budget=24", "no question 9"),
        ("{id}/0?method=beam&budget=24", "did not answer"),
    ],
)
def test_what_is_not_there_is_named(client: TestClient, path: str, words: str) -> None:
    name = client.get("/api/thoughts").json()[0]["id"]
    answer = client.get("/api/thoughts/" + path.format(id=name))
    assert answer.status_code == 400 and words in answer.json()["error"]


EDITED = [{"results": [3, {"method": "a", "budget": 8, "tree": tree}]} for tree in (True, {"nodes": True})]


def test_broken_old_and_large_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"method": HOSTILE, "budget": 8, "accuracy": 0.5}]
    for name, report, examples in (
        ("cut", '{"rows": [', "{}"),
        ("empty", "{}", "{}"),
        ("old", json.dumps({"task": "t", "rows": rows}), None),
        ("wrong", json.dumps({"task": "t", "rows": rows}), '{"examples": [{"results": 3}, 4]}'),
        ("list", json.dumps({"task": "t", "rows": [{"method": ["m"]}, *rows]}), json.dumps({"examples": EDITED})),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "think.json").write_text(report)
        if examples is not None:
            (tmp_path / name / "thoughts.json").write_text(examples)
    result = {"method": HOSTILE, "budget": 8, "tree": {"question": "q", "nodes": [{"text": HOSTILE}] * 50}}
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "think.json").write_text(json.dumps({"task": HOSTILE, "rows": rows}))
    (tmp_path / "large" / "thoughts.json").write_text(json.dumps({"examples": [{"results": [result]}]}))
    monkeypatch.setattr(thoughts, "MOST", 20)
    client = TestClient(app.create([tmp_path]), base_url="http://127.0.0.1:8765")
    listed = {one["name"]: one for one in client.get("/api/thoughts").json()}
    assert set(listed) == {"old", "wrong", "large", "list"}
    for number, tree in enumerate(({}, {"nodes": []})):
        shown = client.get(f"/api/thoughts/{listed['list']['id']}/{number}", params={"method": "a", "budget": 8}).json()
        assert {**tree, "nodes": []} == shown["tree"] and shown["hidden"] == 0
    assert len(client.get(f"/api/thoughts/{listed['list']['id']}").json()["examples"]) == 2
    assert client.get(f"/api/thoughts/{listed['old']['id']}").json()["examples"] == []
    assert client.get(f"/api/thoughts/{listed['wrong']['id']}").json()["examples"] == []
    shown = client.get(f"/api/thoughts/{listed['large']['id']}/0", params={"method": HOSTILE, "budget": 8}).json()
    assert len(shown["tree"]["nodes"]) == 20 and shown["hidden"] == 30
