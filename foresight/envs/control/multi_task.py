"""Several tasks in one batch, to train one policy on all of them: of one embodiment, or of several."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight import errors
from foresight.data import embodiments as bodies
from foresight.data import trees
from foresight.data.embodiments import Embodiment
from foresight.data.trajectory import Tree
from foresight.envs.base import Env, Feedback, Frame, Spaces
from foresight.envs.control import miniwob, wrappers
from foresight.envs.tools import web
from foresight.errors import UserError


class MultiTask:
    """An `Env` of `envs` side by side, in their order. `info["episode_task"]` names the task of each ended episode.

    Raises UserError unless they have equal observation and action spaces.
    """

    def __init__(self, envs: Sequence[Env]) -> None:
        first = envs[0]
        for env in envs[1:]:
            for word, own, other in zip(("observations", "actions"), first.spaces[:2], env.spaces[:2], strict=True):
                if not same_space(own, other):
                    raise UserError(
                        f"Tasks that are trained together need equal {word}: '{first.name}' has {own}, but "
                        f"'{env.name}' has {other}. Env options such as flatten may make them equal; vla takes "
                        "different ones with --env-options embodiments=true."
                    )
        self.envs = list(envs)
        self.spaces = first.spaces._replace(continuing=any(env.spaces.continuing for env in envs), simulator=None)
        taken = [getattr(env, "engine_action", env.spaces.action) for env in envs]
        self.engine_action = taken[0] if all(space == taken[0] for space in taken) else None  # their bounds may differ
        self.name, self.num_envs = ",".join(env.name for env in envs), sum(env.num_envs for env in envs)
        edges = list(itertools.accumulate((env.num_envs for env in envs), initial=0))
        self._parts = [slice(a, b) for a, b in itertools.pairwise(edges)]

    def reset(self, seed: int) -> Tree:
        """Reset all environments; equal seeds give equal episodes. Returns obs `[B, ...]`."""
        return trees.concat([env.reset(seed + part.start) for env, part in zip(self.envs, self._parts, strict=True)])

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B, ...]` in every environment."""
        results = [env.step(action[part]) for env, part in zip(self.envs, self._parts, strict=True)]
        obs = trees.concat([feedback.obs for feedback in results])
        same = all(feedback.final_obs is feedback.obs for feedback in results)
        final = obs if same else trees.concat([feedback.final_obs for feedback in results])
        reward, discount, cut, mask = map(torch.cat, zip(*[feedback[1:5] for feedback in results], strict=True))
        return Feedback(obs, reward, discount, cut, mask, final, self._info([feedback.info for feedback in results]))

    def same_starts(self, group: int) -> None:
        """As the tasks' own, see `babyai.Instructed.same_starts`. Raises UserError for a task that cannot."""
        for env in self.envs:
            if not hasattr(env, "same_starts"):
                raise UserError(f"'{env.name}' cannot begin several episodes alike. BabyAI with a camera can.")
            env.same_starts(group)

    def expert(self) -> Tensor:
        """The actions of each task's own expert, `[B]`. Raises UserError for a task that has none."""
        for env in self.envs:
            if not hasattr(env, "expert"):
                raise UserError(f"'{env.name}' has no expert of its own.")
        return torch.cat([env.expert() for env in self.envs])  # type: ignore[attr-defined]

    def render(self) -> Frame | None:
        """One RGB frame of the first environment of the first task."""
        return self.envs[0].render()

    def close(self) -> None:
        """Free what the engines hold."""
        for env in self.envs:
            env.close()

    def _info(self, infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        if any("episode_return" in info for info in infos):
            for key in ("episode_return", "episode_length"):
                merged[key] = [x for info in infos for x in info.get(key, [])]
            counts = [len(info.get("episode_return", [])) for info in infos]
            names = [env.name for env in self.envs]
            merged["episode_task"] = [name for name, n in zip(names, counts, strict=True) for _ in range(n)]
        engines = [info.get("engine") for info in infos]
        if all(isinstance(engine, dict) and "game_over" in engine for engine in engines):
            merged["engine"] = {"game_over": np.concatenate([np.asarray(e["game_over"]) for e in engines if e])}
        return merged


def same_space(one: gymnasium.Space[Any], other: gymnasium.Space[Any]) -> bool:
    """Whether one network fits both: the same kind, shape and dtype. Bounds may differ."""
    if isinstance(one, gs.Dict) and isinstance(other, gs.Dict):
        return one.keys() == other.keys() and all(same_space(one[key], other[key]) for key in one)
    if isinstance(one, gs.Box) and isinstance(other, gs.Box):
        return one.shape == other.shape and one.dtype == other.dtype
    return one == other


def tasks(names: str) -> list[str]:
    """The tasks in `names`, separated by commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def least_envs(names: str) -> int:
    """How many environments `names` needs: tasks share them equally, and one of MiniWoB++ needs one for each page."""
    each = tasks(names)
    pages = [len(web.pages(task.removeprefix(miniwob.PREFIX))) for task in each if task.startswith(miniwob.PREFIX)]
    return len(each) * max(pages, default=1)


def make(
    names: str,
    one: Callable[..., Env],
    num_envs: int = 8,
    embodiments: bool = False,
    only: str | None = None,
    **options: Any,
) -> Env:
    """The tasks `names` (joined by commas), each made by `one`; they share `num_envs` as equally as possible.

    Options are for all tasks; those in a dict that is named as a task are for it alone. With `embodiments` the tasks
    may differ in observations and actions, which are padded to shared ones (see `data.embodiments`). `only` is the one
    task that all `num_envs` are of, in the spaces of all.

    Raises UserError for fewer environments than tasks, and for a task that is none of them.
    """
    each = tasks(names)
    if not each:
        raise UserError(f"'{names}' names no environment: write names joined by commas, as in CartPole-v1,Acrobot-v1.")
    if only is not None and only not in each:
        raise errors.unknown("environment of these tasks", only, each)
    if only is None and num_envs < len(each):
        raise UserError(f"num_envs is {num_envs}, but {len(each)} tasks need one environment each: raise num_envs.")
    for_all = {key: value for key, value in options.items() if key not in each}
    for task in each:
        if not isinstance(options.get(task, {}), dict):
            raise UserError(f"The options of '{task}' are {options[task]!r}: write '{task}={{key: value}}'.")
    counts = [num_envs // len(each) + (i < num_envs % len(each)) for i in range(len(each))]
    if only is not None:
        counts = [num_envs if task == only else int(embodiments) for task in each]  # one, for its spaces
    built = {
        i: one(task, num_envs=counts[i], **{**for_all, **options.get(task, {})})
        for i, task in enumerate(each)
        if counts[i]
    }
    envs = dict(zip(built, _embodied(list(built.values())), strict=True)) if embodiments else built
    kept = [i for i in envs if only in (None, each[i])]
    for i in built.keys() - set(kept):
        built[i].close()
    return MultiTask([envs[i] for i in kept])


def _embodied(envs: Sequence[Env]) -> list[Env]:
    """The environments in the spaces that all share; those of equal spaces are of one embodiment."""
    parts: list[Embodiment] = []
    number = []
    for env in envs:
        own = [(part.obs, part.action) for part in parts]
        if env.spaces[:2] not in own:
            parts.append(Embodiment(env.name, *env.spaces[:2]))
            own.append(env.spaces[:2])
        number.append(own.index(env.spaces[:2]))
    continuing = any(env.spaces.continuing for env in envs)
    spaces = Spaces(*bodies.shared(parts), continuing, embodiments=tuple(parts))
    return [wrappers.embodied(env, i, spaces) for env, i in zip(envs, number, strict=True)]
