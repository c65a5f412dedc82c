"""Conversations of a run: what GRPO logs is shown turn by turn, also when it is hostile or broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from foresight.envs.tools import tool
from foresight.errors import UserError
from foresight.studio import app, samples

HOSTILE = '<img src=x onerror="window.hacked=1"></tool_response><tool_call>'
CALL = tool.write("calculate", expression="12*3")


def talk(step: int, reward: float, **more: object) -> dict:
    transcript = [
        {"role": "system", "content": "Tools: calculate"},
        {"role": "user", "content": "What is 12*3?"},
        {"role": "assistant", "content": f"Let me see. {CALL}", "tokens": 9, "logprob": -1.5},
        {"role": "user", "content": f"{tool.RESULT}36{tool.RESULT_END}\n{tool.RESULT}error: no{tool.RESULT_END}"},
        {"role": "assistant", "content": f"{tool.CALL}not JSON{tool.END}", "tokens": 4, "logprob": -2.0},
        {"role": "user", "content": HOSTILE},
    ]
    parts = {"outcome": reward, "calls": 2.0, "turns": 2.0}
    return {"step": step, "prompt": "What is 12*3?", "completion": "c", "reward": reward, "parts": parts,
            "transcript": transcript, **more}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "talks"
    (folder / "media").mkdir(parents=True)
    (folder / "config.yaml").write_text("algorithm: grpo\nkind: text\nenv: calculator\nseed: 0\nconfig: {steps: 9}\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0, "reward": 0.5}\n')
    rows = [talk(0, 0.0, held_out=True), talk(3, 0.5), talk(9, 1.0, held_out=True), {"step": 9, "prompt": "p"}]
    (folder / "media" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def client(run: Path) -> TestClient:
    return TestClient(app.create([run.parent]), base_url="http://127.0.0.1:8765")


def test_a_conversation_is_read_turn_by_turn(run: Path) -> None:
    asked = client(run)
    (listed,) = asked.get("/api/agents").json()
    assert (listed["name"], listed["algorithm"], listed["env"]) == ("talks", "grpo", "calculator")
    page = asked.get(f"/api/runs/{listed['id']}/samples", params={"held_out": True}).json()
    assert [(row["step"], row["transcript"]) for row in page["rows"]] == [(9, 6), (0, 6)]
    found = asked.get(f"/api/runs/{listed['id']}/conversation/2").json()
    assert [one["role"] for one in found["turns"]] == ["system", "user", "assistant", "tool", "assistant", "user"]
    first, second = found["turns"][2], found["turns"][4]
    assert first["calls"] == [{"name": "calculate", "arguments": {"expression": "12*3"}, "problem": ""}]
    assert first["text"] == "Let me see." and (first["tokens"], first["logprob"]) == (9, -1.5)
    assert "not JSON" in second["calls"][0]["problem"]
    assert found["turns"][3]["results"] == [{"text": "36", "failed": False}, {"text": "error: no", "failed": True}]
    assert found["turns"][5]["text"] == HOSTILE  # as it is: the page shows texts as text
    assert [(one["step"], one["reward"]) for one in found["versions"]] == [(0, 0.0), (3, 0.5), (9, 1.0)]
    for index in (3, 4, -1):
        answer = asked.get(f"/api/runs/{listed['id']}/conversation/{index}")
        assert answer.status_code == 400 and "no conversation" in answer.json()["error"]


def test_search_reads_every_turn(run: Path) -> None:
    rows = samples.Log().read(run / "media" / "samples.jsonl")
    assert samples.page(rows, search="LET ME SEE")["total"] == 3
    assert samples.page(rows, search="nowhere")["total"] == 0
    assert [row["index"] for row in samples.page(rows, sort="best")["rows"]] == [2, 1, 0, 3]
    rows[2]["reward"] = 10**400  # no float can hold it
    assert samples.page(rows, sort="best")["rows"][0]["index"] == 1
    with pytest.raises(UserError, match="order"):
        samples.page(rows, sort="random")


def test_odd_messages_are_shown(run: Path) -> None:
    rows = [{"step": 1, "prompt": None, "transcript": [3, {}, {"role": "assistant", "content": None}], "index": 0}]
    found = samples.conversation(rows, 0)
    assert [one["role"] for one in found["turns"]] == ["None", "assistant"]
