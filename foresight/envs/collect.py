"""Collects experience: rollouts of fixed length or whole episodes, with the true successors of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.data import episodes as data
from foresight.data import trees
from foresight.data.sequences import Sequences
from foresight.data.trajectory import Trajectory, Tree, tree_map
from foresight.envs.base import Env, Episodes, Feedback, Unrolled
from foresight.envs.control.vector import action_converter
from foresight.errors import UserError
from foresight.ops import returns

# (observations `[B, ...]` on the learner's device, carry) to (actions `[B, ...]` there, extras to store, carry):
# an algorithm's `act` with `explore`. The carry is None where there is no memory.
Choose = Callable[[Any, Any], tuple[Tensor, dict[str, Tensor], Any]]
_CPU = torch.device("cpu")
LONGEST = 10_000  # steps of an episode that is collected whole; no task of MuJoCo or dm_control has more than 1,000
# Steps of a recorded episode. The longest games of Atari are cut after 108,000 frames, which are as many steps where no
# frame is skipped: what is longer never ends.
LONGEST_RECORDED = 200_000
UNROLLED = 64  # steps of a compiled loop that collects whole episodes, before it looks whether all have ended


@dataclass(frozen=True)
class Rollout:
    """Steps `[B, T]` and what is needed to bootstrap from the successor of each. Batches join along the first dim.

    - `trajectory`: `obs`, `action`, `reward`, `discount`, `cut`, `mask`, the `logprob` and `extras` of the policy, and
      in `extras` also `limit`: 1 where a time limit cut and the next step does not show the successor, or not to the
      same memory;
    - `last` `[B, ...]`: the observation after the last step, to continue from;
    - `final` `[K, ...]`: the true successors of the steps with a `limit`, in the order of `limit.nonzero()`;
    - `first`, `carry` `[B, ...]`: the memory before the first step and before `last`;
    - `final_carry` `[K, ...]`: the memory before each of `final`. All three are None where there is no memory.
    """

    trajectory: Trajectory
    last: Tree
    final: Tree
    first: Tree = None
    carry: Tree = None
    final_carry: Tree = None


@torch.no_grad()
def segment(
    env: Env,
    obs: Tree,
    choose: Choose,
    steps: int,
    device: torch.device,
    episodes: Episodes,
    carry: Tree = None,
    terminal: bool = False,
) -> Rollout:
    """`steps` steps of every environment, from `obs`, on `device`. Episodes may end inside; `cut` marks where.

    Finished episodes are added to `episodes`. A memory (`carry`) is reset where an episode is cut. With `terminal` the
    final observations of terminations are kept too, and `limit` is 1 there. If `choose` has an `unroll` for this
    environment, that makes the steps, in a compiled loop.
    """
    first, home = carry, device.type == "cpu"
    unroll = getattr(choose, "unroll", None) if home and carry is None and not terminal else None
    if unroll is not None and (found := unroll(env, obs, steps)) is not None:
        return _unrolled(found, episodes)
    transitions: list[tuple[Any, ...]] = []
    noted: list[dict[str, Tensor]] = []
    limits = _Limits()
    for _ in range(steps):
        action, extras, carry = choose(obs if home else trees.to(obs, device), carry)
        feedback = env.step(action if home else action.cpu())
        transitions.append((obs, action, feedback.reward, feedback.discount, feedback.cut, feedback.mask))
        if extras:
            noted.append(extras)
        if carry is not None or feedback.final_obs is not feedback.obs:
            kept = feedback.cut * feedback.mask if terminal else feedback.cut * feedback.discount
            limits.add(len(transitions) - 1, kept, feedback.final_obs, carry)
            carry = trees.reset_carry(carry, feedback.cut)
        episodes.note(feedback.info)
        obs = feedback.obs
    return _rollout(transitions, noted, obs, limits, device, first, carry)


@torch.no_grad()
def episodes(env: Env, seed: int, choose: Choose, longest: int, device: torch.device, finished: Episodes) -> Rollout:
    """One whole episode of every environment, cut after at most `longest` steps as if by a time limit.

    T is the length of the longest episode. Environments that end earlier continue, with mask 0 on those steps: taking
    the first episodes to end would favor short ones. `seed` is for the reset. Every episode is added to `finished`:
    one that is cut here has the sum of its rewards until the cut as its return. Policies with a memory are not
    supported. If `choose` has an `unroll` for this environment, that makes the steps, in a compiled loop.
    """
    obs = env.reset(seed)
    unroll = getattr(choose, "unroll", None) if device.type == "cpu" else None
    if unroll is not None and (found := _unrolled_episodes(env, obs, unroll, longest, finished)) is not None:
        return found
    alive, earned = torch.ones(env.num_envs), torch.zeros(env.num_envs)
    transitions: list[tuple[Any, ...]] = []
    limits = _Limits()
    while alive.any():
        t = len(transitions)
        action, _, _ = choose(trees.to(obs, device), None)
        feedback = env.step(action.cpu())
        earned += feedback.reward * feedback.mask * alive
        _note_first(feedback, alive, finished)
        if t + 1 == longest:
            unfinished = earned[(alive * (1 - feedback.cut)) > 0].tolist()
            finished.note({"episode_return": unfinished, "episode_length": [t + 1] * len(unfinished)})
            feedback = feedback._replace(cut=torch.ones_like(feedback.cut))
            limits.add(t, alive, feedback.final_obs, None)
        elif feedback.final_obs is not feedback.obs:
            limits.add(t, feedback.cut * feedback.discount, feedback.final_obs, None)
        transitions.append((obs, action, feedback.reward, feedback.discount, feedback.cut, feedback.mask * alive))
        alive = alive * (1 - feedback.cut)
        obs = feedback.obs
    return _rollout(transitions, [], obs, limits, device)


def _note_first(feedback: Feedback, alive: Tensor, finished: Episodes) -> None:
    """Add the episodes that ended with this step to `finished`, of the environments that are `alive` `[B]`."""
    if "episode_return" not in feedback.info:
        return
    ended = (feedback.cut * feedback.mask).nonzero().squeeze(-1)  # a step that only resets ends no episode
    kept = (alive[ended] > 0).tolist()
    pairs = zip(feedback.info["episode_return"], feedback.info["episode_length"], kept, strict=True)
    found = [(earned, length) for earned, length, first in pairs if first]
    finished.note({"episode_return": [r for r, _ in found], "episode_length": [n for _, n in found]})


def whole_episodes(
    env: Env, seed: int, choose: Choose, finished: Episodes, device: torch.device = _CPU
) -> Iterator[Rollout]:
    """Rollouts of one step each, from a reset with `seed` until every environment has finished an episode.

    Environments that end earlier continue with their next episode. The memory begins as None. See `segment` with
    `terminal`. Raises UserError for an episode of more than `LONGEST` steps.
    """
    obs, carry, running = env.reset(seed), None, torch.ones(env.num_envs)
    for _ in range(LONGEST):
        step = segment(env, obs, choose, 1, device, finished, carry, terminal=True)
        obs, carry = step.last, step.carry
        running = running * (1 - step.trajectory.cut[:, 0].cpu())
        yield step
        if not running.any():
            return
    raise _endless(env, int(running.sum()), LONGEST)


@torch.no_grad()
def record(
    env: Env,
    seed: int,
    choose: Choose,
    quota: Sequence[int],
    device: torch.device = _CPU,
    finished: Episodes | None = None,
    rewarded: Callable[[Any, Tensor], Any] | None = None,
    reset_carry: Callable[[Any, Tensor], Any] = trees.reset_carry,
) -> data.Episodes:
    """Whole episodes as data: of environment i the first `quota[i]` after a reset with `seed`.

    A fixed quota per environment: the first episodes to end would be biased to short ones. `rewarded(carry, reward)`
    passes the rewards `[B]` to a policy that acts on them. Actions of a Box are stored as the environment executed
    them, within its bounds. The episodes are also added to `finished`. Raises UserError for an episode of more than
    `LONGEST_RECORDED` steps.
    """
    running: list[list[tuple[Tree, Tensor, Tensor]]] = [[] for _ in quota]
    found: list[list[data.Episodes]] = [[] for _ in quota]
    obs, carry = env.reset(seed), None
    space = env.spaces.action
    shared = getattr(env, "engine_action", space) is not None  # None: of several tasks, whose bounds differ
    executed = action_converter(space if shared and isinstance(space, gs.Box) else None)
    while any(len(done) < wanted for done, wanted in zip(found, quota, strict=True)):
        action, _, carry = choose(trees.to(obs, device), carry)
        action = action.cpu()
        feedback = env.step(action)
        stored = executed(action).to(action.dtype)
        for i, steps in enumerate(running):
            if not feedback.mask[i]:
                continue
            steps.append((_row(obs, i), stored[i], feedback.reward[i]))
            if feedback.cut[i]:
                if len(found[i]) < quota[i]:
                    found[i].append(data.episode(steps, _row(feedback.final_obs, i), not bool(feedback.discount[i])))
                steps.clear()
        if carry is not None and rewarded is not None:
            carry = rewarded(carry, feedback.reward * feedback.mask)
        if carry is not None and bool(feedback.cut.any()):
            carry = reset_carry(carry, feedback.cut)
        obs = feedback.obs
        over = [len(s) > LONGEST_RECORDED and len(f) < n for s, f, n in zip(running, found, quota, strict=True)]
        if any(over):
            raise _endless(env, sum(over), LONGEST_RECORDED)
    joined = data.join([one for ones in found for one in ones])
    if finished is not None:
        finished.note({"episode_return": joined.returns.tolist(), "episode_length": joined.length.tolist()})
    return joined


def _endless(env: Env, count: int, longest: int) -> UserError:
    """The error for `count` environments whose episodes have more than `longest` steps."""
    return UserError(
        f"{count} of {env.num_envs} environments '{env.name}' did not end an episode within {longest:,} steps, but "
        "whole episodes are collected. Give them a time limit, for example with --env-options time_limit=1000."
    )


def _row(tree: Tree, row: int) -> Tree:
    return tree_map(lambda x: x[row], tree)


class Buffer(Protocol):
    """Where steps are stored: a `Replay`, or `Prioritized` around one."""

    def add(self, rows: dict[str, Tree], final_obs: Tree = None) -> None:
        """See `Replay.add`."""


def add_to_replay(replay: Buffer, rollout: Rollout) -> None:
    """Add the steps to `replay`, one stream for each environment."""
    trajectory = rollout.trajectory
    limited = trajectory.extras["limit"].any(0).tolist()
    following = successor_obs(rollout) if any(limited) else None
    for t, needed in enumerate(limited):
        row = {name: tree_map(_step(t), getattr(trajectory, name)) for name in _STORED}
        replay.add(row, tree_map(_step(t), following) if needed else None)


def add_sequences(replay: Sequences, rollout: Rollout) -> None:
    """Add the steps to `replay`, with the final observation of every episode that ended."""
    steps = rollout.trajectory
    following = successor_obs(rollout)
    extras = {name: x for name, x in steps.extras.items() if name not in ("limit", "key")}
    for t in range(steps.shape[1]):
        row = {name: tree_map(_step(t), getattr(steps, name)) for name in _STORED}
        replay.add({**row, "extras": tree_map(_step(t), extras)}, tree_map(_step(t), following))


def _step(t: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[:, t].cpu()


_STORED = ("obs", "action", "reward", "discount", "cut", "mask")


@torch.no_grad()
def successors(rollout: Rollout, value: Tensor, evaluate: Callable[[Any, Any], Tensor]) -> Tensor:
    """The value of every step's true successor, `[B, T]`, from the values of the steps.

    `value` `[B, T]` is that of the steps; `evaluate` returns the value `[N]` of observations `[N, ...]` and the carry
    before them. The successor is the next step, but the final observation where a time limit cut.
    """
    device = value.device
    next_value = returns.following(value, evaluate(trees.to(rollout.last, device), trees.to(rollout.carry, device)))
    limit = rollout.trajectory.extras["limit"] > 0
    if limit.any():
        next_value[limit] = evaluate(trees.to(rollout.final, device), trees.to(rollout.final_carry, device))
    return next_value


@torch.no_grad()
def successor_obs(rollout: Rollout) -> Tree:
    """The true successor of every step, `[B, T, ...]`, for algorithms that evaluate it later or more than once."""
    limit = rollout.trajectory.extras["limit"] > 0
    return _successor(rollout.trajectory.obs, rollout.last, rollout.final, limit)


def _successor(obs: Tree, last: Tree, final: Tree, limit: Tensor) -> Tree:
    if isinstance(obs, dict):
        return {key: _successor(obs[key], last[key], final[key], limit) for key in obs}
    found = returns.following(obs, last.to(obs.device))
    found[limit] = final.to(obs.device)
    return found


class _Limits:
    """Where time limits cut, the final observation there, and the memory before it."""

    def __init__(self) -> None:
        self.found: list[tuple[int, Tensor, Any, Any]] = []

    def add(self, t: int, limited: Tensor, final: Tree, carry: Tree) -> None:
        envs = limited.nonzero().squeeze(-1)
        if len(envs):  # rarely
            self.found.append((t, envs, trees.pick(final, envs), trees.pick(carry, envs)))


def _unrolled(found: Unrolled, episodes: Episodes) -> Rollout:
    episodes.note(found.info)
    last, parts = found.obs[-1].clone(), (found.obs[:-1], *found[1:-1])
    obs, action, reward, discount, cut, final = (x.transpose(0, 1).contiguous() for x in parts)
    limit = cut * discount
    batch = Trajectory(obs, action, reward, discount, cut, torch.ones_like(cut), extras={"limit": limit})
    return Rollout(batch, last, final[limit > 0])


def _unrolled_episodes(
    env: Env, obs: Tree, unroll: Callable[[Env, Tree, int], Unrolled | None], longest: int, finished: Episodes
) -> Rollout | None:
    """`episodes` by `unroll`, some steps at a time; None if that has no compiled loop."""
    parts, running, left = list[Unrolled](), torch.ones(env.num_envs), longest
    while left and running.any():
        if (found := unroll(env, obs, min(UNROLLED, left))) is None:
            return None
        parts.append(found)
        obs, left, running = found.obs[-1], left - len(found.reward), running * (1 - found.cut.amax(0))
    columns = zip(*[(part.obs[:-1], *part[1:-1]) for part in parts], strict=True)
    seen, action, reward, discount, cut, final = (torch.cat(column) for column in columns)
    alive = torch.cat([torch.ones_like(cut[:1]), (1 - cut[:-1]).cumprod(0)])
    lengths = alive.sum(0)
    if (count := int(lengths.max())) < len(seen):  # others ended earlier
        obs = seen[count]
    rows = (x[:count].transpose(0, 1).contiguous() for x in (seen, action, reward, discount, cut, final, alive))
    seen, action, reward, discount, cut, final, mask = rows
    limit = cut * discount * mask
    if running.any():  # cut at `longest`
        cut[:, -1], limit[:, -1] = 1, mask[:, -1]
    order = lengths.argsort(stable=True)  # as they ended
    earned = (reward * mask).sum(1)[order].tolist()
    finished.note({"episode_return": earned, "episode_length": lengths[order].int().tolist()})
    batch = Trajectory(seen, action, reward, discount, cut, mask, extras={"limit": limit})
    return Rollout(batch, obs.clone(), final[limit > 0])


def _rollout(
    transitions: list[tuple[Any, ...]],
    noted: list[dict[str, Tensor]],
    last: Tree,
    limits: _Limits,
    device: torch.device,
    first: Tree = None,
    carry: Tree = None,
) -> Rollout:
    columns = zip(*transitions, strict=True)
    obs, action, reward, discount, cut, mask = (trees.to(trees.stack(column), device) for column in columns)
    limit = torch.zeros_like(reward)
    final, final_carry = tree_map(lambda x: x[:0], last), tree_map(lambda x: x[:0], carry)
    if limits.found:
        envs = torch.cat([envs for _, envs, _, _ in limits.found])
        times = torch.cat([torch.full_like(envs, t) for t, envs, _, _ in limits.found])
        limit[envs, times] = 1
        order = (envs * len(transitions) + times).argsort()
        final = trees.pick(trees.concat([seen for _, _, seen, _ in limits.found]), order)
        if carry is not None:
            final_carry = trees.pick(trees.concat([held for _, _, _, held in limits.found]), order.to(device))
    extras = {**(trees.stack(noted) if noted else {}), "limit": limit}
    batch = Trajectory(obs, action, reward, discount, cut, mask, extras.pop("logprob", None), extras=extras)
    return Rollout(batch, last, final, first, carry, final_carry)
