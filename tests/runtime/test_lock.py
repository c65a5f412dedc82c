"""One process trains a run directory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml

import foresight
from foresight.errors import BusyError
from foresight.runtime import lock
from foresight.runtime.config import resolve

ADDER = str(Path(__file__).with_name("adder.py"))


def test_a_second_process_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    settings = resolve.resolve(ADDER, task="addition", given={"steps": 2})
    with lock.held(tmp_path):
        with pytest.raises(BusyError, match=rf"being trained by another process \(pid {os.getpid()}\)\. Wait"):
            foresight.train(ADDER, task="addition", out=tmp_path, show=False)
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings.document()))
        with pytest.raises(BusyError):
            foresight.resume(tmp_path, show=False)
        assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", "config.yaml"]
    assert foresight.resume(tmp_path, show=False).summary["steps"] == 2 and not (tmp_path / ".lock").exists()


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    with lock.held(tmp_path):
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
    try:
        lock.check(tmp_path)
        with lock.held(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with lock.held(tmp_path):
            os.write(write, b"x")
            signal.pause()
    os.read(read, 1)
    with pytest.raises(BusyError, match=rf"pid {child}"):
        lock.check(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / ".lock").exists()
    lock.check(tmp_path)
    os.close(read)
    os.close(write)
