"""Checks that training stayed finite: metrics at every step, weights at every checkpoint."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from foresight import distributed
from foresight.runtime.catalog import State

if TYPE_CHECKING:
    from foresight.runtime.session import Session

VITAL = re.compile(r"(^|_)(loss|grad|entropy|kl)(_|$)")  # training is broken if one of these metrics is not finite
GRADES = re.compile(r"outcome|reward_(?!loss$)")  # parts of rewards: NaN where they do not apply to a batch


def bad_metric(metrics: Mapping[str, Any]) -> str | None:
    """The name of a loss, gradient norm, entropy or KL divergence that is NaN or infinite; None if all are finite."""
    vital = {name: x for name, x in metrics.items() if VITAL.search(name) and not GRADES.match(name)}
    return next((name for name, x in vital.items() if isinstance(x, float) and not math.isfinite(x)), None)


def bad_weights(state: State) -> str | None:
    """The name of a parameter in the State that holds NaN or infinity; None if all are finite."""
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, torch.nn.Module):
            for name, weight in value.named_parameters():
                part = distributed.local(weight.detach())
                if part.numel() and part.is_floating_point():
                    low, high = torch.aminmax(part)
                    if not (torch.isfinite(low) and torch.isfinite(high)):
                        return f"{field.name}.{name}"
    return None


def message(session: Session, step: int, what: str) -> str:
    """The error of a run that stops at `step`, where `what` (a metric or weights) is not finite."""
    return (
        f"Training stopped at {step:,} {session.entry.unit}: {what} became NaN or infinite; {kept(session)} (in "
        f"{session.path}). Try a lower learning rate or a smaller gradient norm limit."
    )


def kept(session: Session) -> str:
    """The checkpoint that remains, as text."""
    return (
        "there is no checkpoint yet" if session.saved is None else f"the last good checkpoint is at {session.saved:,}"
    )
