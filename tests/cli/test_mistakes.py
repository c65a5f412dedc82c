"""A person's mistake is one message on stderr, without a traceback, and exit code 2."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from foresight.agents import agent
from foresight.cli import fields
from foresight.cli import main as cli
from foresight.runtime.monitoring import health

CARTPOLE = ("train", "push.py", "--env", "CartPole-v1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "Unknown command 'trian'. Did you mean 'train'? Valid: agent, attention, bench, data"),
        (["train", "pop"], "Unknown algorithm 'pop'. Did you mean 'ppo'? Valid: "),
        (["show", "grppo"], "Unknown algorithm 'grppo'. Did you mean 'grpo'?"),
        (["train"], "No algorithm given"),
        (["train", "push.py"], "No env given for push: add --env NAME, or a preset: CartPole-v1"),
        (["train", "push.py", "--preset", "CartPol"], "Did you mean 'CartPole-v1'? Valid: CartPole-v1."),
        (["train", "push.py", "--learning-rat", "1"], "Unknown field 'learning_rat'. Did you mean 'learning_rate'?"),
        (["train", "push.py", "--env", "CartPoel-v1"], "Did you mean 'CartPole-v1'?"),
        (["train", "push.py", "--seed", "1", "--seed", "2"], "--seed is given twice"),
        (["train", "grpo", "--reward", "f.py:score"], "--reward is an option of the task: write --env-options reward="),
        (["train", "push.py", "--task", "addition"], "addition is a text task, which push does not read"),
        (["train", "push.py", "--env", "CartPole-v1", "--env-options", "num_envs"], "key=value"),
        (["train", "nothing.py"], "There is no algorithm file nothing.py"),
        (["eval", "nothing"], "not a run directory"),
        (["show", "n" * 300 + ".py"], "Choose a shorter name."),
        (["resume", "nothing"], "not a run directory"),
        (["play", "nothing"], "not a run directory"),
        (["plot", "nothing"], "not a run directory"),
        (["plot"], "at least one run"),
        (["bench", "no-such-thing"], "Unknown benchmark"),
        (["train", "push.py", "--learning-rate", "fast"], "--learning-rate"),
        (["eval"], "run directory"),
        (["data", "episodes", "--env", "TwoRoutes-v0", "--explore", "--out", "x"], "--explore is for runs"),
        (["data", "episodes", "--env", "TwoRoutes-v0", "--random", "5", "--out", "x"], "--random is for runs"),
        (["data", "episodes", "run", "--out", "x", "--seed", "-1"], "--seed must be at least 0, not -1."),
        (["attention", "run", "--seed", "-1"], "--seed must be at least 0, not -1."),
        (["tune", "push.py", "--seed", "-1"], "--seed must be at least 0, not -1."),
        (
            ["genplan", "--domain", "gripper", "--model", "written", "--seed", "-1"],
            "--seed must be at least 0, not -1.",
        ),
        (["train", "classifier", "--env", "digits", "--env-options", "size=3"], "option of 'digits' 'size'"),
        (
            ["train", "classifier", "--env", "digits", "--env-options", "held_out=1.5"],
            "must be a share between 0 and 1",
        ),
        (["train", "classifier", "--env", "digits", "--env-options", "held_out=all"], "such as 0.2, not all"),
        (["train", "classifier", "--env", "digits", "--env-options", "split=x"], "split must be a whole number, not x"),
        (["train", "grpo", "--task", "orders", "--env-options", "tool_seconds=x"], "tool_seconds must be more than 0"),
        (["train", "grpo", "--task", "orders", "--env-options", "turns=x"], "turns must be a whole number"),
        (["think", "self_consistency", "--task", "sorting", "--options", "width"], "--options takes key=value"),
        (
            ["think", "graph_of_thoughts", "--task", "sorting", "--model", "m"],
            "a scripted sorter and no language model: leave out --model",
        ),
        (["doctor", "--jsn"], "--json"),
        (["train", "push.py", "--env", ":"], "Environment ':': '' is not the name of a module, as in mine:Env-v0."),
        (["train", "push.py", "--env", ".x:Env-v0"], "'.x' is not the name of a module"),
        (["train", "push.py", "--env", ","], "',' names no environment: write names joined by commas"),
        ([*CARTPOLE, "--env-options", "engine=5"], "Unknown engine '5'."),
        ([*CARTPOLE, "--env-options", "frame_stack=1e30"], "frame_stack must be less than 2**31"),
        (
            [*CARTPOLE, "--env-options", "name=x"],
            "cannot give 'name', which this library itself chooses by: leave it out.",
        ),
        ([*CARTPOLE, "--env-options", "kind=5"], "cannot give 'kind'"),
        ([*CARTPOLE, "--device", "meta"], "The device 'meta' cannot be used here: it holds no numbers."),
        (["plot", "no", "--model", "3", "--out", "x.jpg"], "must end in one of .png, .svg, .pdf, .mp4, .gif"),
        (["attention", "no", "--text", "2", "--out", "a.html", "push.py/b.html"], "push.py is not a folder."),
        (["agent", "no", "hi", "--tools", "calculator", "--tools", "python"], "--tools is given twice: write it once"),
        (["data", "episodes", "no", "--out", "x", "--env-options", "a=1", "--env_options=b=2"], "is given twice"),
        (["eval", "no", "--seed", "1", "--seed=2"], "--seed is given twice"),
    ],
)
def test_mistakes(push: Path, call: Callable, words: list[str], message: str) -> None:
    done = call(*words)
    assert done.code == 2, done.err
    assert message in done.err and "Traceback" not in done.err and done.out == ""


def test_what_follows_two_dashes_is_no_option() -> None:
    fields.check_once(["agent", "--seed", "1", "--", "--seed", "--seed"])


def test_a_home_folder_is_found_behind_an_equals_sign(
    push: Path, call: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(push.parent / "home"))
    (push.parent / "home" / "notes").mkdir(parents=True)
    (push.parent / "home" / "notes" / "a.txt").write_text("apples")
    assert call("train", "push.py", "--env", "CartPole-v1", "--out=~/run", "--evaluation-episodes", 1).code == 0
    assert call("plot", "home/run", "--out=~/c.png").code == 0
    assert (push.parent / "home" / "c.png").is_file() and not (push.parent / "~").exists()
    assert {tool.name for tool in agent.documents("~/notes")} == {"search", "read"}
    assert fields.expanded(["--prompt=~/x", "~", "--out", "a=~"]) == ["--prompt=~/x", "~", "--out", "a=~"]  # no paths


def test_a_run_is_not_written_over(push: Path, call: Callable) -> None:
    words = ("train", "push.py", "--env", "CartPole-v1", "--out", "run", "--evaluation-episodes", 1)
    assert call(*words).code == 0
    before = (Path("run") / "metrics.jsonl").read_bytes()
    again = call(*words)
    assert again.code == 2 and "already holds a run" in again.err and "foresight resume run" in again.err
    assert (Path("run") / "metrics.jsonl").read_bytes() == before


def test_what_an_environment_cannot_do_is_reported(push: Path, call: Callable) -> None:
    assert call("train", "push.py", "--env", "CartPole-v1", "--out", "run", "--evaluation-episodes", 1).code == 0
    assert "--prompt is for language runs" in call("play", "run", "--prompt", "hello").err
    assert "must end in" in call("play", "run", "--gif", "out.avi").err
    assert "at least 1" in call("eval", "run", "--episodes", 0).err


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (ModuleNotFoundError("No module named 'ale_py'", name="ale_py"), 2, "pip install 'foresight[atari]'"),
        (ModuleNotFoundError("No module named 'a_b'", name="a_b.c"), 2, "pip install a-b"),
        (OSError(errno.ENOSPC, "No space left on device", "/runs/x"), 2, "No space left on device: /runs/x"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "Permission denied: /x"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/x"), 2, "Disk quota exceeded: /x. Free space, or write to"),
        (MemoryError("Unable to allocate 32.0 TiB"), 2, "not enough memory (Unable to allocate 32.0 TiB). Lower"),
        (MemoryError(), 2, "There is not enough memory (MemoryError). Lower what needs most of it"),
        (
            RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error"),
            2,
            "not enough memory (can't allocate memory: you tried to allocate 8 bytes. Error). Lower",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0"), 2, "Tried to allocate 2 GiB). Lower"),
        (
            RuntimeError("Storage size calculation overflowed with sizes=[64, 99]"),
            2,
            "overflowed with sizes=[64, 99]).",
        ),
        (ValueError("array is too big; `arr.size` is larger"), 2, "There is not enough memory (array is too big;"),
        (KeyboardInterrupt("Stopped. Continue with: foresight resume r"), 130, "foresight resume r"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_the_system(
    call: Callable, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, message: str
) -> None:
    def fail(argv: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "_dispatch", fail)
    done = call("list")
    assert done.code == code and message in done.err and "Traceback" not in done.err


def test_warnings_of_the_package_are_notes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def warn(argv: list[str]) -> int:
        print(*(warnings.formatwarning("ask for 2", UserWarning, file, 7) for file in (cli.__file__, "/x/y.py")))
        return 0

    monkeypatch.setattr(cli, "_dispatch", warn)
    before = warnings.formatwarning
    assert cli.main([]) == 0 and warnings.formatwarning is before
    assert capsys.readouterr().out == "note: ask for 2\n /x/y.py:7: UserWarning: ask for 2\n\n"


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("a bug"),
        RuntimeError("a bug"),
        ModuleNotFoundError("x", name="foresight.gone"),
        OSError(errno.EIO, "broken"),
    ],
)
def test_our_own_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    def fail(argv: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(type(raised)):
        cli.main(["list"])


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m foresight show ppo | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or os.name != "posix", reason="posix signals")
def test_ctrl_c_saves_and_reports_how_to_continue(push: Path, call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own is stopped so in `tests/studio/test_control.py`."""
    pending = [signal.SIGINT]

    def interrupt(*_: object) -> list[str]:
        if pending:
            os.kill(os.getpid(), pending.pop())
        return []

    monkeypatch.setattr(health.Health, "check", interrupt)
    words = ("train", "push.py", "--env", "CartPole-v1", "--steps", 10**9, "--out", "run", "--evaluation-episodes", 1)
    done = call(*words)
    assert done.code == 130, done.err
    assert "foresight resume run" in done.err and "Traceback" not in done.err
    assert list((Path("run") / "checkpoints").iterdir())
