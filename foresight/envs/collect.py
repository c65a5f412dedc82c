"""Experience from a batch of worlds: stretches of fixed length, or whole episodes, and their true successors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foresight.data import trees
from foresight.data.priorities import Prioritized
from foresight.data.replay import Replay
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Env, Episodes, Feedback
from foresight.ops import returns

Choose = Callable[[Any], Tensor]  # observations `[B, ...]` on the device of the learner to actions `[B, ...]` there


class Stretch(NamedTuple):
    """Rows `[B, T]` and what is needed to value the successor of each of them.

    - `batch`: `obs`, `action`, `reward`, `discount`, `cut` and `mask`, on the learner's device;
    - `obs`: what was seen after the last row, as the world gave it: to go on from;
    - `finals`: `(t, worlds, their final observations)` for every t at which a time limit cut and the next row shows
      another episode.
    """

    batch: Trajectory
    obs: Any
    finals: list[tuple[int, Tensor, Any]]


@torch.no_grad()
def segment(env: Env, obs: Any, choose: Choose, steps: int, device: torch.device, episodes: Episodes) -> Stretch:
    """`steps` of every world from `obs` on. Episodes end and begin inside; a cut row says where.

    Those that end are noted in `episodes`.
    """
    rows: list[tuple[Any, ...]] = []
    finals: list[tuple[int, Tensor, Any]] = []
    for t in range(steps):
        action = choose(trees.to(obs, device))
        feedback = env.step(action.cpu())
        rows.append((obs, action, feedback.reward, feedback.discount, feedback.cut, feedback.mask))
        finals += _limits(t, feedback)
        episodes.note(feedback.info)
        obs = feedback.obs
    return Stretch(_stack(rows, device), obs, finals)


@torch.no_grad()
def episodes(env: Env, seed: int, choose: Choose, longest: int, device: torch.device, finished: Episodes) -> Stretch:
    """One episode of every world from its start; after at most `longest` steps it counts as cut by a time limit.

    T is the length of the longest one; worlds that end before it go on, but those rows have mask 0. Taking what ended
    first instead would prefer short episodes. `seed` starts the episodes; those that end are noted in `finished`.
    """
    obs = env.reset(seed)
    alive = torch.ones(env.num_envs)
    rows: list[tuple[Any, ...]] = []
    finals: list[tuple[int, Tensor, Any]] = []
    while alive.any():
        t = len(rows)
        action = choose(trees.to(obs, device))
        feedback = env.step(action.cpu())
        reported = list(zip(*(feedback.info.get(f"episode_{key}", []) for key in ("return", "length")), strict=True))
        ended = feedback.cut.nonzero().squeeze(-1).tolist()
        if len(reported) == len(ended):  # fewer where only one life of a game ended
            kept = [pair for world, pair in zip(ended, reported, strict=True) if alive[world]]
            finished.note({"episode_return": [r for r, _ in kept], "episode_length": [n for _, n in kept]})
        if t + 1 == longest:
            feedback = feedback._replace(cut=torch.ones_like(feedback.cut))
            finals.append((t, alive.nonzero().squeeze(-1), trees.pick(feedback.final_obs, alive > 0)))
        else:
            finals += _limits(t, feedback)
        rows.append((obs, action, feedback.reward, feedback.discount, feedback.cut, feedback.mask * alive))
        alive = alive * (1 - feedback.cut)
        obs = feedback.obs
    return Stretch(_stack(rows, device), obs, finals)


def remember(replay: Replay | Prioritized, obs: Any, action: Tensor, feedback: Feedback) -> None:
    """Add one step of every world to `replay`: what came back because of `action` `[B, ...]` at `obs`."""
    row = {"obs": obs, "action": action, "reward": feedback.reward, "discount": feedback.discount}
    final = None if feedback.final_obs is feedback.obs else feedback.final_obs
    replay.add({**row, "cut": feedback.cut, "mask": feedback.mask}, final)


@torch.no_grad()
def successors(stretch: Stretch, value: Tensor, evaluate: Callable[[Any], Tensor]) -> Tensor:
    """The value of every row's true successor, `[B, T]`, from the values of the rows.

    `value` `[B, T]` is that of the rows themselves; `evaluate` says the value `[N]` of observations `[N, ...]`.
    Successors are the next rows, but final observations where a time limit cut.
    """
    next_value = returns.following(value, evaluate(trees.to(stretch.obs, value.device)))
    if stretch.finals:
        final = trees.to(trees.concat([obs for _, _, obs in stretch.finals]), value.device)
        worlds = torch.cat([worlds for _, worlds, _ in stretch.finals])
        times = torch.cat([torch.full_like(worlds, t) for t, worlds, _ in stretch.finals])
        next_value[worlds, times] = evaluate(final)
    return next_value


@torch.no_grad()
def successor_obs(stretch: Stretch) -> Any:
    """The true successor of every row itself, `[B, T, ...]`: for those who value it later, or more than once."""
    batch, device = stretch.batch, stretch.batch.reward.device
    found = _shift(batch.obs, trees.to(stretch.obs, device))
    for t, worlds, final in stretch.finals:
        _place(found, worlds.to(device), t, trees.to(final, device))
    return found


def _limits(t: int, feedback: Feedback) -> list[tuple[int, Tensor, Any]]:
    """Where a time limit cut: there the next row is not the successor. Empty in almost every step."""
    if feedback.final_obs is feedback.obs:
        return []
    limited = (feedback.cut * feedback.discount).nonzero().squeeze(-1)
    return [(t, limited, trees.pick(feedback.final_obs, limited))] if len(limited) else []


def _stack(rows: list[tuple[Any, ...]], device: torch.device) -> Trajectory:
    return Trajectory(*(trees.to(trees.stack(column), device) for column in zip(*rows, strict=True)))


def _shift(obs: Any, last: Any) -> Any:
    """Row t+1 in place of row t, and `last` `[B, ...]` at the end."""
    if isinstance(obs, dict):
        return {key: _shift(obs[key], last[key]) for key in obs}
    return returns.following(obs, last)


def _place(obs: Any, worlds: Tensor, t: int, final: Any) -> None:
    """Write `final` over row t of the `worlds`."""
    if isinstance(obs, dict):
        for key in obs:
            _place(obs[key], worlds, t, final[key])
    else:
        obs[worlds, t] = final
