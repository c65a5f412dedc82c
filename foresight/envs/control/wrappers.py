"""Wrappers for the environment options: functions from an `Env` to an `Env`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.data import embodiments
from foresight.data.trajectory import Tree
from foresight.data.trees import ACTION_MASK
from foresight.envs.base import Env, Feedback, Frame, Spaces
from foresight.errors import UserError


class Wrapped:
    """An `Env` whose actions, first observations and feedback pass through functions; the rest is `env`'s."""

    def __init__(
        self,
        env: Env,
        spaces: Spaces,
        action: Callable[[Tensor], Tensor] | None = None,
        reset: Callable[[Tree], Tree] | None = None,
        feedback: Callable[[Feedback], Feedback] | None = None,
    ) -> None:
        self.env, self.name, self.num_envs, self.spaces = env, env.name, env.num_envs, spaces
        self._action, self._reset, self._feedback = action, reset, feedback
        self.engine_action = spaces.action if action is not None else getattr(env, "engine_action", spaces.action)

    def reset(self, seed: int) -> Tree:
        """Reset all environments; equal seeds give equal episodes. Returns obs `[B, ...]`."""
        obs = self.env.reset(seed)
        return obs if self._reset is None else self._reset(obs)

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B, ...]` in every environment."""
        feedback = self.env.step(action if self._action is None else self._action(action))
        return feedback if self._feedback is None else self._feedback(feedback)

    def render(self) -> Frame | None:
        """One RGB frame of environment 0, `[height, width, 3]` uint8; None if it cannot be rendered."""
        return self.env.render()

    def close(self) -> None:
        """Free what the engine holds."""
        self.env.close()


def clip_reward(env: Env) -> Env:
    """Clip the reward to its sign: -1, 0 or 1 (Mnih et al. 2015). Reported returns are not clipped."""
    return Wrapped(env, env.spaces, feedback=lambda f: f._replace(reward=f.reward.sign()))


def rescale_action(env: Env) -> Env:
    """Actions in [-1, 1], mapped linearly to the bounds of the Box. Raises UserError if it has none."""
    space = env.spaces.action
    if not isinstance(space, gs.Box) or not space.is_bounded():
        raise UserError(f"rescale_action needs a bounded Box action space; '{env.name}' has {space}.")
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    half, middle = (high - low) / 2, (high + low) / 2
    spaces = env.spaces._replace(action=gs.Box(-1.0, 1.0, space.shape, np.float32))
    return Wrapped(env, spaces, action=lambda a: a.clamp(-1, 1) * half + middle)


def embodied(env: Env, number: int, spaces: Spaces) -> Env:
    """The environment of embodiment `number` of `spaces`, seen and acted in by the spaces that all of them share."""
    _, seen, done = spaces.embodiments[number]

    def show(obs: Tree) -> Tree:
        return embodiments.pad_obs(obs, number, seen, spaces.obs)

    def feedback(found: Feedback) -> Feedback:
        obs = show(found.obs)
        return found._replace(obs=obs, final_obs=obs if found.final_obs is found.obs else show(found.final_obs))

    return Wrapped(env, spaces, lambda action: embodiments.own_action(action, done), show, feedback)


def visible(env: Env, indices: Sequence[int]) -> Env:
    """Keep only these indices of a vector observation: CartPole without velocities is `[0, 2]`.

    Raises UserError if observations are not vectors, or an index is out of range.
    """
    space = env.spaces.obs
    if not isinstance(space, gs.Box) or len(space.shape) != 1:
        raise UserError(f"visible needs vector observations; '{env.name}' has {space}. Add flatten=true.")
    if not isinstance(indices, list | tuple) or not all(isinstance(i, int) for i in indices):
        raise UserError(f"visible must be a list of indices, such as [0, 2], not {indices!r}.")
    kept = list(indices)
    if not kept or not all(0 <= i < space.shape[0] for i in kept):
        raise UserError(f"visible must be indices from 0 to {space.shape[0] - 1} for '{env.name}', not {kept}.")
    box = gs.Box(space.low[kept], space.high[kept], dtype=space.dtype.type)

    def both(f: Feedback) -> Feedback:
        obs = f.obs[:, kept]
        return f._replace(obs=obs, final_obs=obs if f.final_obs is f.obs else f.final_obs[:, kept])

    return Wrapped(env, env.spaces._replace(obs=box), reset=lambda obs: obs[:, kept], feedback=both)


def picture(env: Env, size: int | None, gray: bool) -> Env:
    """Resize uint8 images `[H, W, 3]` or `[H, W]` to `size` pixels a side; with `gray` they become `[H, W]`.

    A new pixel is the mean over its area; gray is the luma of ITU-R BT.601. Raises UserError for other observations.
    """
    space = env.spaces.obs
    shape = space.shape if isinstance(space, gs.Box) and space.dtype == np.uint8 else ()
    colored = len(shape) == 3 and shape[2] == 3
    if not colored and len(shape) != 2:
        raise UserError(f"image_size and gray need image observations [height, width, 3]; '{env.name}' has {space}.")
    height, width = size or shape[0], size or shape[1]
    rows, columns = (torch.from_numpy(area(old, new)) for old, new in zip(shape, (height, width), strict=False))

    def resize(obs: Tensor) -> Tensor:
        x = obs.float()
        if colored and gray:
            x = x @ _LUMA
        planes = x.movedim(-1, 1) if x.dim() == 4 else x
        small = (rows @ planes @ columns.T if size else planes).round().to(torch.uint8)
        return small.movedim(1, -1).contiguous() if x.dim() == 4 else small

    def both(f: Feedback) -> Feedback:
        obs = resize(f.obs)
        return f._replace(obs=obs, final_obs=obs if f.final_obs is f.obs else resize(f.final_obs))

    box = gs.Box(0, 255, (height, width, 3) if colored and not gray else (height, width), np.uint8)
    return Wrapped(env, env.spaces._replace(obs=box), reset=resize, feedback=both)


_LUMA = torch.tensor([0.299, 0.587, 0.114])  # of red, green and blue


def area(old: int, new: int) -> np.ndarray:
    """The matrix `[new, old]` that averages `old` pixels over the areas of `new` ones."""
    edges = np.arange(new + 1) * old / new
    pixels = np.arange(old)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (np.clip(overlap, 0, None) * new / old).astype(np.float32)


def flatten(env: Env) -> Env:
    """One float32 vector `[B, D]`: parts of a Dict in the order of their keys, Discrete as one-hot.

    Raises UserError for observations with an action mask, which a vector would hide.
    """
    space = env.spaces.obs
    if isinstance(space, gs.Dict) and ACTION_MASK in space.spaces:
        raise UserError(
            f"flatten would make the {ACTION_MASK} of '{env.name}' a part of the vector, where it forbids nothing. "
            "Leave out flatten: networks take dict observations."
        )
    size = gs.flatdim(space)
    spaces = env.spaces._replace(obs=gs.Box(-np.inf, np.inf, (size,), np.float32))

    def both(f: Feedback) -> Feedback:
        obs = _flat(space, f.obs)
        return f._replace(obs=obs, final_obs=obs if f.final_obs is f.obs else _flat(space, f.final_obs))

    return Wrapped(env, spaces, reset=lambda obs: _flat(space, obs), feedback=both)


def _flat(space: gs.Space[Any], x: Tree) -> Tensor:
    if isinstance(space, gs.Dict):
        return torch.cat([_flat(part, x[key]) for key, part in space.spaces.items()], dim=1)
    if isinstance(space, gs.Discrete):
        return torch.nn.functional.one_hot(x.long() - int(space.start), int(space.n)).float()
    if isinstance(space, gs.MultiDiscrete):
        columns = (x.long() - torch.as_tensor(space.start)).flatten(1).unbind(1)
        parts = zip(columns, space.nvec.flatten(), strict=True)
        return torch.cat([torch.nn.functional.one_hot(c, int(n)).float() for c, n in parts], dim=1)
    return x.reshape(len(x), -1).float()


def frame_stack(env: Env, count: int) -> Env:
    """Stack the last `count` observations, oldest first, `[B, count, ...]`; an episode starts with copies.

    An action mask is not stacked: it is of the next action.
    """
    memory: list[Tree] = [None]

    def copies(obs: Tree) -> Tree:
        if isinstance(obs, dict):
            return {key: x if key == ACTION_MASK else copies(x) for key, x in obs.items()}
        return obs.unsqueeze(1).repeat_interleave(count, 1)

    def start(obs: Tree) -> Tree:
        memory[0] = copies(obs)
        return memory[0]

    def push(old: Tree, new: Tree) -> Tree:
        if isinstance(new, dict):
            return {key: x if key == ACTION_MASK else push(old[key], x) for key, x in new.items()}
        return torch.cat([old[:, 1:], new.unsqueeze(1)], dim=1)

    def restart(stack: Tree, obs: Tree, rows: Tensor) -> Tree:
        if isinstance(obs, dict):
            return {key: x if key == ACTION_MASK else restart(stack[key], x, rows) for key, x in obs.items()}
        stack = stack.clone()
        stack[rows] = obs[rows].unsqueeze(1).expand(-1, count, *obs.shape[1:])
        return stack

    def feedback(f: Feedback) -> Feedback:
        final = obs = push(memory[0], f.final_obs)
        # A next-step engine returns the first observation on its reset step (mask 0).
        fresh = f.cut > 0 if f.final_obs is not f.obs else f.mask == 0
        if fresh.any():
            obs = restart(final, f.obs, fresh)
        memory[0] = obs
        return f._replace(obs=obs, final_obs=final)

    return Wrapped(env, env.spaces._replace(obs=_stacked(env.spaces.obs, count)), reset=start, feedback=feedback)


def _stacked(space: gs.Space[Any], count: int) -> gs.Space[Any]:
    if isinstance(space, gs.Dict):
        return gs.Dict(
            {key: part if key == ACTION_MASK else _stacked(part, count) for key, part in space.spaces.items()}
        )
    if isinstance(space, gs.Box):
        repeat = [np.repeat(bound[None], count, axis=0) for bound in (space.low, space.high)]
        return gs.Box(repeat[0], repeat[1], (count, *space.shape), space.dtype.type)
    if isinstance(space, gs.Discrete):
        return gs.MultiDiscrete(np.full(count, space.n), start=np.full(count, space.start))
    raise UserError(f"frame_stack works on Box, Discrete and Dict observations, not on {type(space).__name__}.")
