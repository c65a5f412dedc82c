"""An option that a command would not use, for this run or with these other options, is refused and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from foresight.cli.main import main
from tests.cli.conftest import PUSH, SUM


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each kind but games, and two algorithm files."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "push.py").write_text(PUSH)
    (folder / "adder.py").write_text(SUM)
    for out, *words in (
        ("control", str(folder / "push.py"), "--env", "CartPole-v1", "--evaluation-episodes", "1"),
        ("text", str(folder / "adder.py"), "--task", "addition", "--evaluation-episodes", "2"),
        ("tabular", "value_iteration", "--env", "GridWorld4x4"),
        ("images", "classifier", "--preset", "digits", "--steps", "2", "--evaluation-episodes", "2"),
    ):
        assert main(["train", *words, "--out", str(folder / out)]) == 0
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("play images", "classifier was trained on 'digits', which cannot be played. Evaluate it with: foresight eval"),
        ("play control --side second", "--side is for games, and "),
        ("play control --simulations 50", "--simulations is for games"),
        ("play control --tokens 9", "--tokens is for language runs"),
        (
            "play control --imagine --prompt hi",
            "--prompt is for language runs, and --imagine acts inside",
        ),
        ("play control --seed -1", "--seed must be at least 0"),
        ("play tabular --seed 3", "--seed is for environments"),
        ("play text --prompt hi --gif x.gif", "--gif is for environments and grids"),
        ("play text --prompt hi --tokens 0", "--tokens must be at least 1, not 0."),
        ("play text --simulations 5", "--simulations is for games"),
        ("plot control --model 10 --metric return", "--metric is for learning curves"),
        ("plot control --model 10 --x seconds", "--x is for learning curves"),
        ("export text --format merged --quantize q4_0", "--quantize is for --format gguf, not for merged"),
        ("bench impala --peer-python python", "--peer-python is for --against PEER, which is not given"),
        ("bench --rounds 5", "--rounds is for one workload"),
        ("reproduce sutton-barto --list --missing", "--missing is for rows that run, and --list runs none"),
        ("reproduce sutton-barto --list --seeds 1", "--seeds is for rows that run"),
        ("reproduce --quick", "--quick is for one suite, and none is named"),
        ("attention text --text t --steps 5", "--steps is for agents that act, and --text is read"),
        ("train adder.py --task addition --record", "--record films the agent in an environment of the kind 'control'"),
        ("train value_iteration --env GridWorld4x4 --record", "'GridWorld4x4' is of the kind 'tabular'"),
        ("resume text --steps 3 --record", "'addition' is of the kind 'text'"),
    ],
)
def test_it_is_named(runs: Path, call: Callable, monkeypatch: pytest.MonkeyPatch, words: str, message: str) -> None:
    monkeypatch.chdir(runs)
    before = {file: file.stat().st_mtime_ns for file in runs.rglob("*") if file.suffix in (".json", ".jsonl", ".yaml")}
    done = call(*words.split())
    assert done.code == 2 and message in " ".join(done.err.split()) and "Traceback" not in done.err, done.err
    assert before == {file: file.stat().st_mtime_ns for file in before} and not (runs / "runs").exists()


def test_an_algorithm_without_a_length_of_answers_takes_none(runs: Path, call: Callable) -> None:
    """Such as a reward model, which scores answers."""
    source, run = runs / "short.py", runs / "short"
    source.write_text(SUM.replace("    max_new_tokens: int = 8\n", "").replace("[: state.config.max_new_tokens]", ""))
    assert call("train", source, "--task", "addition", "--out", run, "--evaluation-episodes", 2).code == 0
    assert call("play", run, "--prompt", "1 + 2").out == "It is 3.\n"
    refused = call("play", run, "--prompt", "1 + 2", "--tokens", 5)
    assert refused.code == 2 and "has no max_new_tokens: leave it out." in refused.err


def test_what_cannot_be_played_is_not_recommended(runs: Path, call: Callable) -> None:
    words = ("train", "classifier", "--preset", "digits", "--steps", 1, "--evaluation-episodes", 2, "--out", runs / "c")
    out = call(*words).out
    assert f"foresight eval {runs / 'c'}\n" in out and "foresight play" not in out
