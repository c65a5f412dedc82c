"""Planning in the true simulator of an environment."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foresight.envs.base import Simulator, Spaces
from foresight.errors import UserError
from foresight.planning.continuous import bounds
from foresight.planning.continuous.cem import Score


def simulator(spaces: Spaces) -> Simulator:
    """The simulator of an environment. Raises UserError if there is none."""
    if spaces.simulator is None:
        raise UserError(
            "This environment has no simulator to plan in: its state cannot be recovered from its observations. There "
            "is one for Pendulum-v1, MountainCarContinuous-v0, CartpoleSwingup-v1, BallInCupCatch-v1, HalfCheetah-v5 "
            "and Hopper-v5, without options that change observations or actions (action_repeat "
            "is supported). In other environments plan in a learned model: foresight train planet --env ..."
        )
    return spaces.simulator()


def score(simulator: Simulator, root: Tensor, space: Any) -> Score:
    """The undiscounted returns of action sequences in [-1, 1] from the states `root` `[B, S]`."""

    def returns(sequences: Tensor) -> Tensor:
        """`[B, N]` of `[B, N, H, A]`."""
        batch, candidates, *rest = sequences.shape
        starts = root.repeat_interleave(candidates, 0)
        actions = bounds.to_env(sequences.reshape(batch * candidates, *rest), space)
        return simulator.rewards(starts, actions).sum(-1).view(batch, candidates)

    return returns
