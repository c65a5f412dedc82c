"""Soft value iteration: Ziebart (2010), Haarnoja et al. 2017 (arXiv:1702.08165), section 3.

Objective: the policy that maximizes reward *and* entropy, max_π E Σ γᵗ [r + α H(π(·|s))]. The soft Bellman operator
replaces the maximum of value iteration with a soft maximum, and is also a contraction by γ:

    q(s, a) = r(s, a) + γ Σ_s' p(s' | s, a) v(s')        v(s) ← α log Σ_a exp(q(s, a) / α)        π ∝ exp(q / α)

For α → 0 it becomes `value_iteration`: 0 ≤ v_α − v* ≤ α log A / (1 − γ). It is the tabular form of soft actor-critic.

Kept: synchronous sweeps, stopped at a sup-norm change below `tolerance`. Left out: a learned temperature.
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
from foresight.ops import targets
from foresight.planning.dynamic import bellman
from foresight.training import tabular

KIND = "tabular"
UNIT = "sweeps"
METRICS = ("residual", "value", "entropy")
SETTLED = 4_096  # sweeps without discount after which values that still rise as much as before never settle


@dataclass(frozen=True)
class Config:
    """Hyperparameters of soft value iteration."""

    steps: int = 100_000  # maximum number of sweeps
    seed: int = 0  # unused: the algorithm is deterministic
    gamma: float = 0.99  # discount per action
    entropy_temperature: float = 0.01  # α: reward per nat of entropy; 0 is value iteration
    tolerance: float = 1e-8  # stop when no value changes by this much in a sweep (θ in S&B p. 83), in units of reward
    yield_every: int = 1  # sweeps between yields; 1 shows every sweep, more is faster


@dataclass
class State:
    """The iterate."""

    config: Config
    values: Tensor  # v [S] float64
    policy: Tensor  # π(a|s) of the last sweep [S, A]
    residual: float = math.inf  # ‖Δ‖∞ of the last sweep
    step: int = 0


def build(config: Config, spaces: Spaces, device: str = "cpu") -> State:
    """v = 0 for the S states and A actions of `spaces`. Raises UserError for a negative temperature."""
    if not config.entropy_temperature >= 0:
        raise UserError(f"entropy_temperature must be 0 or more, not {config.entropy_temperature:g}.")
    errors.at_least(1, config, "yield_every")
    states, actions = tabular.sizes(spaces)
    values = torch.zeros(states, dtype=torch.float64, device=device)
    return State(config, values, torch.full((states, actions), 1.0 / actions, dtype=torch.float64, device=device))


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """The most likely action in states `obs` `[B]`."""
    return state.policy[obs].argmax(-1), {}, carry


def update(state: State, env: MDP) -> dict[str, float]:
    """One sweep: v(s) ← α log Σ_a exp([ r(s, a) + γ Σ_s' p(s' | s, a) v(s') ] / α) in all states at once."""
    q = bellman.action_values(env, state.config.gamma, state.values)
    after = torch.where(env.absorbing(), 0.0, targets.soft_maximum(q, state.config.entropy_temperature))
    state.policy = targets.soft_policy(q, state.config.entropy_temperature)
    state.residual = float((after - state.values).abs().max())
    state.values = after
    state.step += 1
    entropy = -(state.policy * state.policy.clamp(min=1e-300).log()).sum(1)[~env.absorbing()].mean()
    return {"residual": state.residual, "entropy": float(entropy)}


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Sweep until no value changes by `tolerance` or more."""
    bellman.require_ending(env, config.gamma)
    state = state or build(config, env.spaces, device)
    env, before = env.to(device), math.inf
    while state.step < config.steps and state.residual >= config.tolerance:
        metrics = update(state, env)
        if config.gamma == 1.0 and state.step >= SETTLED and state.step & (state.step - 1) == 0:
            if state.residual > 0.999 * before:
                raise errors.UserError(
                    f"gamma = 1 on {env.name}: after {state.step:,} sweeps values still rise by {state.residual:.2g} "
                    "in each, since the entropy of an episode that never ends has no bound. Use gamma < 1, or a lower "
                    "--entropy-temperature."
                )
            before = state.residual
        stop = state.step >= config.steps or state.residual < config.tolerance
        if stop or state.step % config.yield_every == 0:
            yield state.step, {**metrics, "value": bellman.start_value(env, state.values)}, state


def picture(state: State, env: MDP) -> str:
    """The soft values and the most likely actions, side by side."""
    return render.text(env, state.values, state.policy.argmax(1))
