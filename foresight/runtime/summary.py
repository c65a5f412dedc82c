"""Writes `config.yaml` and `summary.json`: the settings of a run, and its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from foresight import distributed
from foresight.errors import resume_command
from foresight.runtime import bench, machine
from foresight.runtime.checkpoints import checkpoint
from foresight.runtime.config import settings

if TYPE_CHECKING:
    from foresight.runtime.evaluation.evaluate import Evaluation
    from foresight.runtime.session import Session


def document(session: Session, step: int, evaluation: Evaluation) -> dict[str, Any]:
    """The contents of `summary.json`."""
    resolved = session.settings.typed()
    assert session.baseline is not None  # measured before the first step
    return {
        "algorithm": resolved.algorithm,
        "preset": resolved.preset,
        "env": resolved.env,
        **({"model": resolved.config["model"]} if "model" in resolved.config else {}),
        "seed": resolved.seed,
        "steps": step,
        "unit": session.entry.unit,
        **({"processes": distributed.processes()} if distributed.processes() > 1 else {}),
        "seconds": round(session.seconds, 3),
        "evaluation_seconds": round(session.evaluation_seconds, 3),
        "baseline": session.baseline.document(),
        "evaluation": evaluation.document(),
        **({"profile": session.profile.document()} if any(session.profile.seconds.values()) else {}),
        "peak_gib": round(machine.peak_gib(), 3),
        "command": resolved.command(),
        "versions": bench.versions(),
        "machine": {**bench.machine(), "device": session.device},
    }


def write(path: Path, document: dict[str, Any]) -> None:
    """Write `summary.json`. Raises UserError if it cannot be written, as on a full disk."""
    advice = f"All steps are made and saved: free space, then write it with: {resume_command(path)}"
    checkpoint.write_atomic(path / "summary.json", json.dumps(document, indent=2) + "\n", advice)


def write_config(path: Path, resolved: settings.Settings) -> None:
    """Write `config.yaml`. Raises UserError where the directory cannot be written."""
    document = {**resolved.document(), "versions": bench.versions()}
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    checkpoint.write_atomic(path / "config.yaml", text, "Choose another --out.")
