"""`foresight data`, and `foresight train NAME --data FILE` on what it made."""

from __future__ import annotations

import json

import pytest

from foresight.cli.main import main
from foresight.runtime.run import Run
from tests import tiny_language
from tests.openai_server import Stub, serve


@pytest.fixture
def digits(tmp_path):
    task, reward = tmp_path / "task.jsonl", tmp_path / "rewards.py"
    task.write_text("\n".join(json.dumps({"prompt": f"{i}+{j}?"}) for i in range(5) for j in range(5)))
    reward.write_text("def digits(completions, **_):\n    return [sum(map(str.isdigit, c)) for c in completions]\n")
    return ["--task", str(task), "--model", tiny_language.folder(), "--env-options", f"reward={reward}:digits"]


def _rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_preferences_put_the_better_answer_first_and_can_be_learned(digits, tmp_path, capsys):
    out = tmp_path / "pairs.jsonl"
    assert main(["data", "preferences", *digits, "--out", str(out), "--max-new-tokens", "30", "--group", "6"]) == 0
    rows = _rows(out)
    assert len(rows) > 5
    assert str(len(rows)) in capsys.readouterr().out
    for row in rows:
        good, bad = (sum(map(str.isdigit, row[name])) for name in ("chosen", "rejected"))
        assert good > bad
        assert (row["chosen_reward"], row["rejected_reward"]) == (good, bad)
    run = tmp_path / "run"
    arguments = ["--data", str(out), "--model", tiny_language.folder(), "--precision", "float32", "--steps", "2"]
    assert main(["train", "dpo", *arguments, "--out", str(run)]) == 0
    assert Run(run).summary["evaluation"]["metric"] == "pair accuracy"
    assert Run(run).summary["baseline"]["mean"] == 0.5
    assert (run / "export" / "model.safetensors").is_file()


def test_demonstrations_are_good_enough(digits, tmp_path):
    out = tmp_path / "shown.jsonl"
    assert main(["data", "demonstrations", *digits, "--out", str(out), "--max-new-tokens", "30", "--least", "2"]) == 0
    assert all(sum(map(str.isdigit, row["completion"])) >= 2 for row in _rows(out))


def test_a_server_answers_in_place_of_the_model(digits, tmp_path, capsys):
    out = tmp_path / "shown.jsonl"
    arguments = ["data", "demonstrations", *digits, "--max-new-tokens", "30", "--group", "3", "--out"]
    with serve(Stub(tiny_language.model())) as stub:
        assert main([*arguments, str(out), "--completer", stub.url]) == 0
        assert len(stub.requests) == 20 and not stub.loaded
    assert _rows(out)
    assert main([*arguments, str(tmp_path / "b.jsonl"), "--completer", "localhost:8000"]) == 2
    assert "--completer must be the URL of a server" in capsys.readouterr().err.replace("\n", " ")


def test_several_models_answer(digits, tmp_path, capsys):
    one, two, common = tmp_path / "one.jsonl", tmp_path / "two.jsonl", ["--max-new-tokens", "30", "--group", "4"]
    assert main(["data", "preferences", *digits, *common, "--out", str(one)]) == 0
    assert (
        main(["data", "preferences", *digits, *common, "--model", *[tiny_language.folder()] * 2, "--out", str(two)])
        == 0
    )
    assert _rows(two)[: len(_rows(one))] == _rows(one) and len(_rows(two)) > len(_rows(one))
    assert "from 40 prompts" in capsys.readouterr().out
    servers = ["--model", "a", "b", "--completer", "http://localhost:8000"]
    assert main(["data", "preferences", *digits, *servers, "--out", str(tmp_path / "x.jsonl")]) == 2
    assert "A server has the weights of one model" in capsys.readouterr().err.replace("\n", " ")


def test_mistakes_are_reported(digits, tmp_path, capsys):
    out = tmp_path / "x.jsonl"
    out.write_text("")
    assert main(["data", "preferences", *digits, "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    out.unlink()
    assert main(["data", "demonstrations", *digits, "--out", str(out), "--least", "99", "--prompts", "2"]) == 2
    assert "None of the 2 prompts gave demonstrations" in capsys.readouterr().err.replace("\n", " ")
    assert not out.exists()
    for option in ("--max-new-tokens", "--group", "--prompts", "--most"):
        assert main(["data", "demonstrations", *digits, "--out", str(out), option, "0"]) == 2
        assert f"{option} must be at least 1, not 0" in capsys.readouterr().err.replace("\n", " ")
    assert main(["data", "demonstrations", *digits, "--out", str(out), "--temperature", "-1"]) == 2
    assert "--temperature must be at least 0" in capsys.readouterr().err.replace("\n", " ")
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}  # of rewards.py, unless Python writes none
    assert left == {"task.jsonl", "rewards.py"}
    assert main(["train", "dpo", "--model", tiny_language.folder()]) == 2
    assert "No task given for dpo: add --task NAME" in capsys.readouterr().err.replace("\n", " ")


def test_planners_are_written_as_demonstrations(call, tmp_path):
    out = tmp_path / "planners.jsonl"
    done = call("data", "planners", "--out", out, "--env-options", "size=3", "planning=gripper")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.code == 0 and len(rows) == 3 and all("def get_plan" in row["completion"] for row in rows)
    assert call("data", "planners", "--out", out).code == 2
