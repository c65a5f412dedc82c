"""Tabular TD and Monte Carlo: the state of a run, and the calls of the compiled loops.

`Tables` holds the MDP as arrays to sample from, `ActorState` where the agent is. `control`, `predict` and
`episodes` run the loops of `tabular_kernels` and return metrics or experience. Sutton & Barto (2018), chapters 5 to 7
and 12.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresight import errors
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Spaces
from foresight.envs.tabular.mdp import MDP, TableEnv
from foresight.errors import UserError, unknown
from foresight.planning.dynamic import bellman
from foresight.training import tabular_kernels

UNLIMITED = 2**62
SWEEPS = 1_000_000  # without discount, after which values are taken to have no limit
Floats = NDArray[np.float64]


@dataclasses.dataclass
class ActorState:
    """Where the agent is: everything its next step depends on besides its tables. It is saved with the State."""

    rng: np.random.Generator
    pairs: NDArray[np.int64]  # [n, 2]: states and actions of the steps that wait for their target
    rewards: NDArray[np.float64]  # [n, 2]: their rewards and discounts
    pending: int = 0  # number of these steps
    state: int = -1  # -1: the next step starts an episode
    action: int = -1  # the next action, if it is already chosen; else -1
    length: int = 0  # steps so far in this episode
    earned: float = 0.0  # reward so far in this episode
    episodes: int = 0  # number that have ended


class StepSize(Protocol):
    """The step size in a Config: α, or α / mᵖ at the m-th visit."""

    @property
    def alpha(self) -> float:
        """The step size, or the initial one."""

    @property
    def alpha_power(self) -> float:
        """p; 0 for a constant step size."""


class Limits(StepSize, Protocol):
    """The fields of a Config for stepping, stopping and yielding."""

    @property
    def steps(self) -> int:
        """Total env steps."""

    @property
    def episodes(self) -> int:
        """Total episodes; 0: no limit."""

    @property
    def yield_every(self) -> int:
        """Env steps between yields; 0: at the end of each episode."""


class Exploring(Limits, Protocol):
    """`Limits`, for a learner that acts ε-greedily."""

    @property
    def epsilon(self) -> float:
        """The probability of a random action."""


class Learner(Protocol):
    """The fields of a State that the functions here use."""

    visits: Tensor
    actor: ActorState
    step: int

    @property
    def config(self) -> Limits:
        """The algorithm's Config."""


class Predictor(Learner, Protocol):
    """A `Learner` of state values."""

    v: Tensor


class Controller(Learner, Protocol):
    """A `Learner` of action values, which it acts on."""

    q: Tensor

    @property
    def config(self) -> Exploring:
        """The algorithm's Config."""


def start(seed: int, n: int = 1) -> ActorState:
    """The `ActorState` of the first step, with space for the n steps of an n-step target. Raises UserError if n < 1."""
    if n < 1:
        raise UserError(f"n_steps must be at least 1, not {n}: it counts the rewards before the bootstrap.")
    return ActorState(np.random.default_rng(seed), np.zeros((n, 2), np.int64), np.zeros((n, 2)))


class Tables:
    """The tables of an MDP as arrays to sample from. `env` is an `MDP`, or a `TableEnv` that samples one.

    Raises UserError for a discount outside [0, 1], and for a discount of 1 where a state leads to no end.
    """

    def __init__(self, env: MDP | TableEnv, gamma: float) -> None:
        whole = env.mdp if isinstance(env, TableEnv) else env
        if not isinstance(whole, MDP):
            raise UserError(f"Tabular learning needs an MDP (see foresight.envs.tabular.grid), not {env!r}.")
        bellman.require_ending(whole, gamma)
        self.mdp, self.gamma = whole.to("cpu"), gamma
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
    def arrays(self) -> tuple[NDArray[np.int64], Floats, Floats, Floats, Floats]:
        """The arrays that the compiled loops take."""
        return self.next_state, self.cumulative, self.reward, self.discount, self.start

    @property
    def pairs(self) -> Tensor:
        """All pairs of a non-absorbing state and an action that is allowed there: `[P, 2]`."""
        return ((~self.forbidden) & ~self.mdp.absorbing()[:, None]).nonzero()


def draw(cumulative: Floats, uniform: float) -> int:
    """The index at which the cumulative sum exceeds the fraction `uniform` of the total."""
    return min(int((cumulative <= uniform * cumulative[-1]).sum()), len(cumulative) - 1)


