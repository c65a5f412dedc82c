"""Runs: the directory, precedence, what is kept when things go wrong, and exact resumption."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import foresight
from foresight.cli.main import main
from foresight.errors import UserError
from foresight.runtime import lock, session
from foresight.runtime.checkpoints import checkpoint
from foresight.runtime.checkpoints.checkpoint import find as find_checkpoint
from foresight.runtime.config import paths, resolve
from foresight.runtime.evaluation import evaluate
from foresight.runtime.monitoring import log, profile
from foresight.runtime.monitoring.finite import bad_metric
from foresight.runtime.run import Run
from foresight.runtime.session import Interrupted
from foresight.runtime.triggers import Every, Interruption
from tests import forks
from tests.sabotage import sabotaged_by

ROOT = Path(__file__).resolve().parents[2]
ADDER = str(Path(__file__).with_name("adder.py"))


def adder(out: Path, **options: Any) -> Run:
    return foresight.train(ADDER, **{"task": "addition", "out": out, "show": False, **options})


def contents(path: Path) -> dict[str, str]:
    """The hashes of a checkpoint's State, without what the runtime adds (it has times in it)."""
    files = json.loads((path / "manifest.json").read_text())["files"]
    state = json.dumps(json.loads((path / "state.json").read_text())["state"])
    return {**{n: f["sha256"] for n, f in files.items() if n not in ("state.json", "runtime.safetensors")}, "": state}


def rows(run: Run) -> list[dict[str, Any]]:
    """What a run wrote, without what depends on a clock."""
    clock = ("seconds", *profile.RATES)
    return [
        {key: value for key, value in row.items() if key not in clock and not key.startswith("profile/")}
        for row in run.metrics()
    ]


def test_the_run_directory(tmp_path: Path) -> None:
    run = adder(tmp_path / "a", steps=600, seed=3, log_samples=True, evaluate_every=300)
    assert run.evaluation.mean > 0.9 > 0.5 > run.baseline.mean  # it learned, and the baseline was measured before
    assert run.evaluation.n == 100 and run.evaluation.metric == "accuracy"
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert config["seed"] == 3 and config["env"] == "addition" and config["config"]["learning_rate"] == 0.05
    assert config["config"]["steps"] == 600 and "torch" in config["versions"]
    summary = json.loads((run.path / "summary.json").read_text())
    wanted = {"algorithm", "preset", "env", "seed", "steps", "seconds", "baseline", "evaluation", "command", "versions"}
    assert wanted <= set(summary) and {"cores", "memory", "device"} <= set(summary["machine"])
    assert set(summary["evaluation"]) == {"metric", "mean", "std", "n"} and summary["steps"] == 600
    text = (run.path / "summary.json").read_text() + (run.path / "config.yaml").read_text()
    assert os.uname().nodename not in text
    assert [row["step"] for row in run.metrics() if "loss" in row] == list(range(1, 601))
    evaluated = [(row["step"], row["evaluation/accuracy"]) for row in run.metrics() if "evaluation/accuracy" in row]
    assert [step for step, _ in evaluated] == [300, 600] and evaluated[-1][1] == run.evaluation.mean
    samples = log.read(run.path, log.SAMPLES)
    assert [row["step"] for row in samples if "held_out" not in row] == list(range(1, 601))
    held_out = [(row["step"], row["prompt"]) for row in samples if row.get("held_out")]
    first = [prompt for step, prompt in held_out if step == 0]
    assert len(first) == 16 and held_out == [(step, prompt) for step in (0, 300, 600) for prompt in first]
    assert any((run.path / "tensorboard").iterdir())
    assert list(checkpoint.all_steps(run.path / "checkpoints"))[-1] == 600
    assert "accuracy" in repr(run)


def test_a_learning_rate_that_is_changed_between_is_the_one_that_is_used(tmp_path: Path) -> None:
    same, lower = adder(tmp_path / "a", steps=10, decay=0.9), adder(tmp_path / "b", steps=10, decay=0.9)
    text = (lower.path / "config.yaml").read_text()
    assert "learning_rate: 0.05" in text
    (lower.path / "config.yaml").write_text(text.replace("learning_rate: 0.05", "learning_rate: 0.001"))
    for one, rate in ((same, 0.05 * 0.9**10), (lower, 0.001)):
        state = foresight.load(str(foresight.resume(one.path, steps=20, show=False).path)).state
        assert math.isclose(state.optimizer.param_groups[0]["lr"], rate * 0.9**10, rel_tol=1e-6)


