"""The environment contract: a batch of environments that are stepped together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foresight.data.embodiments import Embodiment
from foresight.data.trajectory import Tree
from foresight.errors import LostError, UserError

Frame = NDArray[np.uint8]
KEPT = 100  # finished episodes that the mean return is over


class Simulator(Protocol):
    """The true dynamics of an environment, from any state that an observation shows."""

    def root(self, obs: Tree) -> Tensor:
        """The states `[B, S]` in which `obs` `[B, ...]` were made."""

    def rewards(self, state: Tensor, actions: Tensor) -> Tensor:
        """The rewards `[N, H]` of `actions` `[N, H, A]`, in the environment's units, from states `[N, S]`.

        They are 0 after a termination.
        """


class Spaces(NamedTuple):
    """The observation and action space of one environment (Gymnasium spaces, without the batch dim).

    `obs` is a Box, Discrete, MultiDiscrete, MultiBinary or a Dict of these; `action` one of the first four.
    Floats are float32. A Box action outside its bounds is clipped to them first. `continuing`: the environment never
    terminates, so its episodes are only ever truncated. `simulator` makes its true dynamics, where they can be had.
    Where several `embodiments` share the spaces, these are their own, see `data.embodiments`.
    """

    obs: gymnasium.Space[Any]
    action: gymnasium.Space[Any]
    continuing: bool = False
    simulator: Callable[[], Simulator] | None = None
    embodiments: tuple[Embodiment, ...] = ()


class Feedback(NamedTuple):
    """The result of a step. Tensors on the CPU, leading dim B.

    - `obs`: the observation to act on next; where `cut`, the first one of the next episode (but see `mask`);
    - `reward` `[B]` float32;
    - `discount` `[B]` float32: 0 at termination and 1 otherwise, also at a time limit (algorithms
      multiply by gamma);
    - `cut` `[B]` float32: 1 where the next step belongs to another episode (termination or time limit);
    - `mask` `[B]` float32: 1 where the action was taken. It is 0 only in engines that can neither reset in the
      same step nor reset some of their environments: there a cut step still shows the final observation, and
      the next step is the reset: its action is ignored, it has reward 0, discount 0, cut 1 and mask 0, and it
      must not be trained on;
    - `final_obs`: the true successor of every step. The same object as `obs` when nothing was cut;
    - `info`: `episode_return` and `episode_length` (lists of floats and ints: the sum of unclipped
      rewards over the whole game, and the number of actions) of episodes that ended with this step, and what
      the engine adds.

    All tensors belong to the caller: later steps do not change them.
    """

    obs: Tree
    reward: Tensor
    discount: Tensor
    cut: Tensor
    mask: Tensor
    final_obs: Tree
    info: dict[str, Any]


class Unrolled(NamedTuple):
    """T steps that an environment made in one compiled loop, with the fields of `Feedback`.

    `obs` is `[T + 1, B, ...]` with the observation before the first step, everything else `[T, B, ...]`; `info` is of
    all steps.
    """

    obs: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    cut: Tensor
    final_obs: Tensor
    info: dict[str, Any]


class Env(Protocol):
    """A batch of `num_envs` environments with same-step autoreset: a cut step already shows the next episode."""

    name: str
    num_envs: int
    spaces: Spaces

    def reset(self, seed: int) -> Tree:
        """Reset all environments; equal seeds give equal episodes. Returns obs `[B, ...]`."""

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B, ...]` in every environment."""

    def render(self) -> Frame | None:
        """One RGB frame of environment 0, `[height, width, 3]` uint8; None if it cannot be rendered."""

    def close(self) -> None:
        """Free what the engine holds."""


@dataclass
class Episodes:
    """The last 100 finished episodes of a run, the newest last: their returns and lengths."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    finished: int = field(default=0, compare=False, metadata={"save": False})  # in this process

    def note(self, info: dict[str, Any]) -> None:
        """Add the episodes that ended with a step, from its `Feedback.info`."""
        if "episode_return" in info:
            self.returns = (self.returns + info["episode_return"])[-KEPT:]
            self.lengths = (self.lengths + info["episode_length"])[-KEPT:]
            self.finished += len(info["episode_return"])

    def metrics(self) -> dict[str, float]:
        """The mean `return` and `length`; nothing before the first episode has ended."""
        if not self.returns:
            return {}
        count = len(self.returns)
        return {"return": sum(self.returns) / count, "length": sum(self.lengths) / count}


class EnvError(LostError):
    """An environment raised, or broke its declared spaces: the message has its name, its index and its step."""


def require_end(spaces: Spaces, gamma: float) -> None:
    """Raise UserError if `gamma` is 1 and episodes never terminate: bootstrapped returns would be infinite."""
    if gamma == 1 and spaces.continuing:
        raise UserError(
            "gamma is 1, but this environment never terminates (a time limit only truncates it), so returns are "
            "infinite. Set gamma below 1, such as 0.99."
        )


def require_num_envs(env: Env, num_envs: int) -> None:
    """Raise UserError unless `env` has `num_envs` environments."""
    if env.num_envs != num_envs:
        raise UserError(f"num_envs is {num_envs}, but the environment has num_envs {env.num_envs}. Make them equal.")


def grouped(num_envs: int, group: int) -> int:
    """`group`, of environments in a row with equal episodes. Raises UserError if `num_envs` is no multiple of it."""
    if num_envs % group:
        raise UserError(f"num_envs must be a multiple of group, {group}, not {num_envs}.")
    return group
