"""TD(λ): Sutton (1988), Sutton & Barto (2018) chapter 12.

Objective: v_π, the values of a fixed policy, from the λ-return, a mixture of all n-step returns,

    G^λ_t = (1 − λ) Σ_n λⁿ⁻¹ G_{t:t+n}

without waiting for them. Each state has an eligibility trace z, and one TD error updates all states:

    z(s_t) ← z(s_t) + 1        v ← v + α [r + γ v(s') − v(s_t)] z        z ← γ λ z

λ = 0 is TD(0); λ = 1 is an online form of Monte Carlo. If v were constant within an episode, the updates of a state
would add up to α Σ (G^λ − v) over its visits (S&B section 12.2); the tests check this.

Kept: accumulating and replacing traces (`replacing`); the error against the exact v_π. Left out: true online TD(λ)
(van Seijen & Sutton 2014); function approximation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foresight.envs.base import Spaces
from foresight.envs.tabular import render
from foresight.envs.tabular.mdp import MDP
from foresight.planning.dynamic import bellman
from foresight.training import tabular, tabular_kernels
from foresight.training.tabular_kernels import Floats, Ints

KIND = "tabular"
UNIT = "env steps"
METRICS = ("rms_error", "return", "td_error")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of TD(λ)."""

    steps: int = 100_000  # env steps
    seed: int = 0  # seeds the sampled actions and transitions
    gamma: float = 0.99  # discount per action
    trace_lambda: float = 0.8  # λ: decay of the trace (S&B fig. 12.6: best on the 19-state random walk)
    replacing: bool = False  # a visit sets the trace to 1 instead of adding 1 (Singh & Sutton 1996)
    alpha: float = 0.1  # step size; α / m^alpha_power at the m-th visit of a state
    alpha_power: float = 0.0  # 0: constant step size; in (1/2, 1] the values converge
    initial: float = 0.0  # initial values
    policy: str = "uniform"  # the policy to evaluate: "uniform" (all actions equally likely) or "optimal"
    episodes: int = 0  # also stop after this many episodes; 0: no limit
    yield_every: int = 1_000  # env steps between yields; 0: at the end of each episode


@dataclass
class State:
    """The values, the policy they belong to, and the position in the environment."""

    config: Config
    v: Tensor  # v [S] float64
    visits: Tensor  # updates of each state [S]
    trace: Tensor  # z [S]: eligibility traces
    probabilities: Tensor  # π(a|s) [S, A]
    actor: tabular.ActorState
    step: int = 0

    @property
    def values(self) -> Tensor:
        """v `[S]`."""
        return self.v

    @property
    def policy(self) -> Tensor:
        """π `[S, A]`."""
        return self.probabilities


def build(config: Config, spaces: Spaces, device: str = "cpu") -> State:
    """v = `initial` in the S states of `spaces`; `train` sets the policy from the MDP.

    Raises UserError for spaces that are not finite, and for hyperparameters out of range.
    """
    tabular.check(config)
    states, actions = tabular.sizes(spaces)
    v = torch.full((states,), config.initial, dtype=torch.float64, device=device)
    uniform = torch.full((states, actions), 1.0 / actions, dtype=torch.float64, device=device)
    visits, actor = torch.zeros_like(v, dtype=torch.int64), tabular.start(config.seed)
    return State(config, v, visits, torch.zeros_like(v), uniform, actor)


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """An action of the policy in states `obs` `[B]`: the most likely one, or with `explore`, a sampled one."""
    policy = state.probabilities[obs]
    return tabular.sample(policy, state.actor.rng) if explore else policy.argmax(-1), {}, carry


@tabular_kernels.compiled
def act_and_update(
    steps: int, most: int, v: Floats, visits: Ints, trace: Floats, policy: Floats, next_state: Ints,
    cumulative: Floats, reward: Floats, discount: Floats, start: Floats, limit: int, gamma: float, lam: float,
    replacing: bool, alpha: float, power: float, rng: np.random.Generator, s: int, length: int, earned: float,
) -> tuple[int, int, int, float, int, float, int, float]:  # fmt: skip
    """Follow `policy` (cumulative `[S, A]`) and update v `[S]` at each step with the `trace` `[S]` (S&B p. 293)."""
    taken, ended, returned, lengths, errors = 0, 0, 0.0, 0, 0.0
    while taken < steps:
        if s < 0:
            s, length, earned = tabular_kernels.draw(start, rng.random()), 0, 0.0
            trace[:] = 0.0
        a = tabular_kernels.draw(policy[s], rng.random())
        k = tabular_kernels.draw(cumulative[s, a], rng.random())
        after, r = next_state[s, a, k], reward[s, a, k if reward.shape[2] > 1 else 0]
        continuation = discount[s, a, k] if discount.shape[0] > 0 else 1.0
        taken += 1
        length += 1
        earned += r

        # δ = r + γ v(s') − v(s);  v ← v + α δ z for all states;  z ← γ λ z  (S&B eq. 12.5 to 12.7)
        error = r + (gamma * continuation * v[after] if continuation != 0 else 0.0) - v[s]
        visits[s] += 1
        trace[s] = 1.0 if replacing else trace[s] + 1.0
        step_size = alpha / visits[s] ** power if power > 0 else alpha
        for x in range(len(v)):
            v[x] += step_size * error * trace[x]
            trace[x] *= gamma * continuation * lam
        errors += abs(error)

        s = after
        if continuation == 0 or (limit > 0 and length >= limit):
            returned += earned
            lengths += length
            ended += 1
            s = -1
            if ended == most:
                break
    return taken, s, length, earned, ended, returned, lengths, errors


def follow(state: State, tables: tabular.Tables) -> dict[str, float]:
    """Run until the next yield, and return the metrics."""
    config, actor = state.config, state.actor
    steps, most = tabular.until(state)
    with tabular.arrays(state.v, state.visits, state.trace) as (v, visits, trace):
        found = act_and_update(
            steps, most, v, visits, trace, tabular.cumulative(state.probabilities), *tables.arrays, tables.limit,
            tables.gamma, config.trace_lambda, config.replacing, config.alpha, config.alpha_power, actor.rng,
            actor.state, actor.length, actor.earned,
        )  # fmt: skip
    taken, actor.state, actor.length, actor.earned, ended, returned, lengths, errors = found
    return tabular.report(state, taken, ended, returned, lengths, errors)


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu", policy: Tensor | None = None
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Follow the policy and update at each step (S&B p. 293). `policy` `[S, A]`, if given, replaces `config.policy`."""
    tables = tabular.Tables(env, config.gamma)
    state = state or build(config, env.spaces, device)
    state.probabilities = tabular.policy_table(tables.mdp, config.policy, config.gamma, policy).to(device)
    exact = bellman.policy_value(tables.mdp, state.probabilities.cpu(), config.gamma)
    while tabular.unfinished(state):
        metrics = follow(state, tables)
        metrics["rms_error"] = tabular.root_mean_square(tables.mdp, state.v, exact)
        yield state.step, metrics, state


def measure(state: State, env: MDP) -> tuple[str, float]:
    """The evaluation metric: √ mean (v − v_π)², v_π being the exact values of the same policy."""
    policy = tabular.policy_table(env, state.config.policy, state.config.gamma)
    exact = bellman.policy_value(env, policy, state.config.gamma)
    return "rms_error", tabular.root_mean_square(env, state.v, exact)


def picture(state: State, env: MDP) -> str:
    """The learned values and the evaluated policy, side by side."""
    return render.text(env, state.v, state.probabilities)