def sample(policy: Tensor, rng: np.random.Generator) -> Tensor:
    """An action for each row of probabilities `[B, A]`, from one uniform random number each: `[B]`."""
    actions = [draw(row, rng.random()) for row in cumulative(policy)]
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


def check(config: object) -> None:
    """Raise UserError for a hyperparameter of a Config that is out of its range."""
    ranges = {
        "gamma": (0.0, 1.0),
        "alpha": (0.0, 1.0),
        "alpha_power": (0.0, 1.0),
        "epsilon": (0.0, 1.0),
        "trace_lambda": (0.0, 1.0),
    }
    for name, (low, high) in ranges.items():
        value = getattr(config, name, low)
        if not low <= value <= high:
            raise UserError(f"{name} must be between {low:g} and {high:g}, not {value:g}.")
    for least, names in ((0, ("steps", "episodes", "yield_every")), (1, ("max_episode_steps", "improve_every"))):
        errors.at_least(least, config, *(name for name in names if hasattr(config, name)))


def unfinished(state: Learner) -> bool:
    """Whether steps and episodes are left."""
    config = state.config
    return bool(state.step < config.steps and (not config.episodes or state.actor.episodes < config.episodes))


def control(
    tables: Tables, state: Controller, act_and_update: Callable[..., tabular_kernels.Controlled]
) -> dict[str, float]:
    """Act and update `state.q` `[S, A]` or `[N, S, A]` in place until the next yield; returns the metrics.

    `act_and_update` is `tabular_kernels.control` compiled around an algorithm's target. `state.actor` has space for n
    steps: the value of a pair is updated once its target is complete, after n steps or at the end of the episode.
    """
    config, actor = state.config, state.actor
    if state.step == 0:
        state.q.masked_fill_(tables.forbidden.to(state.q.device), -torch.inf)
    steps, most = until(state)
    with arrays(state.q, state.visits) as (q, visits):
        found = act_and_update(
            len(actor.pairs), steps, most, *(x if x.ndim == 3 else x[None] for x in (q, visits)), *tables.arrays,
            tables.limit, tables.gamma, config.alpha, config.alpha_power, config.epsilon, actor.rng, actor.pairs,
            actor.rewards, actor.state, actor.action, actor.length, actor.earned, actor.pending,
        )  # fmt: skip
    (
        taken, actor.state, actor.action, actor.length, actor.earned, actor.pending,
        ended, returned, lengths, errors,
    ) = found  # fmt: skip
    return report(state, taken, ended, returned, lengths, errors)


def predict(
    tables: Tables, state: Predictor, policy: Tensor, act_and_update: Callable[..., tabular_kernels.Predicted]
) -> dict[str, float]:
    """Follow `policy` `[S, A]` and update `state.v` `[S]` in place until the next yield; returns the metrics.

    `act_and_update` is `tabular_kernels.predict` compiled around an algorithm's target.
    """
    config, actor = state.config, state.actor
    steps, most = until(state)
    with arrays(state.v, state.visits) as (v, visits):
        found = act_and_update(
            len(actor.pairs), steps, most, v, visits, cumulative(policy), *tables.arrays, tables.limit, tables.gamma,
            config.alpha, config.alpha_power, actor.rng, actor.pairs, actor.rewards, actor.state, actor.length,
            actor.earned, actor.pending,
        )  # fmt: skip
    taken, actor.state, actor.length, actor.earned, actor.pending, ended, returned, lengths, errors = found
    return report(state, taken, ended, returned, lengths, errors)


def cumulative(policy: Tensor) -> Floats:
    """The cumulative sums over the actions of a policy `[S, A]`, from which the compiled loops draw."""
    sums: Floats = np.cumsum(policy.cpu().numpy(), axis=1)
    return sums


@contextlib.contextmanager
def arrays(*tensors: Tensor) -> Iterator[tuple[NDArray[Any], ...]]:
    """Tensors as arrays that a compiled loop changes in place; those on another device are copied there and back."""
    found = tuple(tensor.cpu().numpy() for tensor in tensors)
    yield found
    for tensor, array in zip(tensors, found, strict=True):
        if tensor.device.type != "cpu":
            tensor.copy_(torch.from_numpy(array))


def until(state: Learner) -> tuple[int, int]:
    """(steps, episodes) until the next yield; 0 episodes: no limit by episodes."""
    config = state.config
    steps = min(config.yield_every or UNLIMITED, config.steps - state.step)
    return steps, 1 if config.yield_every == 0 else max(0, config.episodes - state.actor.episodes)


