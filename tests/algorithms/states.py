"""States in tests: their weights, and copies made as a checkpoint makes them."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch

from foresight.errors import UserError
from foresight.runtime.checkpoints import checkpoint
from tests.sabotage import Mutation, change


def weights(state: Any) -> torch.Tensor:
    """A copy of all parameters of the State's modules, in one row."""
    modules = [value for value in vars(state).values() if isinstance(value, torch.nn.Module)]
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


def restored(module: Any, state: Any, env: Any, forgotten: tuple[str, ...] = ()) -> Any:
    """As a checkpoint does it: field by field into a state that was just built."""
    fresh = module.build(state.config, env.spaces)
    for field in dataclasses.fields(state):
        held, into = getattr(state, field.name), getattr(fresh, field.name)
        if field.name in ("config", *forgotten):
            continue
        if isinstance(held, torch.Generator):
            into.set_state(held.get_state())
        elif isinstance(held, torch.nn.Parameter):
            into.data.copy_(held.data)
        elif hasattr(held, "load_state_dict"):
            into.load_state_dict(copy.deepcopy(held.state_dict()))
        else:
            setattr(fresh, field.name, copy.deepcopy(held))
    return fresh


def forgets(name: str) -> Mutation:
    """A sabotage of `restored`: it leaves the field `name` out."""
    return change("forgotten", lambda _: (name,), label="forgets_" + name)


def refusal(path: Path, state: Any) -> str:
    """Why the checkpoint at `path` is not put into `state`; empty if it is."""
    try:
        checkpoint.restore(path, state)
    except UserError as error:
        return str(error)
    return ""
