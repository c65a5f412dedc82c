"""`foresight studio --control` with a process that trains: its page stops it, and resumes it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from foresight.studio.runs import Library, identity
from tests.studio import browser

TRAIN = ["train", "reinforce", "--env", "CartPole-v1", "--steps", "100000000", "--evaluation-episodes", "1"]


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line)["step"] for line in lines]


def wait(condition: Any) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(400)  # three processes start
def test_the_page_stops_a_run_and_resumes_it(tmp_path: Path) -> None:
    run = tmp_path / "training"
    command = [sys.executable, "-m", "foresight", *TRAIN, "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with browser.served(tmp_path, control=True) as address, browser.opened(address) as page:
            wait(lambda: len(steps(run)) > 1)
            page.goto(f"{address}#/runs?run={identity(run.resolve())}")
            page.click("button:has-text('Stop')")
            assert process.wait(60) == 130  # as after Ctrl-C
            page.wait_for_selector("table .state.stopped")
            (saved,) = Library([tmp_path]).table()
            assert saved["checkpoints"] >= 1
            before = steps(run)
            page.wait_for_selector(f".plain li:has-text('step {before[-1]:,}')")
            page.click("button:has-text('Resume')")
            wait(lambda: len(steps(run)) > len(before))
            assert steps(run)[: len(before)] == before
            page.wait_for_selector("table .state.running")
            page.click("button:has-text('Stop')")
            page.wait_for_selector("table .state.stopped")
            now = steps(run)
            time.sleep(1)
            assert steps(run) == now
    finally:
        process.kill()
