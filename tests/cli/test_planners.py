"""`foresight plan`: plans, verdicts and mistakes."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foresight.envs.pddl import domains, programs
from foresight.envs.text import planners
from foresight.planning.symbolic import genplan, search


def test_a_plan_is_found_written_and_validated(call: Callable, tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    assert call("plan", "gripper-2", "--out", file).code == 0
    steps = file.read_text().splitlines()
    assert call("plan", "gripper-2", "--validate", file).out.strip() == "valid"
    file.write_text("\n".join(steps[1:]))
    refused = call("plan", "gripper-2", "--validate", file)
    assert refused.code == 1 and "is false and must be true" in refused.out
    assert call("plan", "gripper-2", "--validate", file, "--json").json["kind"] == "unmet precondition"
    found = call("plan", "gripper-2", "--json").json
    assert found["status"] == "solved" and found["plan"] == steps


def test_a_plan_is_written_beside_its_json(call: Callable, tmp_path: Path) -> None:
    found = call("plan", "gripper-2", "--json", "--out", tmp_path / "new" / "plan.txt").json
    assert (tmp_path / "new" / "plan.txt").read_text().splitlines() == found["plan"] and found["status"] == "solved"


def test_what_cannot_be_written_is_known_before_the_search(
    call: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: Any, **options: Any) -> None:
        raise AssertionError("the search has begun")

    monkeypatch.setattr(search, "search", never)
    monkeypatch.setattr(genplan, "problems", never)
    (tmp_path / "file").write_text("")
    for words in (("plan", "gripper-2"), ("genplan", "--domain", "ferry", "--model", "written")):
        done = call(*words, "--out", tmp_path / "file" / "x")
        assert done.code == 2 and "file is not a folder. Choose another --out." in done.err
    assert "it is a folder" in call("plan", "gripper-2", "--out", tmp_path).err


def test_genplan_prints_what_it_could_not_write(
    call: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    words = ("genplan", "--domain", "ferry", "--model", "written", "--tasks", 2)
    done = call(*words, "--out", tmp_path / "x")
    assert done.code == 2 and "2 of 2 problems solved" in done.out and "No space left" in done.err


def test_mistakes_are_sentences(call: Callable, tmp_path: Path) -> None:
    for words, reported in (
        (["gripper-2", "--seconds", 0], "--seconds must be above 0, not 0"),
        (["nothing-3"], "Unknown domain 'nothing'"),
        (["gripper-2", "--validate", tmp_path / "none"], "Cannot read"),
        (["gripper-2", "--validate", "a.txt", "--out", "b.txt"], "--validate a.txt reads a plan and finds none"),
    ):
        done = call("plan", *words)
        assert done.code == 2 and reported in done.err


def test_genplan_runs_a_written_planner_and_a_recorded_dialogue(call: Callable, tmp_path: Path) -> None:
    done = call("genplan", "--domain", "ferry", "--model", "written", "--tasks", 2, "--names", "renamed")
    assert done.code == 0 and "ferry: 2 of 2 problems solved" in done.out
    (tmp_path / "d.json").write_text("[]")
    refused = call("genplan", "--domain", "ferry", "--model", tmp_path / "d.json", "--tasks", 1)
    assert refused.code == 2 and "recorded with other questions" in refused.err
    assert "must be at least 1" in call("genplan", "--domain", "ferry", "--tasks", 0).err


def test_genplan_asks_a_trained_model_as_it_was_trained(call: Callable, tmp_path: Path) -> None:
    asked = planners.prompt(domains.domain("ferry"))
    reply = programs.plain(programs.written("ferry"))
    dialogue = [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
    (tmp_path / "d.json").write_text(json.dumps(dialogue))
    words = ("genplan", "--domain", "ferry", "--model", tmp_path / "d.json", "--tasks", 2)
    assert "ferry: 2 of 2 problems solved" in call(*words, "--trained").out
    assert "recorded with other questions" in call(*words).err
