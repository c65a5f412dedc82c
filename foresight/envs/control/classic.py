"""CartPole-v1 and Pendulum-v1 as one compiled loop over the batch: Gymnasium's, at a few microseconds a step.

Dynamics, rewards, limits and the streams of random starts are Gymnasium's own: from equal seeds the episodes
are those of `SyncVectorEnv` (environment i is seeded with seed + i). Environments that end are reset within the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces as gs
from gymnasium.utils import seeding
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from foresight.envs.base import Feedback, Spaces, Unrolled
from foresight.ops.fused.mlp import Member, forward_rows, one_thread

_CHUNK = 1 << 15  # bytes of observations that are allocated at once: a kept row keeps its chunk alive, and rows that
# outlive two small collections of garbage bring on a full one, which takes 0.2 seconds
_STARTS = 64  # initial states drawn ahead, per environment
_FOREVER = np.iinfo(np.int64).max
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]


@njit(cache=True)
def _row(
    i: int, t: int, count: int, reward: float, terminated: bool, scalars: Floats, state: Doubles, starts: Doubles,
    cursor: Longs, steps: Longs, returns: Doubles, ended: Doubles, limit: int,
) -> int:  # fmt: skip
    """Write the result of environment i, and reset it if its episode ended. Returns how many ended so far."""
    steps[i] += 1
    returns[i] += reward
    cut = terminated or steps[i] >= limit
    scalars[t, 0, i] = reward
    scalars[t, 1, i] = 0.0 if terminated else 1.0
    scalars[t, 2, i] = 1.0 if cut else 0.0
    if cut:
        ended[0, count], ended[1, count], ended[2, count] = returns[i], steps[i], cursor[i]
        steps[i] = 0
        returns[i] = 0.0
        for j in range(state.shape[1]):
            state[i, j] = starts[i, cursor[i], j]
        cursor[i] += 1
        count += 1
    return count


@njit(cache=True)
def _cartpole(
    action: Longs, t: int, obs: Floats, final: Floats, scalars: Floats, state: Doubles, starts: Doubles, cursor: Longs,
    steps: Longs, returns: Doubles, ended: Doubles, limit: int,
) -> int:  # fmt: skip
    """Barto, Sutton and Anderson (1983) as in Gymnasium: Euler steps of 0.02 s, 1 a step, the last one too."""
    bound = 12 * 2 * math.pi / 360
    total = 0.1 + 1.0
    count = 0
    for i in range(state.shape[0]):
        x, x_dot, theta, theta_dot = state[i, 0], state[i, 1], state[i, 2], state[i, 3]
        force = 10.0 if action[i] == 1 else -10.0
        cos, sin = math.cos(theta), math.sin(theta)
        temp = (force + 0.05 * (theta_dot * theta_dot) * sin) / total
        theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * (cos * cos) / total))
        x_acc = temp - 0.05 * theta_acc * cos / total
        x, x_dot = x + 0.02 * x_dot, x_dot + 0.02 * x_acc
        theta, theta_dot = theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc
        state[i, 0], state[i, 1], state[i, 2], state[i, 3] = x, x_dot, theta, theta_dot
        terminated = x < -2.4 or x > 2.4 or theta < -bound or theta > bound
        for j in range(4):
            final[t, i, j] = state[i, j]
        count = _row(i, t, count, 1.0, terminated, scalars, state, starts, cursor, steps, returns, ended, limit)
        for j in range(4):
            obs[t, i, j] = state[i, j]
    return count


@njit(cache=True)
def _pendulum(
    action: Floats, t: int, obs: Floats, final: Floats, scalars: Floats, state: Doubles, starts: Doubles, cursor: Longs,
    steps: Longs, returns: Doubles, ended: Doubles, limit: int,
) -> int:  # fmt: skip
    """Swing-up as in Gymnasium: torque in [-2, 2], steps of 0.05 s, never terminates. The torque is float32 there."""
    count = 0
    for i in range(state.shape[0]):
        angle, speed = state[i, 0], state[i, 1]
        torque = min(max(action[i, 0], np.float32(-2.0)), np.float32(2.0))
        wrapped = (angle + math.pi) % (2 * math.pi) - math.pi
        cost = wrapped * wrapped + 0.1 * (speed * speed) + np.float32(0.001) * (torque * torque)
        speed = speed + (15.0 * math.sin(angle) + np.float32(3.0) * torque) * 0.05
        speed = min(max(speed, -8.0), 8.0)
        angle = angle + speed * 0.05
        state[i, 0], state[i, 1] = angle, speed
        final[t, i, 0], final[t, i, 1], final[t, i, 2] = math.cos(angle), math.sin(angle), speed
        before = count
        count = _row(i, t, count, -cost, False, scalars, state, starts, cursor, steps, returns, ended, limit)
        for j in range(3):
            obs[t, i, j] = final[t, i, j]
        if count > before:
            angle, speed = state[i, 0], state[i, 1]
            obs[t, i, 0], obs[t, i, 1], obs[t, i, 2] = math.cos(angle), math.sin(angle), speed
    return count


@njit(cache=True)
def _unroll_cartpole(
    start: int, policy: Floats, sizes: Longs, relu: bool, noise: Floats, seen: Floats, action: Longs, limit: int,
    obs: Floats, final: Floats, scalars: Floats, state: Doubles, starts: Doubles, cursor: Longs, steps: Longs,
    returns: Doubles, ended: Doubles, log: Doubles, logits: Floats, hidden: Floats,
) -> tuple[int, int]:  # fmt: skip
    """Act and step from `start` on. Ends early where a new start must be drawn. Returns the step, and how many ended.

    `seen[t]` is what the policy sees at step t, `obs` is `seen` from 1 on, and `log` has what ended, as in `ended`.
    """
    count = 0
    for t in range(start, len(noise)):
        forward_rows(seen[t], policy, sizes, relu, len(state), hidden, logits)
        for i in range(len(state)):
            action[t, i] = 0
            for j in range(1, logits.shape[1]):
                if logits[i, j] - noise[t, i, j] > logits[i, action[t, i]] - noise[t, i, action[t, i]]:
                    action[t, i] = j
        more = _cartpole(action[t], t, obs, final, scalars, state, starts, cursor, steps, returns, ended, limit)
        used_up = False
        for k in range(more):
            for part in range(3):
                log[part, count + k] = ended[part, k]
            used_up = used_up or ended[2, k] == starts.shape[1] - 1
        count += more
        if used_up:
            return t + 1, count
    return len(noise), count


def _cartpole_obs(state: Doubles) -> Doubles:
    return state


def _pendulum_obs(state: Doubles) -> Doubles:
    return np.stack([np.cos(state[:, 0]), np.sin(state[:, 0]), state[:, 1]], axis=1)


_HIGH = np.array([4.8, np.inf, 12 * 2 * math.pi / 360 * 2, np.inf], dtype=np.float32)
_TORQUE = gs.Box(-2.0, 2.0, (1,), np.float32)
_SPEED = np.array([1.0, 1.0, 8.0], dtype=np.float32)
# The step, the observation, the spaces, and the bounds of the initial state.
_ENVS: dict[str, tuple[Callable[..., int], Callable[[Doubles], Doubles], Spaces, Doubles]] = {
    "CartPole-v1": (_cartpole, _cartpole_obs, Spaces(gs.Box(-_HIGH, _HIGH), gs.Discrete(2)), np.full(4, 0.05)),
    "Pendulum-v1": (_pendulum, _pendulum_obs, Spaces(gs.Box(-_SPEED, _SPEED), _TORQUE), np.array([math.pi, 1.0])),
}


def make(name: str, num_envs: int, time_limit: int | None = None) -> Classic:
    """A batch of `name`; `time_limit` in actions, None keeps Gymnasium's."""
    spec = gymnasium.registry[name]
    return Classic(name, num_envs, time_limit or spec.max_episode_steps or _FOREVER)


