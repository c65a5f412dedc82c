"""States in tests: their weights, and copies made as a checkpoint makes them."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from foresight.errors import UserError
from foresight.runtime.checkpoints import checkpoint
from tests.algorithms.small_runs import last
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


@functools.cache
def halfway_and_end(
    module: Any, config: Any, make: Callable[[], Any], steps: int, at_halfway: Callable[[Any], object] | None = None
) -> tuple[Any, Any]:
    """The state that a run ends with, changed by `at_halfway`, and that of a copy of it after `steps` steps.

    Made once: sabotages of `restored` leave both alone. Neither may be changed.
    """
    halfway = last(module, config, make())
    if at_halfway is not None:
        at_halfway(halfway)
    return halfway, continued(module, copy.deepcopy(halfway), make(), steps)


@functools.cache
def stopped_and_whole(module: Any, config: Any, make: Callable[[], Any]) -> tuple[Any, Any]:
    """The state where a run first yields, and that of a run to its end. Made once, as `halfway_and_end`."""
    stopped = next(state for _, _, state in module.train(config, make()))
    return stopped, last(module, config, make())


def continued(module: Any, state: Any, env: Any, steps: int) -> Any:
    """The state that a run of `steps` steps ends with, continued from `state`."""
    state.config = dataclasses.replace(state.config, steps=steps)
    return last(module, state.config, env, state)


def assert_seeds_decide(module: Any, config: Any, make: Callable[[], Any]) -> None:
    """Equal seeds give equal runs, others do not, and the caller's generator is left alone."""
    before = torch.random.get_rng_state()
    runs = [weights(last(module, dataclasses.replace(config, seed=seed), make())) for seed in (3, 3, 4)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert torch.equal(before, torch.random.get_rng_state())


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
