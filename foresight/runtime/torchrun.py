"""Several processes that `torchrun` started: they join, the first one writes and speaks, the others only compute."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import distributed

from foresight.errors import UserError
from foresight.runtime.settings import Settings


def started() -> bool:
    """Whether this is one of several processes of `torchrun`."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ


def first() -> bool:
    """Whether this process writes and speaks: the first of several, or the only one."""
    return not started() or os.environ.get("RANK") == "0"


@contextlib.contextmanager
def together(settings: Settings) -> Iterator[Path | None]:
    """Join the processes of `torchrun`, NCCL on CUDA and gloo elsewhere; gives the run directory of the silent ones.

    None for the first process, and where there is only one. Raises UserError for an algorithm that does not learn from
    data, and for what a sharded model cannot have.
    """
    if not started():
        yield None
        return
    if "data" not in settings.config:
        raise UserError(
            f"Over several processes sft, reward_model and dpo can learn: run {settings.algorithm} without torchrun."
        )
    if settings.config.get("lora") or settings.config.get("optimizer", "adamw") != "adamw":
        raise UserError("Over several processes all weights learn by adamw: leave --lora and --optimizer out.")
    cuda = settings.device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        with tempfile.TemporaryDirectory() as aside:
            yield None if first() else Path(aside)
    finally:
        distributed.destroy_process_group()
