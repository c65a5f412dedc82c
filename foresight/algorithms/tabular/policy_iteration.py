"""Policy iteration: Howard (1960), Sutton & Barto (2018) section 4.3, Puterman (1994) section 6.4.

Objective: a policy π with v_π = L v_π, by alternating evaluation, v ← v_π, and improvement, π ← greedy with respect to
v. Each policy is at least as good as the previous one in every state, so the iteration terminates after at most as many
iterations as there are policies (in practice a handful).

Kept: exact evaluation by a linear solve, or iterative by sweeps (`evaluation`); the first policy evaluated is the
equiprobable one (S&B example 4.1), which ends every episode that can end, so that gamma = 1 works too; an action is
replaced only by a better one, otherwise equally good actions may alternate forever (S&B exercise 4.4). Left out:
nothing; for large MDPs use `truncated_policy_iteration`.
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
    """Hyperparameters of policy iteration."""

    steps: int = 100_000  # maximum number of sweeps; an exact evaluation counts as one
    seed: int = 0  # unused: the algorithm is deterministic
    gamma: float = 0.99  # discount per action
    evaluation: str = "exact"  # "exact" (linear solve) or "sweeps" (S&B p. 80)
    tolerance: float = 1e-10  # "sweeps" only: evaluate until no value changes by this much (θ in S&B p. 80)
    yield_every: int = 1  # sweeps between yields; 1 shows every sweep, more is faster


@dataclass
class State:
    """The policy, its values as evaluated so far, and the position in the alternation."""

    config: Config
    values: Tensor  # v [S] float64
    policy: Tensor  # [S]; stands for the equiprobable policy until the first improvement
    residual: float = math.inf  # ‖Lv - v‖∞ at the last improvement
    iteration: int = 0  # improvements made
    evaluated: bool = False  # the next sweep is an improvement
    stable: bool = False  # the last improvement changed nothing: the policy is optimal
    step: int = 0


def build(config: Config, spaces: Spaces, device: str = "cpu") -> State:
    """v = 0 for the S states and A actions of `spaces`. Raises UserError for an unknown evaluation."""
    if config.evaluation not in ("exact", "sweeps"):
        raise errors.unknown("evaluation", config.evaluation, ("exact", "sweeps"))
    errors.at_least(1, config, "yield_every")
    states = int(spaces.obs.n)  # type: ignore[attr-defined]
    values = torch.zeros(states, dtype=torch.float64, device=device)
    return State(config, values, torch.zeros(states, dtype=torch.int64, device=device))


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """The action of the policy in states `obs` `[B]`."""
    return state.policy[obs], {}, carry


def evaluate(state: State, sweeps: bellman.Sweeps, first: Tensor, most: int = 1) -> dict[str, float]:
    """v ← v_π (S&B p. 80, step 2), by up to `most` sweeps or exactly.

    `first` `[S, A]` is the policy evaluated before any improvement.
    """
    policy = state.policy if state.iteration else first
    if state.config.evaluation == "exact":
        before, state.values = state.values, bellman.policy_value(sweeps.mdp, policy, sweeps.gamma)
        state.evaluated = True
        state.step += 1
        return {"change": float((state.values - before).abs().max())}
    state.values, change = sweeps.evaluate(state.values, policy, most, state.config.tolerance)
    state.evaluated = change.norm < state.config.tolerance
    state.step += change.sweeps
    return {"change": change.norm}


def improve(state: State, sweeps: bellman.Sweeps) -> dict[str, float]:
    """π(s) ← argmax_a [ r(s, a) + γ Σ_s' p(s' | s, a) v(s') ], keeping π(s) in a tie (S&B p. 80, step 3)."""
    keep = state.policy if state.iteration else None
    best, policy = bellman.greedy(sweeps.mdp, sweeps.gamma, state.values, keep, _slack(state.config))
    if keep is None and sweeps.gamma == 1.0:  # later ones keep what ends an episode
        slack = _slack(state.config)
        policy = bellman.ending(sweeps.mdp, state.values, policy, bellman.rounding(best) if slack is None else slack)
    switched = int((policy != state.policy).sum()) if state.iteration else len(policy)
    state.residual = float((best - state.values).abs().max())
    state.stable = switched == 0
    if switched:
        state.policy = policy  # otherwise the same tensor: its rows need not be gathered again
    state.iteration += 1
    state.step += 1
    state.evaluated = False
    return {"residual": state.residual, "switched": float(switched), "iteration": float(state.iteration)}


def update(state: State, sweeps: bellman.Sweeps, first: Tensor, most: int = 1) -> dict[str, float]:
    """Evaluation by up to `most` sweeps until it has converged, then an improvement."""
    return improve(state, sweeps) if state.evaluated else evaluate(state, sweeps, first, most)


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Alternate until an improvement changes no action."""
    state = state or build(config, env.spaces, device)
    sweeps = bellman.Sweeps(env.to(device), config.gamma)
    first = sweeps.mdp.uniform()
    while state.step < config.steps and not state.stable:
        most = min(config.yield_every - state.step % config.yield_every, config.steps - state.step)
        metrics = update(state, sweeps, first, most)
        if state.stable or state.step >= config.steps or state.step % config.yield_every == 0:
            yield state.step, {**metrics, "value": bellman.start_value(sweeps.mdp, state.values)}, state


def picture(state: State, env: MDP) -> str:
    """The value grid and all optimal arrows, side by side."""
    residual = state.residual if state.stable else 0.0
    best = bellman.optimal_actions(env, state.config.gamma, state.values.cpu(), max(1e-9, 2 * residual))
    return render.text(env, state.values, best)


def _slack(config: Config) -> float | None:
    """How much better an action must be if values are exact only to `tolerance`; None: allow for rounding only."""
    if config.evaluation == "exact":
        return None
    return 2.0 * config.tolerance / max(1.0 - config.gamma, 1e-3)
