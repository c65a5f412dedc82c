"""Monte Carlo prediction: Sutton & Barto (2018) section 5.1; first and every visit: Singh & Sutton (1996).

Objective: v_π(s) = E[r_1 + γ r_2 + γ² r_3 + ... | s], as the mean return after a visit to s:

    G_t = r_{t+1} + γ G_{t+1}        v(s_t) ← v(s_t) + (G_t − v(s_t)) / n(s_t)

The target does not bootstrap: there is no update before the episode ends, and errors of v do not spread to other
states.

Kept: the first visit of an episode only, or every visit (`first_visit`); sample means, or a constant α (`alpha_power`
0, S&B eq. 6.1); the error against the exact v_π. An episode that is truncated by a time limit or by `max_episode_steps`
counts with its return up to there. Left out: off-policy prediction by importance sampling (S&B section 5.5).
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
    """Hyperparameters of Monte Carlo prediction."""

    steps: int = 10_000  # episodes
    seed: int = 0  # seeds the sampled episodes
    gamma: float = 0.99  # discount per action
    first_visit: bool = True  # count only the first visit of a state in an episode, not every visit
    alpha: float = 1.0  # step size; α / m^alpha_power at the m-th visit of a state
    alpha_power: float = 1.0  # 1: the mean of all returns; 0: constant step size
    initial: float = 0.0  # initial values
    policy: str = "uniform"  # the policy to evaluate: "uniform" (all actions equally likely) or "optimal"
    max_episode_steps: int = 10_000  # actions after which an episode is truncated
    yield_every: int = 100  # episodes between yields; 1 shows every episode


@dataclass
class State:
    """The values, and the policy they belong to."""

    config: Config
    v: Tensor  # v [S] float64
    visits: Tensor  # number of returns of each state [S]
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
    """v = `initial` in the S states of `spaces`; `train` sets the policy from the MDP.

    Raises UserError for spaces that are not finite, and for hyperparameters out of range.
    """
    errors.at_least(1, config, "yield_every")
    tabular.check(config)
    states, actions = tabular.sizes(spaces)
    v = torch.full((states,), config.initial, dtype=torch.float64, device=device)
    uniform = torch.full((states, actions), 1.0 / actions, dtype=torch.float64, device=device)
    return State(config, v, torch.zeros_like(v, dtype=torch.int64), uniform, np.random.default_rng(config.seed))


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """An action of the policy in states `obs` `[B]`: the most likely one, or with `explore`, a sampled one."""
    policy = state.probabilities[obs]
    return tabular.sample(policy, state.rng) if explore else policy.argmax(-1), {}, carry


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """v(s_t) ← v(s_t) + α (G_t − v(s_t)) for the visits of the concatenated episodes of `batch` `[1, N]`."""
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
    """Sample episodes, average their returns (S&B p. 92). `policy` `[S, A]`, if given, replaces `config.policy`."""
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
    """The evaluation metric: √ mean (v − v_π)², v_π being the exact values of the same policy."""
    policy = tabular.policy_table(env, state.config.policy, state.config.gamma)
    exact = bellman.policy_value(env, policy, state.config.gamma)
    return "rms_error", tabular.root_mean_square(env, state.v, exact)


def picture(state: State, env: MDP) -> str:
    """The learned values and the evaluated policy, side by side."""
    return render.text(env, state.v, state.probabilities)
