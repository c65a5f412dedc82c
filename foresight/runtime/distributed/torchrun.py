"""Several processes that `torchrun` started: they join, the first one writes and speaks, the others only compute."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from foresight.errors import UserError
from foresight.runtime import kinds
from foresight.runtime.catalog import State
from foresight.runtime.config.settings import Settings

# Equally many gradient steps in every process, all through `optim.join_`: nothing that is seen decides how many.
JOINED = ("a2c", "dqn", "impala", "ppo", "rainbow", "sac", "sac_discrete")
WHOLE = ("mtp_critic", "pretrain")  # text algorithms that learn more than a transformers model
EVALUATION_SEED = 1_000_003  # between the seeds of two processes


def started() -> bool:
    """Whether this is one of several processes of `torchrun`."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ


def first() -> bool:
    """Whether this process writes and speaks: the first of several, or the only one."""
    return not started() or os.environ.get("RANK") == "0"


@contextlib.contextmanager
def together(settings: Settings) -> Iterator[tuple[Settings, Path | None]]:
    """Join the processes of `torchrun`, NCCL on CUDA and gloo elsewhere; gives what this one does, and where it writes.

    A language model is split over the processes, and each sees the whole batch (`distributed`). A policy is in each of
    them, which makes `steps` steps in worlds of its own, so that its seed is another one, and learns from the mean of
    their gradients (`training.optim.join_`).

    The run directory is None for the first process, and where there is only one; a silent process gets a temporary one.
    Raises UserError for an algorithm that cannot learn in this way, and for what it cannot have there.
    """
    if not started():
        yield settings, None
        return
    _check(settings)
    if kinds.get(settings.kind).replicas:
        settings = settings.reseeded(settings.seed + EVALUATION_SEED * int(os.environ["RANK"]))
    cuda = settings.device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        with tempfile.TemporaryDirectory() as aside:
            yield settings, None if first() else Path(aside)
    finally:
        distributed.destroy_process_group()


def share_(state: State) -> None:
    """Give a State's weights in the first process to all others."""
    for weight in _weights(state):
        distributed.broadcast(weight, 0)


def check_equal(state: State) -> None:
    """Raise RuntimeError if a State's weights are not the same in all processes: a gradient was not joined."""
    sums = torch.stack([weight.double().sum().cpu() for weight in _weights(state)])
    gathered = [torch.empty_like(sums) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, sums)
    if not all(torch.equal(gathered[0], other) for other in gathered):
        raise RuntimeError("The processes have different weights: a gradient was not joined.")


def _weights(state: State) -> Iterator[Tensor]:
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, nn.Module):
            yield from (weight.detach() for weight in value.parameters())
        elif isinstance(value, Tensor) and value.requires_grad:
            yield value.detach()


def _check(settings: Settings) -> None:
    if kinds.get(settings.kind).replicas:
        if settings.algorithm not in JOINED:
            known = ", ".join(JOINED)
            raise UserError(f"{settings.algorithm} does not run under torchrun; these do: {known}.")
        unfit = ("normalize_obs", "normalize_reward", "target_kl")
        found = [name for name in unfit if settings.config.get(name)]
        if found or settings.actors:
            word = found[0] if found else "actors"
            raise UserError(
                f"Over several processes each one would have {word} of its own: leave --{word.replace('_', '-')} out, "
                "or run without torchrun."
            )
        return
    if settings.algorithm in WHOLE:
        raise UserError(f"{settings.algorithm} has parts that cannot be split over processes: run it without torchrun.")
    if settings.completer is not None:
        raise UserError("Several processes sample by themselves: leave --completer out, or run without torchrun.")
    if settings.config.get("optimizer", "adamw") != "adamw":
        raise UserError("Over several processes weights learn by adamw: leave --optimizer out.")
