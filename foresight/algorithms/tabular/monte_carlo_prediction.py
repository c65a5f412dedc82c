"""Monte Carlo prediction: Sutton & Barto (2018) section 5.1; first and every visit: Singh & Sutton (1996).

Objective: v_π(s) = E[r_1 + γ r_2 + γ² r_3 + ... | s], as the mean of what followed the visits to s:

    G_t = r_{t+1} + γ G_{t+1}        v(s_t) ← v(s_t) + (G_t − v(s_t)) / n(s_t)

No value enters a target, so nothing is learned before an episode ends, and nothing that is wrong spreads.

Kept: the first visit of an episode only, or every visit (`first_visit`); sample means, or a constant α (`alpha_power`
0, S&B eq. 6.1); the error against the exact v_π. An episode that is cut by a time limit or the horizon counts with what
it had earned. Left out: off-policy prediction by importance sampling (S&B section 5.5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foresight import errors
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Spaces
from foresight.envs.tabular import render
from foresight.envs.tabular.mdp import MDP
from foresight.ops import targets
from foresight.planning.dynamic import bellman
from foresight.training import tabular

KIND = "tabular"
UNIT = "episodes"
METRICS = ("rms_error", "return")


@dataclass(frozen=True)
class Config:
    """What Monte Carlo prediction needs."""

    steps: int = 10_000  # episodes
    seed: int = 0  # of the episodes
    gamma: float = 0.99  # discount per action
    first_visit: bool = True  # only the first visit of a state in an episode counts; else every visit
    alpha: float = 1.0  # step size; at the m-th visit of a state α / m^alpha_power
    alpha_power: float = 1.0  # 1: the mean of all returns; 0: constant steps
    initial: float = 0.0  # all values before anything is known
    policy: str = "uniform"  # what is predicted: "uniform" (any action, equally often) or "optimal"
    max_episode_steps: int = 10_000  # actions after which an episode that has not ended is given up
    yield_every: int = 100  # episodes between yields: 1 lets a viewer step through


@dataclass
class State:
    """The values, and the policy that they are of."""

    config: Config
    v: Tensor  # v [S] float64
    visits: Tensor  # returns seen from each state [S]
    probabilities: Tensor  # π(a|s) [S, A]
    rng: np.random.Generator
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
    """v = `initial` in the S states of `spaces`; the policy is read from the world when training begins.

    Raises UserError for spaces that are not finite, and for numbers out of range.
    """
    errors.at_least(1, config, "yield_every")
    tabular.check(config)
    states, actions = tabular.sizes(spaces)
    v = torch.full((states,), config.initial, dtype=torch.float64, device=device)
    uniform = torch.full((states, actions), 1.0 / actions, dtype=torch.float64, device=device)
    return State(config, v, torch.zeros_like(v, dtype=torch.int64), uniform, np.random.default_rng(config.seed))


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """An action of the policy in states `obs` `[B]`: its likeliest, or to explore a drawn one."""
    policy = state.probabilities[obs]
    return tabular.sample(policy, state.rng) if explore else policy.argmax(-1), {}, carry


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """v(s_t) ← v(s_t) + α (G_t − v(s_t)) for the visits of whole episodes, one after the other in `batch` `[1, N]`."""
    config, s = state.config, batch.obs[0]
    target = targets.monte_carlo(batch.reward, batch.discount, batch.cut)[0]
    if config.first_visit:
        first = tabular.first_visits(s, batch.cut[0])
        s, target = s[first], target[first]
    tabular.move_all(state.v, state.visits, s, target, config)
    ended = float(batch.cut.sum())
    state.step += int(ended)
    return {"return": float(batch.reward.sum()) / ended, "length": batch.cut.shape[1] / ended}


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu", policy: Tensor | None = None
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Whole episodes, then their returns (S&B p. 92). `policy` `[S, A]` instead of the Config's, if given."""
    tables = tabular.Tables(env, config.gamma)
    state = state or build(config, env.spaces, device)
    state.probabilities = tabular.policy_table(tables.mdp, config.policy, config.gamma, policy).to(device)
    exact = bellman.policy_value(tables.mdp, state.probabilities.cpu(), config.gamma)
    while state.step < config.steps:
        count = min(config.yield_every, config.steps - state.step)
        batch = tabular.episodes(tables, state.probabilities, count, config.max_episode_steps, state.rng)
        metrics = update(state, batch)
        metrics["rms_error"] = tabular.root_mean_square(tables.mdp, state.v, exact)
        yield state.step, metrics, state


def measure(state: State, env: MDP) -> tuple[str, float]:
    """What an evaluation reports: √ mean (v − v_π)² against the exact values of the same policy."""
    policy = tabular.policy_table(env, state.config.policy, state.config.gamma)
    exact = bellman.policy_value(env, policy, state.config.gamma)
    return "rms_error", tabular.root_mean_square(env, state.v, exact)


def picture(state: State, env: MDP) -> str:
    """The values as learned and the policy that they are of, side by side."""
    return render.text(env, state.v, state.probabilities)