class Classic:
    """An `Env` over one compiled step; see the module."""

    def __init__(self, name: str, num_envs: int, limit: int) -> None:
        self._step, self._show, self.spaces, self._bound = _ENVS[name]
        self.name, self.num_envs, self._limit = name, num_envs, limit
        width = len(self._bound)
        self._features = int(np.prod(self.spaces.obs.shape or ()))
        self._rows = max(1, _CHUNK // (4 * num_envs * self._features))
        self._generators: list[np.random.Generator] = []
        self._state = np.zeros((num_envs, width))
        self._starts = np.zeros((num_envs, _STARTS, width))
        self._cursor = np.zeros(num_envs, dtype=np.int64)
        self._steps = np.zeros(num_envs, dtype=np.int64)
        self._returns = np.zeros(num_envs)
        self._ended = np.zeros((3, num_envs))  # return, length and start used, packed
        self._mask = torch.ones(num_envs)  # every action is taken: one tensor serves all rows
        self._action_shape = (num_envs, *(self.spaces.action.shape or ()))
        self._action_dtype = torch.int64 if isinstance(self.spaces.action, gs.Discrete) else torch.float32
        self._t = self._rows

    def reset(self, seed: int) -> Tensor:
        """Reset all environments; equal seeds give equal episodes. Returns obs `[B, D]`."""
        self._generators = [seeding.np_random(seed + i)[0] for i in range(self.num_envs)]
        for i in range(self.num_envs):
            self._draw(i)
        self._state[:] = self._starts[:, 0]
        self._cursor[:] = 1
        self._steps[:] = 0
        self._returns[:] = 0
        return torch.from_numpy(self._show(self._state).astype(np.float32))

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B]` (CartPole) or `[B, 1]` (Pendulum) in every environment."""
        if action.shape != self._action_shape:  # the compiled loop would read past the end
            raise ValueError(f"'{self.name}' takes actions of shape {self._action_shape}, not {tuple(action.shape)}.")
        if not self._generators:
            raise RuntimeError(f"Environment '{self.name}': call reset(seed) before step.")
        if self._t == self._rows:
            self._allocate()
        t = self._t
        self._t = t + 1
        if action.dtype is not self._action_dtype or action.requires_grad:
            action = action.detach().to(self._action_dtype)
        count = self._step(action.numpy(), t, *self._memory, self._limit)
        obs, scalars, row = self._obs[t], self._scalars, 3 * t
        reward, discount, cut = scalars[row], scalars[row + 1], scalars[row + 2]
        if not count:
            return Feedback(obs, reward, discount, cut, self._mask, obs, {})
        return Feedback(obs, reward, discount, cut, self._mask, self._final[t], self._report(self._ended[:, :count]))

    def unroll(self, policy: Member, relu: bool, obs: Tensor, noise: Tensor) -> Unrolled | None:
        """Act for T steps from `obs` `[B, D]`, as `policy` does and `step` would, in one compiled loop.

        Actions are the argmax of the policy's logits minus `noise` `[T, B, A]`. None if actions are continuous.
        """
        if not isinstance(self.spaces.action, gs.Discrete) or not self._generators:
            return None
        length, envs, hidden = len(noise), self.num_envs, int(policy.sizes[1:-1].sum())
        seen, final = torch.empty(length + 1, envs, self._features), torch.empty(length, envs, self._features)
        action, scalars = torch.empty(length, envs, dtype=torch.int64), torch.empty(length, 3, envs)
        seen[0] = obs
        log, t = np.empty((3, length * envs)), 0
        info: dict[str, list[Any]] = {"episode_return": [], "episode_length": []}
        arrays = seen.numpy(), action.numpy(), final.numpy(), scalars.numpy()
        spare = np.empty((envs, int(policy.sizes[-1])), np.float32), np.empty(envs * hidden, np.float32)
        held = (self._state, self._starts, self._cursor, self._steps, self._returns, self._ended)
        one_thread()
        while t < length:
            t, count = _unroll_cartpole(
                t, policy.flat, policy.sizes, relu, noise.numpy(), arrays[0], arrays[1], self._limit, arrays[0][1:],
                arrays[2], arrays[3], *held, log, *spare,
            )  # fmt: skip
            for name, values in self._report(log[:, :count]).items() if count else ():
                info[name] += values
        reward, discount, cut = scalars.unbind(1)
        return Unrolled(seen, action, reward, discount, cut, final, info if info["episode_return"] else {})

    def render(self) -> None:
        """None: `make(..., render=True)` makes Gymnasium's environments, which can be rendered."""

    def close(self) -> None:
        """Nothing to close."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on."""
        arrays = {key: torch.from_numpy(getattr(self, "_" + key).copy()) for key in _SAVED}
        return {**arrays, "generators": [g.bit_generator.state for g in self._generators]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        for key in _SAVED:
            getattr(self, "_" + key)[:] = state[key].numpy()
        self._generators = []
        for saved in state["generators"]:
            generator = np.random.Generator(np.random.PCG64())
            generator.bit_generator.state = saved
            self._generators.append(generator)

    def _allocate(self) -> None:
        """New memory for the next steps. Old steps belong to the caller."""
        shape = (self._rows, self.num_envs, self._features)
        obs, scalars = torch.empty(shape), torch.empty(self._rows, 3, self.num_envs)
        self._final = torch.empty(shape)
        self._obs, self._scalars = obs.unbind(0), scalars.flatten(0, 1).unbind(0)  # all views at once: cheaper
        out = (obs.numpy(), self._final.numpy(), scalars.numpy())
        held = (self._state, self._starts, self._cursor, self._steps, self._returns, self._ended)
        self._memory = (*out, *held)
        self._t = 0

    def _draw(self, i: int) -> None:
        self._starts[i] = self._generators[i].uniform(-self._bound, self._bound, self._starts[i].shape)
        self._cursor[i] = 0

    def _report(self, ended: Doubles) -> dict[str, Any]:
        returns, lengths, used = ended.tolist()
        if _STARTS - 1 in used:
            for i in np.flatnonzero(self._cursor == _STARTS):
                self._draw(int(i))
        return {"episode_return": returns, "episode_length": [int(n) for n in lengths]}


_SAVED = ("state", "starts", "cursor", "steps", "returns")
