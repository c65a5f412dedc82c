"""A language run keeps its optimizer's moments where training continues from, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import foresight
from foresight.runtime.checkpoints import checkpoint
from tests import tiny_language
from tests.sabotage import sabotaged_by


def _options(folder: Path) -> dict[str, Any]:
    rows = [{"prompt": f"{i}+{j}?", "completion": f"{i + j}"} for i in range(5) for j in range(5)]
    data = folder / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    return {
        "data": str(data), "task": "addition", "model": tiny_language.folder(), "batch_size": 8, "precision": "float32",
        "learning_rate": 1e-2, "anneal_lr": False, "show": False, "evaluation_episodes": 1, "max_new_tokens": 2,
    }  # fmt: skip


def _files(run: Path) -> dict[int, bool]:
    """By step, whether the checkpoint has moments; all of them are whole."""
    found = checkpoint.all_steps(run / "checkpoints")
    assert all(checkpoint.verify(path)["step"] == step for step, path in found.items())
    return {step: (path / "optimizer.safetensors").is_file() for step, path in found.items()}


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


@sabotaged_by("foresight.runtime.checkpoints.run_state.drop_moments", lambda f: lambda session, besides=None: None)
def test_only_the_newest_checkpoint_has_moments_and_an_ended_run_none(tmp_path):
    seen: list[dict[int, bool]] = []
    run = tmp_path / "run"
    foresight.train(
        "sft", out=run, steps=4, checkpoint_every=0, callbacks=[lambda *_: seen.append(_files(run))],
        **_options(tmp_path),
    )  # fmt: skip
    assert seen == [{}, {1: True}, {1: False, 2: True}, {1: False, 2: False, 3: True}]
    assert _files(run) == {2: False, 3: False, 4: False}


@sabotaged_by("foresight.runtime.checkpoints.run_state.go_back", lambda f: lambda session: None)
def test_a_run_without_moments_continues_and_names_what_is_missing(tmp_path, capfd):
    options = _options(tmp_path)
    run = foresight.train("sft", out=tmp_path / "run", steps=2, checkpoint_every=0, **options).path
    before = _weights(run)
    foresight.load(run).close()
    foresight.resume(run, steps=4, show=True)
    assert "no moments of optimizer: they start at 0 (--keep-optimizer keeps them" in capfd.readouterr().err
    assert any(not torch.equal(x, before[name]) for name, x in _weights(run).items())
    foresight.resume(run / "checkpoints" / "step-000000003", steps=5, show=False)
    assert _files(run)[5] is False


@pytest.mark.parametrize("kept", [True, False])
def test_with_moments_a_longer_run_is_the_same(tmp_path, kept):
    options = {**_options(tmp_path), "keep_optimizer": kept}
    run = foresight.train("sft", out=tmp_path / "whole", steps=4, **options)
    part = foresight.train("sft", out=tmp_path / "part", steps=2, checkpoint_every=0, **options).path
    assert _files(part) == {1: kept, 2: kept}
    foresight.resume(part, steps=4, show=False)
    equal = all(torch.equal(x, _weights(part)[name]) for name, x in _weights(run.path).items())
    assert equal == kept
    assert ("--keep-optimizer" in run.settings.command()) == kept


def test_a_damaged_checkpoint_does_not_end_the_run(tmp_path):
    def damage(step: int, metrics: dict[str, Any], state: Any) -> None:
        if step == 2:
            (tmp_path / "run" / "checkpoints" / "step-000000001" / "manifest.json").write_text("{")

    run = foresight.train(
        "sft", out=tmp_path / "run", steps=3, checkpoint_every=0, callbacks=[damage], **_options(tmp_path)
    )
    found = checkpoint.all_steps(run.path / "checkpoints")
    assert [(path / "optimizer.safetensors").is_file() for path in found.values()] == [True, False, False]


def test_the_moments_of_other_runs_stay(tmp_path):
    run = foresight.train("ppo", env="CartPole-v1", out=tmp_path / "run", steps=400, checkpoint_every=0, show=False)
    assert all(_files(run.path).values())
