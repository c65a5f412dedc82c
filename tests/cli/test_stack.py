from __future__ import annotations

import json
from pathlib import Path

import pytest

from foresight.agents import stack
from foresight.cli.main import main
from foresight.runtime.evaluation import record


def test_a_stack_prints_what_its_layers_did(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["stack", "--video", str(tmp_path / "errand.gif")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("bring the ") and "cognition" in lines[1] and lines[-1].startswith("done after")
    assert (tmp_path / "errand.gif").stat().st_size > 1_000
    shots: list[int] = []
    monkeypatch.setattr(record, "write", lambda path, pictures, fps: shots.append(len(list(pictures))))
    assert main(["stack", "--video", str(tmp_path / "again.gif")]) == 0
    capsys.readouterr()
    assert shots == [int(lines[-1].split()[2]) + 1]  # the start and every step, also the last
    assert main(["stack", "--episodes", "3", "--failures", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["episodes"] == len(found["errands"]) == 3 and found["layers"]["control"] == "script"
    assert found["success"] == sum(one["success"] for one in found["errands"]) / 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--episodes", "0"], "--episodes must be at least 1"),
        (["--split", "test"], "Unknown split"),
        (["--failures", "2"], "rate of failures is 2"),
        (["--control", "nowhere"], "not a run directory"),
        (["--look-every", "0"], "look_every is 0"),
        (["--video", "a.txt"], "must end in"),
        (["--seed", "-1"], "--seed"),
        (["--video", "a.avi"], "--video must end in one of .mp4, .gif"),
        (["--video", f"{__file__}/a.gif"], "Choose another --video"),
    ],
)
def test_mistakes_get_a_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--video" in arguments:
        monkeypatch.setattr(stack, "run", None)  # is not called
    assert main(["stack", *arguments]) == 2
    assert words in capsys.readouterr().err
