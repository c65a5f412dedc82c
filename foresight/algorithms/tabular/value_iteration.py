"""Value iteration: Bellman (1957), Sutton & Barto (2018) section 4.4, Puterman (1994) section 6.3.

Objective: v* = L v*, where (L v)(s) = max_a [ r(s, a) + γ Σ_s' p(s' | s, a) v(s') ]. L is a contraction by γ in the sup
norm, so the iterates v ← L v converge to v* from any v, and ‖v - v*‖∞ ≤ γ / (1 - γ) ‖Δ‖∞ for the last change Δ. With
γ = 1 the last policy takes, of equally good actions, those that lead to the end (`bellman.ending`).

Kept: synchronous sweeps over all states, stopped at a sup-norm change below `tolerance`; the greedy policy of every
sweep. Left out: asynchronous (Gauss-Seidel, prioritized) order. A sweep skips comparisons whose outcome is certain
(`planning.dynamic.bellman.Sweeps`); this changes no iterate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from foresight import errors
from foresight.envs.base import Spaces
from foresight.envs.tabular import render
from foresight.envs.tabular.mdp import MDP
from foresight.planning.dynamic import bellman

KIND = "tabular"
UNIT = "sweeps"
METRICS = ("residual", "value", "switched")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of value iteration."""

    steps: int = 100_000  # maximum number of sweeps
    seed: int = 0  # unused: the algorithm is deterministic
    gamma: float = 0.99  # discount per action
    tolerance: float = 1e-8  # stop when no value changes by this much in a sweep (θ in S&B p. 83), in units of reward
    yield_every: int = 1  # sweeps between yields; 1 shows every sweep, more is faster


@dataclass
class State:
    """The iterate."""

    config: Config
    values: Tensor  # v [S] float64
    policy: Tensor  # the actions that attained the last maximum [S]
    residual: float = math.inf  # ‖Δ‖∞ of the last sweep
    step: int = 0


def build(config: Config, spaces: Spaces, device: str = "cpu") -> State:
    """v = 0 for the S states and A actions of `spaces`. Raises UserError for hyperparameters out of range."""
    errors.at_least(1, config, "yield_every")
    states = int(spaces.obs.n)  # type: ignore[attr-defined]
    values = torch.zeros(states, dtype=torch.float64, device=device)
    return State(config, values, torch.zeros(states, dtype=torch.int64, device=device))


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """The greedy action in states `obs` `[B]`."""
    return state.policy[obs], {}, carry


def update(state: State, sweeps: bellman.Sweeps, most: int = 1) -> dict[str, float]:
    """v(s) ← max_a [ r(s, a) + γ Σ_s' p(s' | s, a) v(s') ] in all states at once (S&B eq. 4.10), up to `most` times."""
    state.values, state.policy, change = sweeps.improve(state.values, state.policy, most, state.config.tolerance)
    state.residual = change.norm
    state.step += change.sweeps
    return {"residual": change.norm, "switched": float(change.switched)}


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Sweep until no value changes by `tolerance` or more."""
    bellman.require_ending(env, config.gamma)
    state = state or build(config, env.spaces, device)
    sweeps = bellman.Sweeps(env.to(device), config.gamma)
    while state.step < config.steps and state.residual >= config.tolerance:
        most = min(config.yield_every - state.step % config.yield_every, config.steps - state.step)
        begun = state.step.bit_length()
        metrics = update(state, sweeps, most)
        if config.gamma == 1.0 and state.step.bit_length() > begun:  # at about 1, 2, 4, 8, ... sweeps
            bellman.require_bounded(sweeps.mdp, state.values)
        stop = state.step >= config.steps or state.residual < config.tolerance
        if config.gamma == 1.0 and state.residual < config.tolerance:
            slack = max(bellman.rounding(state.values), 2 * state.residual)
            state.policy = bellman.ending(sweeps.mdp, state.values, state.policy, slack)
        if stop or state.step % config.yield_every == 0:
            yield state.step, {**metrics, "value": bellman.start_value(sweeps.mdp, state.values)}, state


def picture(state: State, env: MDP) -> str:
    """The value grid and all optimal arrows, side by side."""
    best = bellman.optimal_actions(env, state.config.gamma, state.values.cpu(), max(1e-9, 2 * state.residual))
    return render.text(env, state.values, best)
