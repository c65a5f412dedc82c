"""One model over two processes learns what one process learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foresight.runtime import checkpoint, run
from tests import tiny_language

TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "foresight")
ROWS = {"sft": {"completion": "3"}, "dpo": {"chosen": "3", "rejected": "aa"}}


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_two_processes_learn_what_one_does(name, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1?", **ROWS[name]}) + "\n" for i in range(12)))
    numbers = {"steps": 3, "batch": 5, "micro_tokens": 1, "learning_rate": 1e-2}  # 5 parts: one process is idle once
    options = {"task": str(data), "model": tiny_language.folder(), "precision": "float32", "seed": 3, **numbers}
    alone = run.train(name, out=tmp_path / "alone", show=False, **options)
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [*TWO, "train", name, *words, "--out", str(tmp_path / "together"), "--json"],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    together = run.Run(tmp_path / "together")
    assert json.loads(done.stdout)["steps"] == 3  # one process speaks
    for one, other in zip(alone.metrics(), together.metrics(), strict=True):
        for key in {"loss", "grad_norm", "accuracy", "entropy"} & set(one):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    assert together.evaluation.mean == pytest.approx(alone.evaluation.mean, rel=1e-4)
    begun, here, there = (_weights(folder) for folder in (
        Path(tiny_language.folder()), alone.path / "export", together.path / "export"
    ))  # fmt: skip
    assert here.keys() == there.keys()
    for key, value in here.items():
        assert (value - begun[key]).abs().max() > 1e-3, key
        torch.testing.assert_close(value, there[key], atol=2e-5, rtol=1e-4)
    # The checkpoint is whole: one process can take it up.
    assert checkpoint.verify(checkpoint.find(together.path))["step"] == 3
    assert run.resume(together.path, 4, show=False).summary["steps"] == 4


def test_what_cannot_be_split_is_named(tmp_path):
    words = ["train", "grpo", "--task", "addition", "--model", tiny_language.folder(), "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([*TWO, *words], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "run grpo without torchrun" in done.stderr
    assert not (tmp_path / "run").exists()