def report(state: Learner, taken: int, ended: int, returned: float, lengths: int, errors: float) -> dict[str, float]:
    """Add to the counts of steps and episodes; returns the metrics."""
    state.step += taken
    state.actor.episodes += ended
    metrics = {"episodes": float(state.actor.episodes), "td_error": errors / max(1, taken)}
    return metrics | ({"return": returned / ended, "length": lengths / ended} if ended else {})


def move_all(table: Tensor, visits: Tensor, index: Tensor, target: Tensor, config: StepSize) -> float:
    """Move the flat entries `index` `[N]` of a table toward `target` `[N]`, in order; returns the sum of |errors|.

    The step size is α, or α / nᵖ at the n-th visit where the Config has a power p > 0. In place.
    """
    with arrays(table.view(-1), visits.view(-1)) as (values, counts):
        chosen, aims = index.cpu().numpy(), target.cpu().numpy()
        return tabular_kernels.move_all(values, counts, chosen, aims, config.alpha, config.alpha_power)


def episodes(
    tables: Tables, policy: Tensor, count: int, horizon: int, rng: np.random.Generator, first: Tensor | None = None
) -> Trajectory:
    """`count` episodes of `policy` `[S, A]`, concatenated: a `Trajectory` `[1, N]`, float64.

    Each ends where the MDP ends it, at its time limit, or after `horizon` actions; `cut` is 1 at its last step.
    `discount` is γ, or 0 where the episode ended. `first` `[count, 2]`: the initial states and actions, -1 where they
    are to be drawn.
    """
    horizon = min(horizon, tables.limit or horizon)
    # Of one layout, so that one version is compiled.
    begin = np.full((count, 2), -1) if first is None else np.ascontiguousarray(first.cpu())
    columns = tabular_kernels.episodes(count, horizon, begin, cumulative(policy), *tables.arrays, rng)
    s, a, reward, going, cut = (torch.from_numpy(np.ascontiguousarray(x))[None].to(policy.device) for x in columns)
    return Trajectory(s, a, reward, tables.gamma * going, cut.to(reward.dtype))


def first_visits(index: Tensor, cut: Tensor) -> Tensor:
    """`[N]` bool: whether step t is the first in its episode with this `index` `[N]`; `cut` `[N]` ends episodes."""
    episode = torch.cat([torch.zeros_like(cut[:1]), cut[:-1]]).cumsum(0).long()
    key, order = torch.sort(episode * (int(index.max()) + 1) + index, stable=True)
    first = torch.ones_like(index, dtype=torch.bool)
    first[order[1:]] = key[1:] != key[:-1]
    return first


def policy_table(mdp: MDP, name: str, gamma: float, given: Tensor | None = None) -> Tensor:
    """The policy `[S, A]` to evaluate: "uniform", "optimal" (equally good actions equally likely), or the given one.

    Raises UserError for another name, for a policy of the wrong shape, and without discount where no policy is optimal:
    one that never ends earns more and more.
    """
    if given is not None:
        if given.shape != (mdp.states, mdp.actions) or not torch.allclose(given.sum(1), torch.ones(1).to(given)):
            raise UserError(f"A policy for {mdp.name} is a table of probabilities [{mdp.states}, {mdp.actions}].")
        return given.double()
    if name == "uniform":
        return mdp.uniform()
    if name != "optimal":
        raise unknown("policy", name, ("uniform", "optimal"))
    sweeps, values = bellman.Sweeps(mdp, gamma), torch.zeros_like(mdp.start)
    policy, count, scale, change = torch.zeros_like(mdp.start, dtype=torch.int64), 0, 1.0, 1.0
    while change > 1e-12 * scale:  # relative to the values, for their rounding errors
        count += 1
        values, policy, size = sweeps.improve(values, policy)
        change, scale = size.norm, max(1.0, float(values.abs().max()))
        if gamma == 1.0 and count & (count - 1) == 0:  # sweeps 1, 2, 4, 8, ...
            bellman.require_bounded(mdp, values)
            if count > SWEEPS:
                raise bellman.no_bound(mdp)
    best = bellman.optimal_actions(mdp, gamma, values, 1e-9 * scale).double()
    return best / best.sum(1, keepdim=True)


def root_mean_square(mdp: MDP, values: Tensor, exact: Tensor) -> float:
    """The error of `values` `[S]`: √ mean (v − v_π)² over the non-absorbing states."""
    error = (values.cpu() - exact.cpu())[~mdp.absorbing().cpu()]
    return float(error.square().mean().sqrt())