def test_a_setting_of_an_optimizer_that_is_changed_between_is_the_one_that_is_used(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        Path(ADDER).read_text()
        .replace("    bias: bool = True", "    weight_decay: float = 0.1\n    bias: bool = True")
        .replace("lr=config.learning_rate)", "lr=config.learning_rate, weight_decay=config.weight_decay)")
    )  # fmt: skip
    run = foresight.train(str(own), task="addition", out=tmp_path / "a", steps=10, decay=0.9, show=False)
    text = (run.path / "config.yaml").read_text()
    assert "weight_decay: 0.1" in text
    (run.path / "config.yaml").write_text(text.replace("weight_decay: 0.1", "weight_decay: 0.3"))
    (group,) = foresight.resume(run.path, steps=20, show=False).load().state.optimizer.param_groups
    assert group["weight_decay"] == 0.3 and math.isclose(group["lr"], 0.05 * 0.9**20, rel_tol=1e-6)


def test_evaluating_changes_nothing(tmp_path: Path) -> None:
    often = adder(tmp_path / "often", evaluate_every=7)
    never = adder(tmp_path / "never")
    assert contents(find_checkpoint(often.path)) == contents(find_checkpoint(never.path))


def test_a_repeated_command_repeats_the_run(tmp_path: Path) -> None:
    once, again = adder(tmp_path / "a", seed=1), adder(tmp_path / "b", seed=1)
    assert contents(find_checkpoint(once.path)) == contents(find_checkpoint(again.path))
    other = adder(tmp_path / "c", seed=2)
    assert contents(find_checkpoint(once.path)) != contents(find_checkpoint(other.path))


def kill(out: Path, call: str, step: int) -> None:
    """Run `call` in a process and kill it when there is a checkpoint at or after `step`."""
    running = forks.start(["-c", f"import time, foresight; {call}"])
    until = time.monotonic() + 120
    while max(checkpoint.all_steps(out / "checkpoints"), default=0) < step:
        assert time.monotonic() < until, "no checkpoint"
        assert running.poll() is None, "it has ended"
        time.sleep(0.002)
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert not (out / "summary.json").exists()


def test_killed_twice_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole = adder(tmp_path / "whole", steps=120, decay=0.99, layers=(4,), evaluate_every=50)
    out = tmp_path / "killed"
    often = f"{str(out)!r}, show=False, checkpoint_every=0.05)"
    options = "task='addition', steps=120, pause=0.01, decay=0.99, layers=(4,), evaluate_every=50"
    kill(out, f"foresight.train({ADDER!r}, {options}, out={often}", 20)
    kill(out, f"foresight.resume({often}", 60)
    assert max(checkpoint.all_steps(out / "checkpoints")) < 120
    resumed = foresight.resume(out, show=False)
    assert contents(find_checkpoint(resumed.path)) == contents(find_checkpoint(whole.path))
    assert rows(resumed) == rows(whole)  # nothing twice, nothing missing, every float the same
    assert resumed.evaluation.mean == whole.evaluation.mean and resumed.baseline.mean == whole.baseline.mean


def test_value_iteration_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    options = "env='RandomMDP', env_options={'states': 100}, gamma=0.98, tolerance=1e-6"
    whole = eval(f"foresight.train('value_iteration', {options}, out={str(tmp_path / 'a')!r}, show=False)")
    out = tmp_path / "killed"
    often = f"out={str(out)!r}, show=False, checkpoint_every=0.01"
    slow = "callbacks=[lambda *_: time.sleep(0.005)]"  # 400 more steps than it is given
    kill(out, f"foresight.train('value_iteration', {options}, {often}, {slow})", 100)
    resumed = foresight.resume(out, show=False)
    assert contents(find_checkpoint(resumed.path)) == contents(find_checkpoint(whole.path))
    assert rows(resumed) == rows(whole) and resumed.summary["steps"] > 500


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    whole = adder(tmp_path / "whole")
    out = tmp_path / "young"
    out.mkdir()
    (out / "config.yaml").write_text((whole.path / "config.yaml").read_text())
    (out / "metrics.jsonl").write_text('{"step": 1, "seconds": 0.1, "loss": 3.0}\n{"step": 2, "sec')
    assert rows(foresight.resume(out, show=False)) == rows(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_reports_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    from foresight.runtime.monitoring import health

    def interrupt(self: Any, step: int, metrics: Any) -> list[str]:
        if step == 15:
            os.kill(os.getpid(), number)
        return []

    before = signal.getsignal(signal.SIGINT)  # ignored, where the shell started the tests in the background
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="foresight resume") as stopped:
        patch.setattr(health.Health, "check", interrupt)
        adder(tmp_path / "a", evaluate_every=5)  # also at 15, for which there is no time: the resumed run does it
    assert stopped.value.exit_code == 128 + number and isinstance(stopped.value, KeyboardInterrupt)
    assert list(checkpoint.all_steps(tmp_path / "a" / "checkpoints")) == [5, 15]  # the best, and the last
    assert signal.getsignal(signal.SIGINT) is before
    resumed = foresight.resume(tmp_path / "a", show=False)
    assert rows(resumed) == rows(adder(tmp_path / "b", evaluate_every=5))


