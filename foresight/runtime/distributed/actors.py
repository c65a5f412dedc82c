"""Actors: what runs in an actor's process, and the messages that it sends to the learner (`learner`).

Actors and the learner use these parts of an algorithm's module, which its `train` uses too:

- `build(config, spaces)`: an actor builds its own State and receives the fields that acting reads: those named in
  `ACTING` if the module has it, otherwise every `nn.Module` of the State;
- `rollout(state, env, *position) -> (message, *position)`: `rollout_steps` in every env, as any dataclass of tensors
  with the envs in the first dim. The position (observation, carry) starts as the result of `env.reset` and stays in
  the actor;
- `learn(state, message)`, or else `update(state, message)`: trains on messages concatenated along that dim. The memory
  of a message is read-only;
- `restart(state)`, optional: called before training on envs that were reset, at the start or after an actor died;
- `REPORT`, optional: the steps between two yields, which take many messages.

`max_lag` of the Config limits how stale a message may be; without that field it is 0 (on-policy).

- A Config with `rollouts_per_update` takes that many messages per update, each from `num_envs` envs of one actor.
  `max_lag` is None (actors never wait), a number of updates (older messages are dropped), or 0 (lockstep: all act with
  the newest weights and wait for the update).
- Without it the actors share `num_envs` envs (or `num_games`), and an update takes one message of each, in the order
  of the actors: a replay needs the steps of an env in order. The actors act `max_lag` updates ahead.

A two-player game is an env in which one agent plays both sides (`envs.games.selfplay`); `build` takes the game itself.

The `Fleet` is in this process (`Inline`) or on Ray (`ray_cluster.Fleet`).
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foresight.data import trees
from foresight.envs.base import Env
from foresight.envs.games import selfplay
from foresight.errors import UserError
from foresight.runtime import catalog, environments, kinds
from foresight.runtime.catalog import Algorithm, State
from foresight.runtime.config.settings import Settings
from foresight.runtime.monitoring import profile
from foresight.training.options import build_config

SEED_STRIDE = 100_003  # between the seeds of two actors


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights to act with: `parts` are the arrays of the State's modules; `version` counts updates."""

    version: int
    step: int
    parts: dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Message:
    """One rollout for the learner: `content` has numpy arrays in place of tensors, which Ray does not copy."""

    actor: int
    order: int  # the index of the request that it answers
    fresh: bool  # whether its envs were just reset
    version: int
    steps: int
    content: Any
    episodes: list[tuple[str, float, int]]
    seconds: dict[str, float]


@dataclasses.dataclass(frozen=True)
class LostMessage:
    """A message that will not arrive: its actor died, and a new one has replaced it."""

    actor: int
    order: int


class Fleet(Protocol):
    """`size` actors that answer each request with one message, or with `LostMessage`."""

    size: int
    restarts: int

    def request(self, actor: int, order: int, weights: Weights) -> None:
        """Request a rollout with `weights` from `actor`, which serves its requests in order."""

    def receive(self) -> Message | LostMessage:
        """Wait for the next answer of any actor. Raises UserError if none can arrive any more."""

    def close(self) -> None:
        """Stop the actors and drop their pending requests."""


class Collector:
    """An actor: its envs, a State to act with, and its position in the envs."""

    def __init__(
        self, algorithm: str, config: dict[str, Any], make: Callable[[], Env], index: int, generation: int
    ) -> None:
        torch.set_num_threads(1)
        self._module = catalog.module(algorithm)
        self._index = index
        seed = (config.get("seed", 0) + SEED_STRIDE * (index + 1009 * generation)) % 2**31
        torch.manual_seed(seed)
        env = make()
        self._env = profile.TimedEnv(env, episodes=True)
        spaces = env.game if isinstance(env, selfplay.SelfPlay) else env.spaces
        config = build_config(self._module.Config, **{**config, "seed": seed})
        self._state = self._module.build(config, spaces, "cpu")
        self._seed, self._version = seed, -1
        self._position: tuple[Any, ...] = ()
        self._idle = perf_counter()

    def collect(self, order: int, weights: Weights) -> Message:
        """One rollout with `weights`."""
        began = perf_counter()
        waited, before = began - self._idle, self._env.seconds
        if weights.version != self._version:
            load_weights(self._state, weights)
            self._version = weights.version
        fresh = not self._position
        if fresh:
            self._position = (self._env.reset(self._seed + weights.step),)
        step = self._state.step
        content, *position = self._module.rollout(self._state, self._env, *self._position)
        self._position = tuple(position)
        self._idle = perf_counter()
        environment = self._env.seconds - before
        return Message(
            self._index,
            order,
            fresh,
            weights.version,
            self._state.step - step,
            trees.merge(lambda leaves: to_array(leaves[0]), [content]),
            self._env.pop_episodes(),
            {"environment": environment, "inference": self._idle - began - environment, "actors_waiting": waited},
        )


