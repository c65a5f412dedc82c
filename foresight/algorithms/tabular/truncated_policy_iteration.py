"""Truncated (modified) policy iteration: Puterman & Shin (1978), Puterman (1994) section 6.5, S&B (2018) section 4.6.

Objective: v* = L v*, by v ← (L_π)^m L v, where (L v)(s) = max_a [ r(s, a) + γ Σ_s' p(s' | s, a) v(s') ], π is greedy
with respect to v, and L_π is L with the action π(s) instead of the maximum. m = 0 is value iteration, m = ∞ policy
iteration.

Kept: a fixed m (`evaluation_sweeps`), stopping on the sup norm, and as an option stopping on the span with MacQueen's
bounds (Puterman 6.6.3), which needs only the *differences* between states to converge, not their common offset. Left
out: an m that grows with the iterations. An improvement skips comparisons whose outcome is certain
(`planning.dynamic.bellman.Sweeps`; Puterman 6.7.3); this changes no iterate.
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
from foresight.errors import UserError
from foresight.planning.dynamic import bellman

KIND = "tabular"
UNIT = "sweeps"
METRICS = ("residual", "value", "switched")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of truncated policy iteration."""

    steps: int = 100_000  # maximum number of sweeps, improvement and evaluation sweeps together
    seed: int = 0  # unused: the algorithm is deterministic
    gamma: float = 0.99  # discount per action
    tolerance: float = 1e-8  # stop when an improvement's residual is below this, in units of reward
    evaluation_sweeps: int = 10  # m: evaluation sweeps after each improvement (m_n in Puterman 6.5)
    span_bounds: bool = False  # stop on half the span of the change, and correct v by its bounds (needs gamma < 1)
    yield_every: int = 1  # sweeps between yields; 1 shows every sweep, more is faster


@dataclass
class State:
    """The iterate. ‖v - v*‖∞ ≤ γ / (1 - γ) · residual once the residual is below the tolerance."""

    config: Config
    values: Tensor  # v [S] float64
    policy: Tensor  # greedy with respect to the values at the last improvement [S]
    residual: float = math.inf  # of the last improvement
    evaluations_left: int = 0  # before the next improvement
    step: int = 0


def build(config: Config, spaces: Spaces, device: str = "cpu") -> State:
    """v = 0 for the S states and A actions of `spaces`. Raises UserError for span bounds with gamma = 1."""
    if config.span_bounds and not config.gamma < 1:
        raise UserError(
            f"span_bounds needs gamma < 1, not {config.gamma:g}: without discount the bounds are infinite. "
            "Use span_bounds=False."
        )
    if config.evaluation_sweeps < 0:
        raise UserError(f"evaluation_sweeps must be 0 or more, not {config.evaluation_sweeps}.")
    errors.at_least(1, config, "yield_every")
    states = int(spaces.obs.n)  # type: ignore[attr-defined]
    values = torch.zeros(states, dtype=torch.float64, device=device)
    return State(config, values, torch.zeros(states, dtype=torch.int64, device=device))


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """The greedy action in states `obs` `[B]`."""
    return state.policy[obs], {}, carry


def improve(state: State, sweeps: bellman.Sweeps) -> dict[str, float]:
    """π ← greedy with respect to v, v ← L v: one sweep gives both (Puterman 6.5, steps 2 and 3a)."""
    state.values, state.policy, change = sweeps.improve(state.values, state.policy)
    state.step += 1
    state.residual = change.half_span if state.config.span_bounds else change.norm
    if state.residual >= state.config.tolerance:
        state.evaluations_left = state.config.evaluation_sweeps
    elif state.config.span_bounds:
        state.values = bellman.extrapolate(sweeps.mdp, sweeps.gamma, state.values, change)
    return {"residual": state.residual, "switched": float(change.switched)}


def evaluate(state: State, sweeps: bellman.Sweeps, most: int = 1) -> dict[str, float]:
    """v ← L_π v (Puterman 6.5, step 3c), up to `most` times."""
    most = min(most, state.evaluations_left)
    state.values, change = sweeps.evaluate(state.values, state.policy, most)
    state.evaluations_left -= change.sweeps
    state.step += change.sweeps
    return {"change": change.norm}


def update(state: State, sweeps: bellman.Sweeps, most: int = 1) -> dict[str, float]:
    """An improvement sweep, or up to `most` of the evaluation sweeps that follow it."""
    return evaluate(state, sweeps, most) if state.evaluations_left else improve(state, sweeps)


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Sweep until an improvement's residual is below `tolerance`."""
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
