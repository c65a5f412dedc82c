"""Saves and restores a run: the algorithm's State and what else a resumed run needs to continue as if never stopped."""

from __future__ import annotations

import math
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foresight import distributed
from foresight.data.sequences import Sequences
from foresight.errors import UserError
from foresight.runtime import machine
from foresight.runtime.catalog import State
from foresight.runtime.checkpoints import checkpoint, chunks
from foresight.runtime.evaluation.evaluate import Evaluation
from foresight.runtime.monitoring import finite, profile

if TYPE_CHECKING:
    from foresight.runtime.session import Session

OptimizerSettings = dict[str, list[dict[str, Any]]]  # of the groups of each optimizer, by its field in the State
PLAIN = (bool, int, float, str, tuple, type(None))  # types of settings
SLOW = 1.0  # seconds that a checkpoint took, from which the next one is announced


def save(session: Session, state: State, step: int, best: bool = False) -> float:
    """Write a checkpoint; returns the seconds that it took. Raises UserError if a weight is NaN or infinite."""
    began = time.perf_counter()
    bad = finite.bad_weights(state)
    if not session.kind.replicas:  # a shard may be bad in one process alone, and all write the checkpoint together
        bad = next(filter(None, distributed.all_gather(bad)), None)
    if bad:
        raise UserError(finite.message(session, step, f"the weights of '{bad}'"))
    assert session.baseline is not None  # measured before the first step
    extra = {
        "seconds": session.seconds,
        "evaluation_seconds": session.evaluation_seconds,
        "evaluation_due": session.pending,
        "baseline": session.baseline.document(),
        "best": session.best,
        "is_best": best,
        "rng": machine.global_rng(),
        "profile": dict(session.profile.seconds),
        "evaluation_took": session.evaluation_took,
        "optimizers": session.built,
    }
    if session.slow:
        session.progress.status("saving")
    if distributed.rank() == 0 or not session.kind.replicas:
        score = session.best if best else None
        folder = session.path / "checkpoints"
        newest = checkpoint.save(folder, state, step, session.settings.keep, extra, score)
        drop_moments(session, besides=newest)
    session.progress.status("")
    session.saved = step
    took = time.perf_counter() - began
    session.slow = took > SLOW
    return took


def drop_moments(session: Session, besides: Path | None = None) -> None:
    """Where a kind of run has large optimizers, keep their moments in the checkpoint `besides` alone, or in none."""
    if session.kind.large_optimizers and not session.settings.keep_optimizer and distributed.rank() == 0:
        for path in checkpoint.all_steps(session.path / "checkpoints").values():
            if path != besides:
                checkpoint.drop_moments(path, session.built)


def on_disk(state: State) -> bool:
    """Whether the replay of a State is on disk."""
    replay = getattr(state, "replay", None)
    return isinstance(replay, Sequences) and replay.on_disk


def use_disk(state: State, folder: Path) -> None:
    """Give a replay that is `on_disk` memory that is mapped to files in `folder`, or elsewhere if it is read-only."""
    if on_disk(state):
        state.replay.use(chunks.mapped(folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())))


def restore(session: Session, state: State, start: Path) -> None:
    """Put the checkpoint `start` into `state` and the session."""
    extra = checkpoint.restore(start, state, session.device)
    before = extra.get("optimizers") or _built_before(session, extra)
    for name, built in session.built.items():
        for group, own, was in zip(getattr(state, name).param_groups, built, before.get(name, built), strict=True):
            group.update((key, value) for key, value in own.items() if value != was.get(key, value))
    session.saved = extra["step"]
    session.seconds, session.evaluation_seconds = extra["seconds"], extra["evaluation_seconds"]
    session.evaluation_took = extra.get("evaluation_took", math.inf)
    session.pending = extra.get("evaluation_due", False)
    session.baseline, session.best = Evaluation.read(extra["baseline"]), extra["best"]
    session.restored_best = extra.get("is_best", False)
    session.profile = profile.Profile(extra.get("profile"))
    session.dropped = extra["dropped"]
    machine.set_global_rng(extra["rng"])


def go_back(session: Session) -> None:
    """Set the checkpoints aside that are newer than the restored one; the best may be one of them."""
    assert session.saved is not None
    folder = session.path / "checkpoints"
    moved = checkpoint.set_aside(folder, session.saved)
    restored = session.best
    session.best = checkpoint.best_score(folder, restored)  # newer than the restored one, which may not know it
    if session.restored_best and restored > session.best:  # it was killed before it was marked
        session.best = restored
        if distributed.rank() == 0:
            checkpoint.mark_best(folder, session.saved, restored)
    if moved:
        session.progress.note(f"newer checkpoints were set aside: {', '.join(path.name for path in moved)}")
    if session.dropped:
        session.progress.note(
            f"this checkpoint has no moments of {' and '.join(session.dropped)}: they start at 0 "
            "(--keep-optimizer keeps them in all checkpoints, also when the run has ended)"
        )


def optimizer_settings(state: State) -> OptimizerSettings:
    """What each optimizer of a new State has in its groups, such as learning rates and betas, but not the weights.

    Where the user changed one of these since the last checkpoint, or the device did, the new value is used; another
    one is the checkpoint's, since training may have changed it.
    """
    return {
        field: [{key: x for key, x in group.items() if isinstance(x, PLAIN)} for group in optimizer.param_groups]
        for field, optimizer in vars(state).items()
        if isinstance(optimizer, torch.optim.Optimizer)
    }


def _built_before(session: Session, extra: dict[str, Any]) -> OptimizerSettings:
    """The same of a checkpoint of an earlier version, which holds no settings but the learning rates of the Config."""
    config = session.settings.config
    rates = {name: float(value) for name, value in config.items() if name.endswith("learning_rate")}
    changed = {"lr": None} if extra.get("rates", rates) != rates else {}
    return {field: [{**group, **changed} for group in groups] for field, groups in session.built.items()}
