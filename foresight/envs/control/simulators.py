"""The dynamics of environments as simulators that start from any state: what planning in the true simulator needs.

A simulator recovers the state of the environment from an observation, so it needs no access to the environment that is
acted in, and works for a single observation as for a batch. `find` returns one for:

- Pendulum-v1 and MountainCarContinuous-v0: Gymnasium's equations on tensors;
- CartpoleSwingup-v1 and BallInCupCatch-v1 (DeepMind Control, Tassa et al. 2018, arXiv:1801.00690): EnvPool's own files
  of the bodies, stepped by `mujoco.rollout` in threads, and the rewards of the suite. EnvPool's environments cannot be
  copied;
- HalfCheetah-v5 and Hopper-v5, whose observations are positions and velocities: a copy of the environment, one
  candidate after the other. The position that is left out of the observation changes neither dynamics nor reward.
  Hopper clips velocities to ±10. Walker2d and Ant are left out: after a few steps their rewards differ.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresight.data.trajectory import Tree
from foresight.envs.base import Simulator

Doubles = NDArray[np.float64]
POSITIONS = ("HalfCheetah-v5", "Hopper-v5")  # whose simulators a test holds to the environment, step by step


def find(name: str, action_repeat: int, options: dict[str, Any]) -> Callable[[], Simulator] | None:
    """A function that makes the simulator of `name`, or None. `options` are those of the environment itself."""
    if name in POSITIONS:
        return functools.partial(Copy, name, action_repeat, options)
    if options:
        return None
    makers: dict[str, Callable[[int], Simulator]] = {
        "Pendulum-v1": Pendulum, "MountainCarContinuous-v0": MountainCar, "CartpoleSwingup-v1": cartpole_swingup,
        "BallInCupCatch-v1": ball_in_cup_catch,
    }  # fmt: skip
    return functools.partial(makers[name], action_repeat) if name in makers else None


class Pendulum:
    """Gymnasium's Pendulum-v1. A state `[N, 2]` is the angle and its speed."""

    def __init__(self, action_repeat: int = 1) -> None:
        self._repeat = action_repeat

    def root(self, obs: Tree) -> Tensor:
        """See `Simulator`."""
        return torch.stack([torch.atan2(obs[:, 1], obs[:, 0]), obs[:, 2]], -1).double()

    def rewards(self, state: Tensor, actions: Tensor) -> Tensor:
        """See `Simulator`."""
        angle, speed = state.unbind(-1)
        torques = actions.double().squeeze(-1).clamp(-2, 2)
        found = []
        for t in range(actions.shape[1]):
            total, torque = torch.zeros_like(angle), torques[:, t]
            for _ in range(self._repeat):
                wrapped = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
                total -= wrapped.square() + 0.1 * speed.square() + 0.001 * torque.square()
                speed = (speed + (15 * angle.sin() + 3 * torque) * 0.05).clamp(-8, 8)
                angle = angle + speed * 0.05
            found.append(total)
        return torch.stack(found, 1).float()


class MountainCar:
    """Gymnasium's MountainCarContinuous-v0. A state `[N, 2]` is position and velocity, as observed."""

    def __init__(self, action_repeat: int = 1) -> None:
        self._repeat = action_repeat

    def root(self, obs: Tree) -> Tensor:
        """See `Simulator`."""
        state: Tensor = obs.double()
        return state

    def rewards(self, state: Tensor, actions: Tensor) -> Tensor:
        """See `Simulator`. The goal ends the episode."""
        position, velocity = state.unbind(-1)
        alive, forces = torch.ones_like(position), actions.double().squeeze(-1).clamp(-1, 1)
        found = []
        for t in range(actions.shape[1]):
            total, force = torch.zeros_like(position), forces[:, t]
            for _ in range(self._repeat):
                velocity = (velocity + 0.0015 * force - 0.0025 * (3 * position).cos()).clamp(-0.07, 0.07)
                position = (position + velocity).clamp(-1.2, 0.6)
                velocity = velocity.where((position > -1.2) | (velocity > 0), torch.zeros(()).double())
                arrived = ((position >= 0.45) & (velocity >= 0)).double()
                total += alive * (100 * arrived - 0.1 * force.square())
                alive = alive * (1 - arrived)
            found.append(total)
        return torch.stack(found, 1).float()


