"""Learning on a table world by walking in it: drawing steps and episodes, and moving a table towards targets.

`World` holds the tables in the form that drawing needs, `Walk` where a learner stands. `control` and `predict` are the
loop act, observe, update: on the CPU compiled (`walk_kernels`), elsewhere by the `act` and `update` of the algorithm's
file, which say what the compiled loop does. Both draw the same numbers from the same generator, so they walk the same
way. Sutton & Barto (2018), chapters 5 to 7 and 12.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

from foresight import errors
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Spaces
from foresight.envs.mdp import MDP, TableEnv
from foresight.errors import UserError, unknown
from foresight.ops import targets
from foresight.planning import dynamic

UNLIMITED = 2**62


class Rows(NamedTuple):
    """The rows that wait for their targets, oldest first, all `[1, T]`.

    `discount` is γ times the world's own, 0 where the episode ended. `next_action` is 0 where it is not known yet, or
    where nothing follows. Where the last row is `cut`, every row is `ready`; else the first one is.
    """

    state: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    cut: Tensor
    next_state: Tensor
    next_action: Tensor

    @property
    def ready(self) -> int:
        """How many rows, from the first on, have their whole target."""
        return self.cut.shape[1] if bool(self.cut[0, -1]) else 1


@dataclasses.dataclass
class Walk:
    """Where a learner stands: all that its next step depends on besides its tables. It is saved with the State."""

    rng: np.random.Generator
    pairs: np.ndarray  # [n, 2] int64: states and actions of the rows that wait for their target
    rewards: np.ndarray  # [n, 2] float64: their rewards and discounts
    pending: int = 0  # how many of these rows there are
    state: int = -1  # -1: the next step begins an episode
    action: int = -1  # what it is going to do, where that is decided; else -1
    length: int = 0  # actions in this episode
    earned: float = 0.0  # in this episode
    episodes: int = 0  # ended so far


def start(seed: int, n: int = 1) -> Walk:
    """A walk that has not begun, with room for the rows of n-step targets. Raises UserError if n < 1."""
    if n < 1:
        raise UserError(f"n must be at least 1, not {n}: it counts the rewards before the bootstrap.")
    return Walk(np.random.default_rng(seed), np.zeros((n, 2), np.int64), np.zeros((n, 2)))


class World:
    """The tables of a world as drawing needs them. `env` is an `MDP`, or the same world sampled, a `TableEnv`.

    Raises UserError for a discount outside [0, 1], and for a discount of 1 where a state leads to no end.
    """

    def __init__(self, env: MDP | TableEnv, gamma: float, device: str = "cpu") -> None:
        whole = env.mdp if isinstance(env, TableEnv) else env
        if not isinstance(whole, MDP):
            raise UserError(f"A table learner walks in a world of tables (see foresight.envs.grid), not in {env!r}.")
        dynamic.require_ending(whole, gamma)
        self.mdp, self.gamma, self.compiled = whole.to("cpu"), gamma, torch.device(device).type == "cpu"
        limit = env.time_limit if isinstance(env, TableEnv) else whole.time_limit
        mdp = self.mdp
        self.limit = limit or 0
        self.next_state = np.ascontiguousarray(mdp.next_state.numpy())
        self.cumulative = np.cumsum(mdp.prob.numpy(), axis=2)
        reward = mdp.reward[:, :, None] if mdp.outcome_reward is None else mdp.outcome_reward
        self.reward = np.ascontiguousarray(reward.numpy())
        self.discount = np.empty((0, 0, 0)) if mdp.discount is None else np.ascontiguousarray(mdp.discount.numpy())
        self.start = np.cumsum(mdp.start.numpy())
        self.forbidden = ~mdp.reward.isfinite()  # [S, A]

    @property
    def tables(self) -> tuple[Any, ...]:
        """What the compiled loops are given."""
        return self.next_state, self.cumulative, self.reward, self.discount, self.start

    @property
    def pairs(self) -> Tensor:
        """Every state in which something happens with every action that is allowed there: `[P, 2]`."""
        return ((~self.forbidden) & ~self.mdp.absorbing()[:, None]).nonzero()

    def begin(self, rng: np.random.Generator) -> int:
        """Where an episode begins."""
        return draw(self.start, rng.random())

    def step(self, rng: np.random.Generator, s: int, a: int) -> tuple[int, float, float]:
        """(next state, reward, the world's own discount) of action a in state s."""
        k = draw(self.cumulative[s, a], rng.random())
        reward = self.reward[s, a, k if self.reward.shape[2] > 1 else 0]
        return (
            int(self.next_state[s, a, k]),
            float(reward),
            float(self.discount[s, a, k]) if self.discount.size else 1.0,
        )


def draw(cumulative: np.ndarray, uniform: float) -> int:
    """The index at which the running sum passes `uniform` of the total."""
    return min(int((cumulative <= uniform * cumulative[-1]).sum()), len(cumulative) - 1)


def sample(policy: Tensor, rng: np.random.Generator) -> Tensor:
    """An action for each row of probabilities `[B, A]`, by one uniform number each: `[B]`."""
    running = np.cumsum(policy.cpu().numpy(), axis=1)
    actions = [draw(row, rng.random()) for row in running]
    return torch.tensor(actions, dtype=torch.int64, device=policy.device)


def sizes(spaces: Spaces) -> tuple[int, int]:
    """(S, A). Raises UserError for spaces that have no finite number of states and actions."""
    for what, space in (("observations", spaces.obs), ("actions", spaces.action)):
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise UserError(
                f"A table has a row for each state and a column for each action, but the {what} here are {space}. "
                "Use an algorithm with a network, such as ppo."
            )
    return int(spaces.obs.n), int(spaces.action.n)  # type: ignore[attr-defined]


def check(config: Any) -> None:
    """Raise UserError for a number of a Config that is out of its range."""
    ranges = {
        "gamma": (0.0, 1.0),
        "alpha": (0.0, 1.0),
        "alpha_power": (0.0, 1.0),
        "epsilon": (0.0, 1.0),
        "lam": (0.0, 1.0),
    }
    for name, (low, high) in ranges.items():
        value = getattr(config, name, low)
        if not low <= value <= high:
            raise UserError(f"{name} must be between {low:g} and {high:g}, not {value:g}.")
    for least, names in ((0, ("steps", "episodes", "every")), (1, ("horizon", "batch"))):
        errors.at_least(least, config, *(name for name in names if hasattr(config, name)))


def goes_on(state: Any) -> bool:
    """Whether a learner's steps and episodes are not used up."""
    config = state.config
    return bool(state.step < config.steps and (not config.episodes or state.walk.episodes < config.episodes))


Act = Callable[..., tuple[Tensor, dict[str, Any], Any]]
Update = Callable[[Any, Rows], dict[str, float]]


def control(world: World, state: Any, act: Act, update: Update, rule: int) -> dict[str, float]:
    """Walk on until the next yield, learning `state.q` `[S, A]` or `[2, S, A]`; returns what happened.

    `rule` is the name in `walk_kernels` of what `act` and `update` do. A target of the n rows that `state.walk` has
    room for is moved to as soon as it is whole: after n steps, or at the end of the episode. Only Sarsa needs the next
    action before the update; the others choose it afterwards, from the table as it is then.
    """
    from foresight.planning import walk_kernels as kernels

    config, walk = state.config, state.walk
    if state.step == 0:
        state.q.masked_fill_(world.forbidden.to(state.q.device), -torch.inf)
    steps = min(config.every or UNLIMITED, config.steps - state.step)
    most = _episodes_left(state)
    if world.compiled:
        q, visits = (x if x.dim() == 3 else x[None] for x in (state.q, state.visits))
        found = kernels.control(
            rule, len(walk.pairs), steps, most, q.numpy(), visits.numpy(), *world.tables, world.limit,
            world.gamma, config.alpha, config.alpha_power, config.epsilon, walk.rng, walk.pairs, walk.rewards,
            walk.state, walk.action, walk.length, walk.earned, walk.pending,
        )  # fmt: skip
        taken, walk.state, walk.action, walk.length, walk.earned, walk.pending, ended, returned, lengths, errors = found
    else:
        taken, ended, returned, lengths, errors = _control(
            world, state, act, update, rule == kernels.SARSA, steps, most
        )
    return _report(state, taken, ended, returned, lengths, errors)


def _control(
    world: World, state: Any, act: Act, update: Update, on_policy: bool, steps: int, most: int
) -> tuple[int, int, float, int, float]:
    walk, taken, ended, returned, lengths, errors = state.walk, 0, 0, 0.0, 0, 0.0

    def choose(s: int) -> int:
        return int(act(state, torch.tensor([s], device=state.q.device), explore=True)[0])

    while taken < steps:
        if walk.state < 0:
            walk.state, walk.action, walk.length, walk.earned, walk.pending = world.begin(walk.rng), -1, 0, 0.0, 0
        if walk.action < 0:
            walk.action = choose(walk.state)
        after, reward, going = world.step(walk.rng, walk.state, walk.action)
        taken, walk.length, walk.earned = taken + 1, walk.length + 1, walk.earned + reward
        cut = going == 0 or (world.limit > 0 and walk.length >= world.limit)
        chosen = choose(after) if on_policy and going else -1
        remember(walk, walk.state, walk.action, reward, world.gamma * going)
        if cut or walk.pending == len(walk.pairs):
            errors += update(state, recall(walk, cut, after, chosen, state.q.device))["td_error"]
            forget(walk)
        walk.state, walk.action = after, chosen
        if cut:
            returned, lengths, ended = returned + walk.earned, lengths + walk.length, ended + 1
            walk.state, walk.action, walk.pending = -1, -1, 0
            if ended == most:
                break
    return taken, ended, returned, lengths, errors


def predict(
    world: World, state: Any, policy: Tensor, update: Update, lam: float | None = None, replacing: bool = False
) -> dict[str, float]:
    """Walk on as `policy` `[S, A]` says until the next yield, learning `state.v` `[S]`; returns what happened.

    By n-step targets, or with `lam` by the traces `state.trace` `[S]`. On the CPU compiled, elsewhere by `update`.
    """
    from foresight.planning import walk_kernels as kernels

    config, walk = state.config, state.walk
    steps, most = min(config.every or UNLIMITED, config.steps - state.step), _episodes_left(state)
    if world.compiled:
        trace = np.empty(0) if lam is None else state.trace.numpy()
        running = np.cumsum(policy.cpu().numpy(), axis=1)
        found = kernels.predict(
            len(walk.pairs), lam or 0.0, replacing, steps, most, state.v.numpy(), state.visits.numpy(),
            trace, running, *world.tables, world.limit, world.gamma, config.alpha, config.alpha_power, walk.rng,
            walk.pairs, walk.rewards, walk.state, walk.length, walk.earned, walk.pending,
        )  # fmt: skip
        taken, walk.state, walk.length, walk.earned, walk.pending, ended, returned, lengths, errors = found
    else:
        taken, ended, returned, lengths, errors = _predict(world, state, policy, update, steps, most)
    return _report(state, taken, ended, returned, lengths, errors)


def _predict(
    world: World, state: Any, policy: Tensor, update: Update, steps: int, most: int
) -> tuple[int, int, float, int, float]:
    walk, taken, ended, returned, lengths, errors = state.walk, 0, 0, 0.0, 0, 0.0
    running = np.cumsum(policy.cpu().numpy(), axis=1)
    while taken < steps:
        if walk.state < 0:
            walk.state, walk.length, walk.earned, walk.pending = world.begin(walk.rng), 0, 0.0, 0
            if hasattr(state, "trace"):
                state.trace.zero_()
        action = draw(running[walk.state], walk.rng.random())
        after, reward, going = world.step(walk.rng, walk.state, action)
        taken, walk.length, walk.earned = taken + 1, walk.length + 1, walk.earned + reward
        cut = going == 0 or (world.limit > 0 and walk.length >= world.limit)
        remember(walk, walk.state, action, reward, world.gamma * going)
        if cut or walk.pending == len(walk.pairs):
            errors += update(state, recall(walk, cut, after, -1, state.v.device))["td_error"]
            forget(walk)
        walk.state = after
        if cut:
            returned, lengths, ended = returned + walk.earned, lengths + walk.length, ended + 1
            walk.state, walk.pending = -1, 0
            if ended == most:
                break
    return taken, ended, returned, lengths, errors


def _episodes_left(state: Any) -> int:
    """After how many episodes to stop and yield; 0 if not for that reason."""
    config = state.config
    return 1 if config.every == 0 else max(0, config.episodes - state.walk.episodes)


def _report(state: Any, taken: int, ended: int, returned: float, lengths: int, errors: float) -> dict[str, float]:
    state.step += taken
    state.walk.episodes += ended
    metrics = {"episodes": float(state.walk.episodes), "td_error": errors / max(1, taken)}
    return metrics | ({"return": returned / ended, "length": lengths / ended} if ended else {})


def remember(walk: Walk, s: int, a: int, reward: float, discount: float) -> None:
    """Add a row to those that wait."""
    walk.pairs[walk.pending] = s, a
    walk.rewards[walk.pending] = reward, discount
    walk.pending += 1


def recall(walk: Walk, cut: bool, after: int, chosen: int, device: Any) -> Rows:
    """The rows that wait, the last of which led to state `after`, where `chosen` will be done."""
    state, action = torch.from_numpy(walk.pairs[: walk.pending].T.copy()).to(device)[:, None]
    reward, discount = torch.from_numpy(walk.rewards[: walk.pending].T.copy()).to(device)[:, None]
    ends = torch.zeros_like(reward)
    ends[0, -1] = float(cut)
    last = torch.tensor([[after], [max(chosen, 0)]], device=device)
    following = torch.cat([torch.stack([state[0, 1:], action[0, 1:]]), last], dim=1)[:, None]
    return Rows(state, action, reward, discount, ends, following[0], following[1])


def forget(walk: Walk) -> None:
    """Let go of the oldest row, whose target was whole."""
    walk.pairs[:-1], walk.rewards[:-1] = walk.pairs[1:].copy(), walk.rewards[1:].copy()
    walk.pending -= 1


def move(table: Tensor, visits: Tensor, index: tuple[Tensor, ...], target: Tensor, config: Any) -> float:
    """The update rule for entries `index` (each `[N]`) of a table, one after the other; the sum of |errors|.

    The step size is α, or α / nᵖ at the n-th visit where the Config has a power p > 0. In place.
    """
    errors = 0.0
    for *where, aim in zip(*index, target, strict=True):
        at = tuple(where)
        visits[at] += 1
        step_size = config.alpha / float(visits[at]) ** config.alpha_power
        errors += float((aim - table[at]).abs())
        table[at] = targets.moved(table[at], aim, step_size)
    return errors


def move_all(table: Tensor, visits: Tensor, index: Tensor, target: Tensor, config: Any) -> float:
    """`move` for flat entries `index` `[N]`, compiled where the table is on the CPU."""
    flat, counts = table.view(-1), visits.view(-1)
    if flat.device.type != "cpu":
        return move(flat, counts, (index,), target, config)
    from foresight.planning import walk_kernels as kernels

    power = config.alpha_power
    return float(kernels.move_all(flat.numpy(), counts.numpy(), index.numpy(), target.numpy(), config.alpha, power))


def episodes(
    world: World, policy: Tensor, count: int, horizon: int, rng: np.random.Generator, first: Tensor | None = None
) -> Trajectory:
    """`count` episodes of `policy` `[S, A]`, one after the other in one row: a `Trajectory` `[1, N]`, float64.

    Each ends where the world ends it or after `horizon` actions (or the world's own time limit); `cut` is 1 in its last
    row. `discount` is γ, or 0 where the episode ended. `first` `[count, 2]`: the states and actions to begin with,
    -1 where they are to be drawn.
    """
    horizon = min(horizon, world.limit or horizon)
    begin = np.full((count, 2), -1) if first is None else first.cpu().numpy()
    running = np.cumsum(policy.cpu().numpy(), axis=1)
    if world.compiled:
        from foresight.planning import walk_kernels as kernels

        columns = kernels.episodes(count, horizon, begin, running, *world.tables, rng)
    else:
        columns = _episodes(world, running, horizon, rng, begin)
    s, a, reward, going, cut = (torch.from_numpy(np.ascontiguousarray(x))[None].to(policy.device) for x in columns)
    return Trajectory(s, a, reward, world.gamma * going, cut.to(reward.dtype))


def _episodes(
    world: World, running: np.ndarray, horizon: int, rng: np.random.Generator, begin: np.ndarray
) -> tuple[np.ndarray, ...]:
    rows: list[tuple[int, int, float, float, bool]] = []
    for s, a in begin.tolist():
        s, going = (world.begin(rng) if s < 0 else s), 1.0
        for t in range(horizon):
            a = draw(running[s], rng.random()) if t > 0 or a < 0 else a
            after, reward, going = world.step(rng, s, a)
            rows.append((s, a, reward, going, going == 0 or t == horizon - 1))
            s = after
            if going == 0:
                break
    return tuple(np.array(column) for column in zip(*rows, strict=True))


def first_visits(index: Tensor, cut: Tensor) -> Tensor:
    """`[N]` bool: whether row t is the first in its episode with this `index` `[N]`; `cut` `[N]` ends episodes."""
    episode = torch.cat([torch.zeros_like(cut[:1]), cut[:-1]]).cumsum(0).long()
    key, order = torch.sort(episode * (int(index.max()) + 1) + index, stable=True)
    first = torch.ones_like(index, dtype=torch.bool)
    first[order[1:]] = key[1:] != key[:-1]
    return first


def policy_table(mdp: MDP, name: str, gamma: float, given: Tensor | None = None) -> Tensor:
    """The policy `[S, A]` to predict: "uniform", "optimal" (equally good actions equally likely), or the one given.

    Raises UserError for another name, and for a policy of the wrong shape.
    """
    if given is not None:
        if given.shape != (mdp.states, mdp.actions) or not torch.allclose(given.sum(1), torch.ones(1).to(given)):
            raise UserError(f"A policy for {mdp.name} is a table of probabilities [{mdp.states}, {mdp.actions}].")
        return given.double()
    if name == "uniform":
        return mdp.uniform()
    if name != "optimal":
        raise unknown("policy", name, ("uniform", "optimal"))
    sweeps, values = dynamic.Sweeps(mdp, gamma), torch.zeros_like(mdp.start)
    policy, change = torch.zeros_like(mdp.start, dtype=torch.int64), 1.0
    while change > 1e-12:
        values, policy, size = sweeps.improve(values, policy)
        change = size.norm
    best = dynamic.optimal_actions(mdp, gamma, values).double()
    return best / best.sum(1, keepdim=True)


def root_mean_square(mdp: MDP, values: Tensor, exact: Tensor) -> float:
    """The error of `values` `[S]`: √ mean (v − v_π)² over the states in which something happens."""
    error = (values.cpu() - exact.cpu())[~mdp.absorbing().cpu()]
    return float(error.square().mean().sqrt())