class Inline:
    """A fleet in this process, which answers requests in order when the learner receives."""

    restarts = 0

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self.size = len(collectors)
        self._collectors = collectors
        self._requests: deque[tuple[int, int, Weights]] = deque()

    def request(self, actor: int, order: int, weights: Weights) -> None:
        """See `Fleet`. The weights are copied, as they are when sent to another process."""
        copied = trees.merge(lambda leaves: np.copy(leaves[0]), [weights.parts])
        self._requests.append((actor, order, dataclasses.replace(weights, parts=copied)))

    def receive(self) -> Message | LostMessage:
        """See `Fleet`."""
        actor, order, weights = self._requests.popleft()
        return self._collectors[actor].collect(order, weights)

    def close(self) -> None:
        """Drop the requests."""
        self._requests.clear()


def plan(resolved: Settings, count: int) -> tuple[dict[str, Any], Callable[[], Env]]:
    """The Config fields of one actor, and a function that makes its envs.

    Raises UserError for an algorithm without `rollout`, and for envs that cannot be split evenly.
    """
    module, config = catalog.module(resolved.algorithm), dict(resolved.config)
    if count < 1:
        raise UserError(f"--actors must be at least 1, not {count}.")
    if (
        not kinds.get(resolved.kind).actors
        or "obs" not in inspect.signature(getattr(module, "rollout", lambda: None)).parameters
    ):
        signature = "\ndef rollout(state: State, env: Env, obs"
        entries = catalog.algorithms().items()
        able = [name for name, entry in entries if signature in entry.path.read_text(encoding="utf-8")]
        raise UserError(f"{module.__name__.rpartition('.')[2]} does not support actors; these do: {', '.join(able)}.")
    shared = "num_envs" if "num_envs" in config else "num_games"
    if "rollouts_per_update" not in config and count > 1:
        if config[shared] % count:
            raise UserError(f"{shared} is {config[shared]}, not a multiple of {count} (--actors): change {shared}.")
        config[shared] //= count
        if "minibatches" in config:
            config["minibatches"] = 1  # they are the learner's; an actor's own rollout may be too small for them
    resolved = dataclasses.replace(resolved, config=config)
    begun = config.get("openings", 0), config.get("forked", 0.0)
    return config, lambda: selfplay.env(environments.training(resolved), config[shared], *begun)


def get_weights(module: Algorithm, state: State, version: int) -> Weights:
    """The weights of `state` that acting needs, as arrays: views of those on the CPU."""
    parts = {name: getattr(state, name).state_dict() for name in acting(module, state)}
    arrays = trees.merge(lambda leaves: to_array(leaves[0]), [parts])
    return Weights(version, state.step, {name: dict(part) for name, part in arrays.items()})


def load_weights(state: State, weights: Weights) -> None:
    """Load `weights` into `state`."""
    with torch.no_grad():
        for name, arrays in weights.parts.items():
            for key, target in getattr(state, name).state_dict().items():
                target.copy_(to_tensor(arrays[key]))
    state.step = weights.step


def acting(module: Algorithm, state: State) -> Sequence[str]:
    """The fields of the State that are sent to actors."""
    fields = [field.name for field in dataclasses.fields(state)]
    modules = [name for name in fields if isinstance(getattr(state, name), nn.Module)]
    return getattr(module, "ACTING", modules)


def to_array(leaf: Any) -> Any:
    """A tensor as an array on the CPU; anything else as it is."""
    return leaf.detach().cpu().numpy() if isinstance(leaf, Tensor) else leaf


def to_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor that shares the array's memory. Ray's memory is read-only, of which torch can only warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