class Bodies:
    """A MuJoCo model, stepped by `mujoco.rollout`. A state `[N, P + V]` is positions and velocities.

    `substeps` of the physics are one step of the environment, whose reward is `reward(qpos, qvel, control)` after it,
    `[...]` of `[..., P]`, `[..., V]` and `[..., A]`; `state(obs)` recovers the state.
    """

    def __init__(
        self,
        path: Path,
        substeps: int,
        action_repeat: int,
        state: Callable[[Tree], Tensor],
        reward: Callable[[Doubles, Doubles, Doubles], Doubles],
    ) -> None:
        mujoco: Any = importlib.import_module("mujoco")
        rollout: Any = importlib.import_module("mujoco.rollout")
        self.root = state
        self._model, self._reward = mujoco.MjModel.from_xml_path(str(path)), reward
        self._substeps, self._repeat = substeps, action_repeat
        self._threads = torch.get_num_threads()
        self._data = [mujoco.MjData(self._model) for _ in range(self._threads)]
        self._pool = rollout.Rollout(nthread=self._threads if self._threads > 1 else 0)

    def rewards(self, state: Tensor, actions: Tensor) -> Tensor:
        """See `Simulator`."""
        rows, horizon, _ = actions.shape
        control = actions.double().clamp(-1, 1).repeat_interleave(self._repeat, 1).numpy()
        start = np.zeros((rows, 1 + state.shape[1]))  # the time comes first
        start[:, 1:] = state.numpy()
        path, _ = self._pool.rollout(self._model, self._data, start, np.repeat(control, self._substeps, 1))
        path = path[:, self._substeps - 1 :: self._substeps, 1:]
        found = self._reward(path[..., : self._model.nq], path[..., self._model.nq :], control)
        return torch.from_numpy(found).float().view(rows, horizon, self._repeat).sum(-1)


def _assets(name: str) -> Path:
    """A file of DeepMind Control in EnvPool's package of assets."""
    return Path(importlib.import_module("envpool_assets").__path__[0]) / "mujoco" / "assets_dmc" / name


def cartpole_swingup(action_repeat: int = 1) -> Bodies:
    """DeepMind Control's cartpole swing-up."""

    def state(obs: Tree) -> Tensor:
        position = obs["position"].double()
        angle = torch.atan2(position[:, 2], position[:, 1])
        return torch.cat([position[:, :1], angle.unsqueeze(-1), obs["velocity"].double()], -1)

    def reward(qpos: Doubles, qvel: Doubles, control: Doubles) -> Doubles:
        upright = (np.cos(qpos[..., 1]) + 1) / 2
        centered = (1 + _tolerance(qpos[..., 0], 2)) / 2
        calm = (1 + _tolerance(qvel[..., 1], 5)) / 2
        weak = (4 + np.clip(1 - control[..., 0] ** 2, 0, None)) / 5
        found: Doubles = upright * centered * calm * weak
        return found

    return Bodies(_assets("cartpole.xml"), 1, action_repeat, state, reward)


def ball_in_cup_catch(action_repeat: int = 1) -> Bodies:
    """DeepMind Control's ball-in-cup catch: 1 while the ball is inside the cup."""
    cup, ball, reach = np.array([0.0, 0.6 - 0.05]), np.array([0.0, 0.2]), 0.05 - 0.025  # half the target, less the ball

    def state(obs: Tree) -> Tensor:
        return torch.cat([obs["position"], obs["velocity"]], -1).double()

    def reward(qpos: Doubles, qvel: Doubles, control: Doubles) -> Doubles:
        gap = np.abs(qpos[..., :2] + cup - qpos[..., 2:] - ball)
        found: Doubles = (gap < reach).all(-1).astype(np.float64)
        return found

    return Bodies(_assets("ball_in_cup.xml"), 10, action_repeat, state, reward)


def _tolerance(x: Doubles, margin: float) -> Doubles:
    """1 at 0, falling as a Gaussian to 0.1 at `margin`: `tolerance` of arXiv:1801.00690, §3."""
    found: Doubles = 0.1 ** ((x / margin) ** 2)
    return found


class Copy:
    """A copy of a Gymnasium MuJoCo environment, whose physics are set to a state and stepped."""

    def __init__(self, name: str, action_repeat: int, options: dict[str, Any]) -> None:
        env: Any = gymnasium.make(name, disable_env_checker=True, **options).unwrapped
        env.reset(seed=0)
        self._env, self._repeat = env, action_repeat
        self._skipped = env.observation_structure.get("skipped_qpos", 0)

    def root(self, obs: Tree) -> Tensor:
        """See `Simulator`. A state is positions and velocities; those that are not observed are 0."""
        size = self._env.model.nq + self._env.model.nv - self._skipped
        return torch.nn.functional.pad(obs[:, :size].double(), (self._skipped, 0))

    def rewards(self, state: Tensor, actions: Tensor) -> Tensor:
        """See `Simulator`."""
        found, nq = torch.zeros(actions.shape[:2]), self._env.model.nq
        starts, controls = state.numpy(), actions.numpy()
        for i, start in enumerate(starts):
            self._env.data.qacc_warmstart[:] = 0  # or the result would depend on the candidate before
            self._env.set_state(start[:nq], start[nq:])
            found[i] = torch.from_numpy(self._steps(controls[i]))
        return found

    def _steps(self, controls: NDArray[np.float32]) -> NDArray[np.float32]:
        found = np.zeros(len(controls), np.float32)
        for t, control in enumerate(controls):
            for _ in range(self._repeat):
                _, reward, terminated, _, _ = self._env.step(control)
                found[t] += reward
                if terminated:
                    return found
        return found
