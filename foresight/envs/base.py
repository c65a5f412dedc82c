"""The one contract for experience: a batch of worlds that are stepped together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import gymnasium
from torch import Tensor

from foresight.errors import LostError, UserError

KEPT = 100  # finished episodes over which a return is a mean


class Spaces(NamedTuple):
    """What one world of the batch shows and accepts (Gymnasium spaces, without the batch dim).

    `obs` is a Box, Discrete, MultiDiscrete, MultiBinary or a Dict of these; `action` one of the first four.
    Floats are float32. A Box action outside its bounds is clipped to them before the world sees it. `continuing` says
    that a world is known to have no termination: its episodes are only ever cut.
    """

    obs: gymnasium.Space[Any]
    action: gymnasium.Space[Any]
    continuing: bool = False


class Feedback(NamedTuple):
    """What came back because of an action. Tensors on the CPU, leading dim B.

    - `obs`: the observation to act on next; where `cut`, the first one of the next episode (but see `mask`);
    - `reward` `[B]` float32;
    - `discount` `[B]` float32: the world's continuation, 0 at termination and 1 otherwise, at a time limit
      too (algorithms multiply by gamma);
    - `cut` `[B]` float32: 1 where the next row belongs to another episode (termination or time limit);
    - `mask` `[B]` float32: 1 where the action was really taken. Only an engine that can neither reset in
      the same step nor reset a part of its worlds ever has a 0: there a cut row still shows the final
      observation, and the row after it is spent on the reset: its action was ignored, it has reward 0,
      discount 0, cut 1, mask 0, and it must not be learned from;
    - `final_obs`: the true successor of every row. The same object as `obs` when nothing was cut;
    - `info`: `episode_return` and `episode_length` (lists of floats and ints: rewards before any clipping,
      in whole games, and actions taken) of episodes that ended with this step, and what the engine adds.

    All tensors belong to the caller: no later step changes them.
    """

    obs: Any
    reward: Tensor
    discount: Tensor
    cut: Tensor
    mask: Tensor
    final_obs: Any
    info: dict[str, Any]


class Env(Protocol):
    """A batch of `num_envs` worlds with one autoreset rule: a cut row already shows the next episode."""

    name: str
    num_envs: int
    spaces: Spaces

    def reset(self, seed: int) -> Any:
        """Start all worlds; equal seeds give equal episodes. Returns obs `[B, ...]`."""

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B, ...]` in every world."""

    def render(self) -> Any:
        """One RGB frame of world 0, `[height, width, 3]` uint8, or None where the world cannot be drawn."""

    def close(self) -> None:
        """Free what the engine holds."""


@dataclass
class Episodes:
    """The last 100 finished episodes of a run, the newest last: their returns and lengths, as worlds report them."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def note(self, info: dict[str, Any]) -> None:
        """Take in those that ended with a step, from its `Feedback.info`."""
        if "episode_return" in info:
            self.returns = (self.returns + info["episode_return"])[-KEPT:]
            self.lengths = (self.lengths + info["episode_length"])[-KEPT:]

    def metrics(self) -> dict[str, float]:
        """The mean `return` and `length`; nothing before the first episode has ended."""
        if not self.returns:
            return {}
        count = len(self.returns)
        return {"return": sum(self.returns) / count, "length": sum(self.lengths) / count}


class EnvError(LostError):
    """A world raised, or gave what it did not declare: the message has its name, its number and its step."""


def require_end(spaces: Spaces, gamma: float) -> None:
    """Raise UserError where `gamma` is 1 and episodes have no end: whoever bootstraps would sum up rewards for ever."""
    if gamma == 1 and spaces.continuing:
        raise UserError(
            "With gamma 1 returns are infinite here: no episode of this environment terminates, a time limit only cuts "
            "it. Set gamma below 1, such as 0.99."
        )


def require_num_envs(env: Env, num_envs: int) -> None:
    """Raise UserError unless `env` has as many worlds as the setting `num_envs` says."""
    if env.num_envs != num_envs:
        raise UserError(f"num_envs is {num_envs}, but the environment has {env.num_envs} worlds. Make them equal.")
