"""A language run that is killed without warning continues as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import foresight
from tests import forks, tiny_language


def _options(tmp_path: Path) -> dict[str, Any]:
    task, reward = tmp_path / "task.jsonl", tmp_path / "rewards.py"
    task.write_text("\n".join(json.dumps({"prompt": f"{i}+{j}?"}) for i in range(5) for j in range(5)))
    reward.write_text("def digits(completions, **_):\n    return [sum(map(str.isdigit, c)) / 6 for c in completions]\n")
    return {
        "task": str(task), "model": tiny_language.folder(), "steps": 12, "prompts": 4, "group": 4, "max_new_tokens": 6,
        "learning_rate": 1e-3, "precision": "float32", "show": False, "env_options": {"reward": f"{reward}:digits"},
    }  # fmt: skip


def _start(options: dict[str, Any], out: Path) -> forks.Fork:
    script = f"import foresight\nforesight.train('grpo', out={str(out)!r}, checkpoint_every=0, **{options!r})"
    return forks.start(["-c", script])


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


def _steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [row["step"] for row in rows if "reward" in row]


@pytest.mark.slow
def test_a_killed_language_run_resumes_bit_for_bit(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = _options(tmp_path)
    foresight.train("grpo", out=whole, **options)
    process = _start(options, killed)
    deadline = time.monotonic() + 120
    while len(_steps(killed)) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 4 <= len(_steps(killed)) < 12
    assert not (killed / "summary.json").exists()

    foresight.resume(killed, show=False)
    assert _steps(killed) == list(range(1, 13))
    for name, weight in _weights(whole).items():
        assert torch.equal(weight, _weights(killed)[name]), name
    rewards = [[row["reward"] for row in _rows(run) if "reward" in row] for run in (whole, killed)]
    assert rewards[0] == rewards[1]


def _rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
