"""Saves and restores a run: the algorithm's State and what else a resumed run needs to continue as if never stopped."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from foresight.data.sequences import Sequences
from foresight.errors import UserError
from foresight.runtime import machine
from foresight.runtime.catalog import State
from foresight.runtime.checkpoints import checkpoint, chunks
from foresight.runtime.config.settings import Settings
from foresight.runtime.evaluation.evaluate import Evaluation
from foresight.runtime.monitoring import finite, profile

if TYPE_CHECKING:
    from foresight.runtime.session import Session

SLOW = 1.0  # seconds that a checkpoint took, from which the next one is announced


def save(session: Session, state: State, step: int, best: bool = False) -> float:
    """Write a checkpoint; returns the seconds that it took. Raises UserError if a weight is NaN or infinite."""
    began = time.perf_counter()
    if bad := finite.bad_weights(state):
        raise UserError(finite.message(session, step, f"the weights of '{bad}'"))
    assert session.baseline is not None  # measured before the first step
    extra = {
        "seconds": session.seconds,
        "evaluation_seconds": session.evaluation_seconds,
        "evaluation_due": session.pending,
        "baseline": session.baseline.document(),
        "best": session.best,
        "rng": machine.global_rng(),
        "profile": dict(session.profile.seconds),
        "rates": learning_rates(session.settings),
    }
    if session.slow:
        session.progress.status("saving")
    checkpoint.save(
        session.path / "checkpoints", state, step, session.settings.keep, extra, session.best if best else None
    )
    session.progress.status("")
    session.saved = step
    took = time.perf_counter() - began
    session.slow = took > SLOW
    return took


def use_disk(state: State, folder: Path) -> None:
    """Give a replay that is `on_disk` memory that is mapped to files in `folder`, or elsewhere if it is read-only."""
    replay = getattr(state, "replay", None)
    if isinstance(replay, Sequences) and replay.on_disk:
        replay.use(chunks.mapped(folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())))


def restore(session: Session, state: State, start: Path) -> None:
    """Put the checkpoint `start` into `state` and the session."""
    optimizers = [value for value in vars(state).values() if isinstance(value, torch.optim.Optimizer)]
    built = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    extra = checkpoint.restore(start, state, session.device)
    rates = learning_rates(session.settings)
    if extra.get("rates", rates) != rates:  # the user's new rates win over the checkpoint's
        for optimizer, own in zip(optimizers, built, strict=True):
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = rate
    session.saved = extra["step"]
    session.seconds, session.evaluation_seconds = extra["seconds"], extra["evaluation_seconds"]
    session.pending = extra.get("evaluation_due", False)
    session.baseline, session.best = Evaluation.read(extra["baseline"]), extra["best"]
    session.profile = profile.Profile(extra.get("profile"))
    machine.set_global_rng(extra["rng"])


def go_back(session: Session) -> None:
    """Set the checkpoints aside that are newer than the restored one; the best may be one of them."""
    assert session.saved is not None
    folder = session.path / "checkpoints"
    moved = checkpoint.set_aside(folder, session.saved)
    session.best = checkpoint.best_score(folder, session.best)  # newer than the restored one, which may not know it
    if moved:
        session.progress.note(f"newer checkpoints were set aside: {', '.join(path.name for path in moved)}")


def learning_rates(settings: Settings) -> dict[str, float]:
    """Every learning rate of the run by the name of its Config field."""
    return {name: float(value) for name, value in settings.config.items() if name.endswith("learning_rate")}
