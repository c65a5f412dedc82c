"""Training in several processes under `torchrun`: only rank 0 writes and prints, the others only compute."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from foresight.distributed import all_gather
from foresight.errors import UserError
from foresight.runtime import kinds
from foresight.runtime.catalog import State
from foresight.runtime.config.settings import Settings

# Every process makes equally many gradient steps, all through `optim.join_`, whatever its data are.
REPLICATED = ("a2c", "dqn", "impala", "ppo", "rainbow", "sac", "sac_discrete")
UNSHARDED = ("mtp_critic", "pretrain")  # text algorithms that train more than a transformers model
SEED_STRIDE = 1_000_003  # between the seeds of two processes


def started() -> bool:
    """Whether this is one of several processes of `torchrun`."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ


def first() -> bool:
    """Whether this process writes and prints: rank 0, or the only process."""
    return not started() or os.environ.get("RANK") == "0"


@contextlib.contextmanager
def join(settings: Settings) -> Iterator[tuple[Settings, Path | None]]:
    """Initialize the process group (NCCL on CUDA, else gloo); yields this process's settings and scratch directory.

    A language model is sharded over the processes, and each sees the whole batch (`distributed`). A policy is
    replicated: each process makes `steps` steps in its own envs, with its own seed, and trains on the mean of all
    gradients (`training.optim.join_`).

    The scratch directory is None for the process that writes the run, and a temporary one for the others. Raises
    UserError for algorithms and options that do not run under torchrun.
    """
    if not started():
        yield settings, None
        return
    _check(settings)
    if kinds.get(settings.kind).replicas:
        settings = settings.reseeded(settings.seed + SEED_STRIDE * int(os.environ["RANK"]))
    cuda = settings.device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            yield settings, None if first() else Path(scratch)
    finally:
        distributed.destroy_process_group()


def broadcast_(state: State) -> None:
    """Copy a State's weights from the first process to all others."""
    for weight in _weights(state):
        distributed.broadcast(weight, 0)


def check_equal(state: State) -> None:
    """Raise RuntimeError if a State's weights differ between processes: a gradient was not averaged."""
    gathered = all_gather([weight.double().sum().item() for weight in _weights(state)])  # NCCL has no CPU tensors
    if any(repr(other) != repr(gathered[0]) for other in gathered):  # NaN, which saving reports, equals NaN
        raise RuntimeError("The processes have different weights: a gradient was not averaged.")


def _weights(state: State) -> Iterator[Tensor]:
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, nn.Module):
            yield from (weight.detach() for weight in value.parameters())
        elif isinstance(value, Tensor) and value.requires_grad:
            yield value.detach()


def _check(settings: Settings) -> None:
    if kinds.get(settings.kind).replicas:
        if settings.algorithm not in REPLICATED:
            known = ", ".join(REPLICATED)
            raise UserError(f"{settings.algorithm} does not run under torchrun; these do: {known}.")
        unfit = ("normalize_obs", "normalize_reward", "target_kl", "popart_rate")
        given = {name: settings.config.get(name) for name in unfit}
        found = [name for name, value in given.items() if value is not None and value is not False]
        if found or settings.actors:
            option = (found[0] if found else "actors").replace("_", "-")
            raise UserError(
                f"--{option} does not work under torchrun: it would differ between processes. Leave it out, or run "
                "without torchrun."
            )
        return
    if settings.algorithm in UNSHARDED:
        raise UserError(f"{settings.algorithm} has parts that cannot be sharded. Run it without torchrun.")
    if settings.completer is not None:
        raise UserError(
            "--completer does not work under torchrun: each process samples. Leave it out, or run without torchrun."
        )
    if settings.config.get("optimizer", "adamw") != "adamw":
        raise UserError("--optimizer must be adamw under torchrun. Leave it out, or run without torchrun.")