@pytest.mark.parametrize("to", ["this process, while it waits for the others", "another process alone"])
def test_all_processes_stop_together_and_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    asked: list[bool] = []

    def jointly(flag: bool) -> bool:
        asked.append(flag)
        if len(asked) == 21:
            if to.startswith("another"):
                return True
            os.kill(os.getpid(), signal.SIGTERM)  # after this process has reported none
        return flag

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=r"updates is saved.*resume") as stopped:
        patch.setattr(session.distributed, "any_rank", jointly)
        adder(tmp_path / "a")
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert len(list(checkpoint.all_steps(tmp_path / "a" / "checkpoints"))) == 1
    assert rows(foresight.resume(tmp_path / "a", show=False)) == rows(adder(tmp_path / "b"))


def test_a_process_that_is_stopped_in_a_long_evaluation_has_saved_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = evaluate.evaluate
    passed = iter((True, True, True, False))  # the baseline, those at 5 and 10, and that at 15

    def stopped(*given: Any) -> Any:
        if not next(passed):
            raise KeyboardInterrupt
        return evaluated(*given)

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="checkpoint at 15 updates is saved"):
        patch.setattr(session, "LONG", -1.0)
        patch.setattr(evaluate, "evaluate", stopped)
        adder(tmp_path / "a", evaluate_every=5)
    assert rows(foresight.resume(tmp_path / "a", show=False)) == rows(adder(tmp_path / "b", evaluate_every=5))


def test_the_first_evaluation_of_a_resumed_run_takes_as_long_as_the_last_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, took = [0.0], [20.0]
    evaluated = evaluate.evaluate

    def slow(*given: Any) -> Any:
        clock[0] += took[0]
        if took[0] > 20:
            raise KeyboardInterrupt
        return evaluated(*given)

    monkeypatch.setattr(session.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(evaluate, "evaluate", slow)
    run = adder(tmp_path / "a", steps=10)
    took[0] = 40.0
    with pytest.raises(Interrupted, match="checkpoint at 15 updates is saved"):
        text = (run.path / "config.yaml").read_text()
        (run.path / "config.yaml").write_text(text.replace("every: null", "every: 5"))
        foresight.resume(run.path, steps=30, show=False)


def test_a_step_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time would replace the only checkpoint: killed in between there would be none."""
    save, saved = checkpoint.save, list[int]()
    monkeypatch.setattr(checkpoint, "save", lambda *given: saved.append(given[2]) or save(*given))
    adder(tmp_path / "a", steps=12, checkpoint_every=0, evaluate_every=1, keep=1)
    assert saved == list(range(1, 13))


def test_a_run_that_is_stopped_while_it_is_built_names_no_run_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as stop:
        patch.setattr(session.Session, "_build", stopped)
        adder(tmp_path / "a")
    assert not isinstance(stop.value, Interrupted) and not (tmp_path / "a").exists()
    run = adder(tmp_path / "a", steps=3)
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=r"at 3 updates is saved.*foresight resume"):
        patch.setattr(session.Session, "_build", stopped)
        foresight.resume(run.path, steps=6, show=False)


def kept(path: Path) -> dict[str, str]:
    """What a run directory holds, but for its lock."""
    return {
        str(file.relative_to(path)): file.read_text(errors="replace")
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != lock.FILE
    }


def test_a_resume_that_is_refused_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any) -> Any:
        raise UserError("No.")

    run = adder(tmp_path / "a", steps=6, keep=100, checkpoint_every=0)
    before, first = kept(run.path), run.path / "checkpoints" / "step-000000002"
    with pytest.raises(UserError, match="Unknown log service"):
        foresight.resume(first, steps=12, keep=50, show=False, log=("tensorbord",))
    assert kept(run.path) == before
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"No\."):
        patch.setattr(session.environments, "evaluation", refused)
        foresight.resume(first, steps=12, keep=50, show=False)
    assert kept(run.path) == before


def test_a_resume_without_ray_for_its_actors_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"steps": 64, "num_envs": 2, "rollout_steps": 8, "evaluation_episodes": 1}
    run = foresight.train("impala", env="CartPole-v1", out=tmp_path / "a", show=False, **small)
    before = kept(run.path)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="Actors need Ray"):
        foresight.resume(run.path, steps=128, actors=2, show=False)
    assert kept(run.path) == before


def test_a_run_on_a_cluster_is_resumed_there_with_other_actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = resolve.resolve("impala", env="CartPole-v1", actors=2, ray="10.0.0.1:6379")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings.document()))
    found = []

    class Session:
        def __init__(self, path: Path, resolved: Any, *rest: Any) -> None:
            found.append((resolved.actors, resolved.ray))

        def run_locked(self) -> None:
            pass

    monkeypatch.setattr("foresight.runtime.session.Session", Session)
    for options in ({}, {"actors": 4}, {"actors": 4, "ray": "local"}, {"actors": 0}):
        foresight.resume(tmp_path, show=False, **options)
    assert found == [(2, "10.0.0.1:6379"), (4, "10.0.0.1:6379"), (4, "local"), (0, None)]


def test_a_resume_without_its_episodes_changes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "episodes"
    assert main(["data", "episodes", "--env", "TwoRoutes-v0", "--episodes", "3", "--out", str(data)]) == 0
    given = {"data": (str(data),), "steps": 2, "hidden": (8,), "evaluation_episodes": 1}
    run = foresight.train("behavior_cloning", env="TwoRoutes-v0", out=tmp_path / "a", show=False, **given)
    before = kept(run.path)
    data.rename(tmp_path / "moved")
    shutil.rmtree(run.path / paths.FOLDER, ignore_errors=True)  # the copy that it made of small data
    before = {name: text for name, text in before.items() if not name.startswith(paths.FOLDER)}
    with pytest.raises(UserError, match="episodes"):
        foresight.resume(run.path, steps=4, show=False)
    assert kept(run.path) == before


def test_a_run_that_is_continued_has_no_summary_until_it_has_ended_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: Any) -> Any:
        raise KeyboardInterrupt

    run = adder(tmp_path / "a", steps=3)
    with pytest.raises(UserError, match="Unknown log service"):
        foresight.resume(run.path, steps=6, show=False, log=("tensorbord",))
    assert run.summary["steps"] == 3
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="checkpoint at 6 updates is saved"):
        patch.setattr(evaluate, "evaluate", stopped)
        foresight.resume(run.path, steps=6, show=False)
    assert not run.summary and run.evaluation is None
    assert foresight.resume(run.path, show=False).summary["steps"] == 6
    with pytest.raises(UserError, match="has reached its 6 updates"):
        foresight.resume(run.path, show=False)


def test_a_second_ctrl_c_stops_at_once() -> None:
    reported: list[str] = []
    with Interruption(reported.append) as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert interruption.signal == signal.SIGINT and len(reported) == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)


def test_nan_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"at 12 updates: 'loss' became NaN.*last good checkpoint is at 11"):
        adder(tmp_path / "a", poison=12, checkpoint_every=0)
    assert max(checkpoint.all_steps(tmp_path / "a" / "checkpoints")) == 11
    with pytest.raises(UserError, match="no checkpoint yet"):
        adder(tmp_path / "b", poison=1)


@sabotaged_by("foresight.runtime.monitoring.progress.Progress.header", lambda f: lambda self, text: None)
def test_a_run_without_a_checkpoint_reports_that_it_restarts(tmp_path: Path, capsys: Any) -> None:
    run = adder(tmp_path / "a", steps=4)
    shutil.rmtree(run.path / "checkpoints")
    capsys.readouterr()
    foresight.resume(run.path, steps=6)
    reported = capsys.readouterr().err.splitlines()
    assert reported[0] == f"{run.path} has no checkpoint yet: the run starts again from step 0"
    foresight.resume(run.path, steps=8)
    assert "starts again" not in capsys.readouterr().err


def test_a_weight_that_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"at 9 updates: the weights of 'network.0.weight'.*good checkpoint is at 8"):
        adder(tmp_path / "a", rot=9, checkpoint_every=0)
    assert max(checkpoint.all_steps(tmp_path / "a" / "checkpoints")) == 8


@pytest.mark.parametrize(
    "name",
    ["loss", "value_loss", "reward_loss", "loss_after", "grad_norm", "critic_grad_norm", "entropy", "cross_entropy",
     "kl", "approx_kl", "kl_sequence"],
)  # fmt: skip
def test_a_loss_that_is_not_finite_is_named(name: str) -> None:
    assert bad_metric({"reward": math.nan, name: math.nan}) == name


@pytest.mark.parametrize(
    "name", ["grade", "reward_grade_style", "reward_loss_of_words", "outcome/kl", "gradient_steps"]
)
def test_a_part_that_does_not_apply_ends_no_run(name: str) -> None:
    assert bad_metric({name: math.nan}) is None


def test_an_out_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    run = adder(tmp_path / "a")
    before = contents(find_checkpoint(run.path))
    with pytest.raises(UserError, match=r"already holds a run.*foresight resume"):
        adder(tmp_path / "a", seed=5)
    assert contents(find_checkpoint(run.path)) == before


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"Cannot write to .*Choose another --out"):
        adder(tmp_path / "file" / "run")
    with pytest.raises(UserError, match="Cannot write to"):
        adder(tmp_path / "file")


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'addition'"):
        adder(tmp_path / "a", task="adition")
    assert not (tmp_path / "a").exists()


def test_the_commands_in_messages_are_typed_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foresight.runtime.monitoring import health

    out = tmp_path / "my run"
    with monkeypatch.context() as patch, pytest.raises(Interrupted) as stopped:
        patch.setattr(health.Health, "check", lambda *_: os.kill(os.getpid(), signal.SIGINT) or [])
        adder(out, steps=20, checkpoint_every=0)
    ended = foresight.resume(out, show=False)
    texts = [str(stopped.value)]
    for again in (lambda: foresight.resume(out, show=False), lambda: adder(out)):
        with pytest.raises(UserError) as caught:
            again()
        texts.append(str(caught.value))
    (checkpoint.latest(ended.path / "checkpoints") / "state.json").write_text("")  # type: ignore[operator]
    with pytest.raises(UserError) as caught:
        foresight.resume(out, show=False)
    texts.append(str(caught.value))
    for text in texts:
        assert shlex.split(text.split("foresight resume ", 1)[1])[0].startswith(str(out)), text


def test_resuming_from_later_and_from_earlier_checkpoints(tmp_path: Path) -> None:
    run = adder(tmp_path / "a", steps=30, checkpoint_every=0, keep_optimizer=True)
    first, *newer = checkpoint.all_steps(run.path / "checkpoints").values()
    with pytest.raises(UserError, match=r"has reached its 28 updates"):
        foresight.resume(first, steps=28, show=False)
    assert all(path.is_dir() for path in newer)
    with pytest.raises(UserError, match=r"has reached its 30 updates.*--steps 60"):
        foresight.resume(run.path, show=False)
    with pytest.raises(UserError, match=r"has reached its 30 updates.*--steps 60"):
        foresight.resume(run.path, steps=10, show=False)
    longer = foresight.resume(run.path, steps=40, show=False)
    assert longer.summary["steps"] == 40 and longer.config.steps == 40
    assert rows(longer)[-2:] == rows(adder(tmp_path / "b", steps=40))[-2:]
    kept = longer.path / "checkpoints"
    oldest = min(checkpoint.all_steps(kept))
    (checkpoint.latest(kept) / "network.safetensors").write_bytes(b"")  # type: ignore[operator]
    with pytest.raises(UserError, match=r"is damaged: network.safetensors has 0 bytes.*foresight resume .*step-"):
        foresight.resume(longer.path, show=False)
    again = foresight.resume(kept / f"step-{oldest:09d}", show=False)
    assert rows(again)[-1] == rows(adder(tmp_path / "c", steps=40))[-1]
    assert any(path.name.startswith("aside-") for path in kept.iterdir())


def test_a_resume_continues_from_what_another_process_saves_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = adder(tmp_path / "a", steps=4)
    longer = tmp_path / "b"
    shutil.copytree(run.path, longer)
    foresight.resume(longer, steps=6, show=False)
    held = lock.held

    def wait(path: Path) -> Any:
        """The other process ends just before the lock is free."""
        shutil.copytree(longer / "checkpoints", path / "checkpoints", dirs_exist_ok=True)
        return held(path)

    monkeypatch.setattr(lock, "held", wait)
    assert foresight.resume(run.path, steps=8, show=False).summary["steps"] == 8
    names = [path.name for path in (run.path / "checkpoints").iterdir()]
    assert "step-000000006" in names and not any(name.startswith("aside-") for name in names)


def test_a_resumed_run_keeps_as_many_checkpoints_as_before(tmp_path: Path) -> None:
    run = adder(tmp_path / "a", steps=5, keep=100, checkpoint_every=0)
    foresight.resume(run.path, steps=7, show=False)
    assert list(checkpoint.all_steps(run.path / "checkpoints")) == [1, 2, 3, 4, 5, 6, 7]
    foresight.resume(run.path, steps=9, keep=2, checkpoint_every=1e9, show=False)
    kept = list(checkpoint.all_steps(run.path / "checkpoints"))
    assert kept[-2:] == [7, 9] and 6 not in kept and len(kept) <= 3  # also the best
    assert "--keep 2 --checkpoint-every 1e+09" in Run(run.path).settings.command()


@pytest.mark.parametrize(
    ("options", "text"),
    [({"ray": "auto"}, "without --actors"), ({"keep": 0}, "--keep must"), ({"checkpoint_every": -1}, "-every must"),
     ({"steps": -5}, "steps must be at least 0, not -5"), ({"steps": "many"}, "Field 'steps' of reinforce")],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused_by_resume_too(tmp_path: Path, options: Any, text: str) -> None:
    settings = resolve.resolve("reinforce", env="CartPole-v1")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings.document()))
    with pytest.raises(UserError, match=text):
        foresight.resume(tmp_path, show=False, **options)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == settings.document()
    with pytest.raises(UserError, match="--completer is for text algorithms: reinforce"):
        foresight.resume(tmp_path, show=False, completer="http://localhost:1")


@sabotaged_by("foresight.runtime.checkpoints.checkpoint.best_score", lambda f: lambda folder, default: default)
def test_the_best_checkpoint_stays_the_best_in_a_resumed_run(tmp_path: Path) -> None:
    run = adder(tmp_path / "a", steps=3)
    folder = run.path / "checkpoints"
    checkpoint.mark_best(folder, 3, 2.0)  # better than any accuracy
    foresight.resume(run.path, steps=5, show=False)
    assert checkpoint.best(folder) == folder / "step-000000003"


def test_the_best_state_is_kept_where_a_kill_came_before_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = adder(tmp_path / "a", steps=3)
    folder = run.path / "checkpoints"
    newest = checkpoint.latest(folder)
    assert newest is not None
    (folder / "best.json").unlink(missing_ok=True)
    restored = checkpoint.restore

    def restore(path: Path, *given: Any) -> dict[str, Any]:
        return {**restored(path, *given), "is_best": True, "best": 2.0}  # better than any accuracy

    monkeypatch.setattr(checkpoint, "restore", restore)
    foresight.resume(run.path, steps=5, show=False)
    assert checkpoint.best(folder) == newest and checkpoint.best_score(folder, 0.0) == 2.0


@pytest.mark.parametrize(
    "damage",
    ["", "null", "[" * 100_000, '{"step": []}', '{"step": 3, "score": null}', '{"step": 3, "score": "x"}'],
)
def test_a_mark_of_the_best_that_is_damaged_marks_nothing(damage: str, tmp_path: Path) -> None:
    run = adder(tmp_path / "a", steps=3)
    mark = run.path / "checkpoints" / "best.json"
    mark.write_text(damage)
    assert checkpoint.best(mark.parent) is None
    assert foresight.resume(run.path, steps=4, show=False).summary["steps"] == 4


def test_a_folder_in_place_of_the_mark_ends_no_resume(tmp_path: Path) -> None:
    (tmp_path / "best.json").mkdir()
    assert checkpoint.set_aside(tmp_path, 3) == []


def test_a_summary_on_a_full_disk_is_written_by_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"No space left.*free space.*foresight resume"):
        _full(patch, "summary.json")
        adder(tmp_path / "a", steps=3)
    assert foresight.resume(tmp_path / "a", show=False).summary["steps"] == 3


def test_the_best_is_marked_on_a_full_disk_by_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _full(monkeypatch, "best.json")
    with pytest.raises(UserError, match=r"Cannot write .*best.json: No space left.*foresight resume"):
        checkpoint.mark_best(tmp_path, 3, 1.0)


def _full(patch: pytest.MonkeyPatch, name: str) -> None:
    """The disk has no room for the file `name`."""
    replace = os.replace

    def full(draft: Path, path: Path) -> None:
        if Path(path).name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(draft, path)

    patch.setattr(os, "replace", full)


def test_precedence_of_defaults_presets_and_arguments(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(Path(ADDER).read_text())
    (tmp_path / "mine.yaml").write_text(
        "small: {task: addition, env_options: {high: 9}, learning_rate: 1e-2, layers: [3, 4], batch: 4, source: here,\n"
        "        evaluation: {episodes: 7, every: 10}}\n"
        "other: {task: largest, decay: 0.5}\n"
    )
    plain = resolve.resolve(str(own), task="addition", preset=None, given={"batch": 2, "decay": None})
    assert (
        plain.preset == "small" and "small" in plain.note
    )  # an environment that has a preset uses it, and it is printed
    assert plain.config["learning_rate"] == 0.01 and plain.config["layers"] == (3, 4)  # the preset over the default
    assert plain.config["batch"] == 2 and plain.config["seed"] == 0  # the argument over the preset
    assert plain.env_options == {"high": 9} and plain.episodes == 7 and plain.evaluate_every == 10
    resolved = resolve.resolve(str(own), preset="other", given={"decay": None}, episodes=3, env_options={"numbers": 2})
    assert resolved.config["decay"] is None and resolved.episodes == 3 and resolved.env_options == {"numbers": 2}
    assert resolve.resolve(str(own), preset="other", task="addition").env == "addition"
    assert "--preset small" in plain.command() and "--batch 2" in plain.command()
    assert "--learning-rate" not in plain.command()  # the preset gives it


def test_the_command_in_the_summary_repeats_the_run() -> None:
    import shlex

    from foresight.cli import fields
    from foresight.cli.train import parse

    given = {
        "hidden": (8, 8),
        "anneal_lr": False,
        "clip_value": None,
        "entropy_coef": 0.01,
        "steps": 5000,
        "seed": 4,
    }
    options = {"time_limit": 99, "engine": "gymnasium"}
    wanted = resolve.resolve(
        "ppo", env="CartPole-v1", given=given, episodes=7, evaluate_every=1000, device="cpu", env_options=options
    )
    words = shlex.split(wanted.command())
    assert words[:3] == ["foresight", "train", "ppo"]
    parsed, given = parse("ppo", words[3:])
    again = resolve.resolve(
        "ppo",
        preset=parsed.preset,
        env=parsed.env,
        given=given,
        episodes=parsed.evaluation_episodes,
        evaluate_every=parsed.evaluate_every,
        device=parsed.device,
        env_options=fields.options(parsed.env_options),
    )
    assert again.document() == wanted.document()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"learning_rat": 1.0}, "Unknown field of adder 'learning_rat'. Did you mean 'learning_rate'"),
        ({"preset": "smal"}, "Unknown preset of adder 'smal'"),
        ({"batch": "many"}, "Field 'batch' of adder must be int, not 'many'"),
        ({"batch": 2.5}, "must be int"),
        ({"bias": 1}, "must be bool"),
        ({"layers": 3}, "must be tuple"),
        ({"decay": "x"}, "must be float | None"),
        ({"env": "CartPole-v1"}, "use --task, not --env"),
        ({"task": None}, "No task given for adder"),
        ({"device": "cuda:77"}, "device 'cuda:77' cannot be used"),
        ({"log": ("tensorbord",)}, "Unknown log service"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        adder(tmp_path / "a", **options)
    assert text in str(error.value)


def test_unknown_algorithms_and_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Unknown algorithm 'pppo'\. Did you mean 'ppo'"):
        foresight.train("pppo", env="CartPole-v1")
    with pytest.raises(UserError, match="no algorithm file"):
        foresight.train("missing.py", task="addition")
    with pytest.raises(UserError, match="not a run directory"):
        foresight.resume(tmp_path)
    run = adder(tmp_path / "a")
    with pytest.raises(UserError, match=r"no checkpoint 'first'\. There are: 40"):
        foresight.load(run.path, "first")
    with pytest.raises(UserError, match="There is no checkpoint"):
        foresight.resume(run.path / "checkpoints" / "step-000000001")


def test_load_acts_as_the_trained_state_did(tmp_path: Path) -> None:
    run = adder(tmp_path / "a", steps=600, evaluate_every=150)
    agent = foresight.load(run.path)
    assert agent.act("What is 3 + 4?") == "7" and agent.act(["What is 9 + 9?"]) == ["18"]
    assert agent.step == 600 and agent.evaluate().mean == run.evaluation.mean
    assert foresight.load(run.path, checkpoint=600).step == 600
    values = [row["evaluation/accuracy"] for row in run.metrics() if "evaluation/accuracy" in row]
    best = foresight.load(run.path, "best")
    assert best.step == 150 * (1 + values.index(max(values))) and best.evaluate().mean == max(values)


def test_training_leaves_the_global_random_numbers_alone(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    def seed() -> None:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)

    seed()
    expected = draw()
    seed()
    adder(tmp_path / "a", steps=5)
    assert draw() == expected


def test_another_default_dtype_is_refused(tmp_path: Path) -> None:
    path = adder(tmp_path / "a", steps=5).path
    torch.set_default_dtype(torch.float64)
    try:
        for made in (lambda: foresight.load(path), lambda: adder(tmp_path / "b", steps=5)):
            with pytest.raises(
                UserError, match=r"dtype of torch is torch.float64, .*set_default_dtype\(torch.float32\)"
            ):
                made()
    finally:
        torch.set_default_dtype(torch.float32)
    assert not (tmp_path / "b").exists()


def test_every_counts_multiples() -> None:
    due = Every(10)
    assert [step for step in range(1, 41, 3) if due(step)] == [10, 22, 31, 40]
    resumed = Every(10, 22)
    assert [step for step in range(25, 41, 3) if resumed(step)] == [31, 40]
    assert not Every(None)(5) and Every(0)(5)


def test_the_saved_state_is_the_state_that_was_reached(tmp_path: Path) -> None:
    run = adder(tmp_path / "a", steps=25)
    state = run.load().state
    from foresight.envs.make import make
    from foresight.runtime import catalog, machine

    module = catalog.module(ADDER)
    config = module.Config(steps=25)
    machine.seed_everything(0)
    *_, (_, _, hand) = module.train(config, make("addition", "text"))  # the loop in one's own hands
    for name, weight in hand.network.state_dict().items():
        assert torch.equal(weight, state.network.state_dict()[name])
    assert state.recent == hand.recent


def test_several_tasks_are_trained_loaded_and_evaluated(tmp_path: Path) -> None:
    fields = {"steps": 64, "num_envs": 4, "rollout_steps": 8, "rollouts_per_update": 1}
    run = foresight.train("impala", env="CartPole-v1,CartPole-v0", out=tmp_path / "a", show=False, **fields)
    assert run.summary["evaluation"]["n"] > 0
    agent = run.load()
    assert agent.act(np.zeros(4, np.float32)) in (0, 1)


def test_a_run_is_not_resumed_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = adder(tmp_path / "a", steps=3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with pytest.raises(UserError, match="cannot be resumed under torchrun"):
        foresight.resume(run.path, steps=6, show=False)


def test_num_envs_is_no_option_of_the_environment(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--num-envs"):
        foresight.train("ppo", env="CartPole-v1", env_options={"num_envs": 16}, out=tmp_path / "a", show=False)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("name", "value"), [("learning_rate", -1.0), ("gamma", 1.5), ("gae_lambda", -0.1)])
def test_invalid_values_are_refused(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{name} must be .* not {value}"):
        foresight.train("ppo", env="CartPole-v1", out=tmp_path / "a", show=False, **{name: value})
    assert not (tmp_path / "a").exists()
