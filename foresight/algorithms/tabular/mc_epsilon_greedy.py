"""MC ε-greedy: on-policy Monte Carlo control, Sutton & Barto (2018) section 5.4.

Objective: alternately q_π(s, a) of an ε-greedy policy π, and π made ε-greedy with respect to q:

    G_t = r_{t+1} + γ G_{t+1}        q(s_t, a_t) ← q(s_t, a_t) + α (G_t − q(s_t, a_t))
    π(a|s) = 1 − ε + ε / A for the best action, ε / A for the others

Exploration visits every pair again and again, without exploring starts. In exchange, the policy converges to the best
of the ε-soft policies, not to the optimal policy.

Kept: first or every visit; a constant α, or means with `alpha_power` 1 (S&B p. 101); `improve_every` episodes between
improvements, 1 in S&B. Left out: off-policy Monte Carlo control (S&B section 5.7); schedules of ε.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foresight.data.trajectory import Trajectory
from foresight.envs.base import Spaces
from foresight.envs.tabular import render
from foresight.envs.tabular.mdp import MDP
from foresight.ops import targets
from foresight.training import tabular

KIND = "tabular"
UNIT = "episodes"
METRICS = ("return", "length")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of MC ε-greedy."""

    steps: int = 100_000  # episodes
    seed: int = 0  # seeds the sampled episodes
    gamma: float = 0.99  # discount per action
    first_visit: bool = True  # count only the first visit of a pair in an episode, not every visit
    alpha: float = 0.01  # step size; α / m^alpha_power at the m-th visit of a pair
    alpha_power: float = 0.0  # 0: returns of newer policies have more weight; 1, with α 1: the mean of all returns
    epsilon: float = 0.1  # probability of a random action
    initial: float = 0.0  # initial action values
    improve_every: int = 10  # episodes between improvements of the policy; 1 in S&B p. 101
    max_episode_steps: int = 1_000  # actions after which an episode is truncated


@dataclass
class State:
    """The table."""

    config: Config
    q: Tensor  # q [S, A] float64
    visits: Tensor  # number of returns of each pair [S, A]
    rng: np.random.Generator
    step: int = 0

    @property
    def values(self) -> Tensor:
        """max_a q(s, a) `[S]`."""
        return self.q.amax(1)

    @property
    def policy(self) -> Tensor:
        """The greedy action `[S]`."""
        return self.q.argmax(1)


def build(config: Config, spaces: Spaces, device: str = "cpu") -> State:
    """q = `initial` for the S states and A actions of `spaces`.

    Raises UserError for spaces that are not finite, and for hyperparameters out of range.
    """
    tabular.check(config)
    q = torch.full(tabular.sizes(spaces), config.initial, dtype=torch.float64, device=device)
    return State(config, q, torch.zeros_like(q, dtype=torch.int64), np.random.default_rng(config.seed))


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """The greedy action in states `obs` `[B]`; with `explore`, one sampled from the ε-greedy policy."""
    q = state.q[obs]
    if explore:
        return tabular.sample(targets.epsilon_greedy(q, state.config.epsilon), state.rng), {}, carry
    return q.argmax(-1), {}, carry


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """q(s_t, a_t) ← q(s_t, a_t) + α (G_t − q(s_t, a_t)) for the concatenated episodes of `batch` `[1, N]`."""
    config = state.config
    pair = batch.obs[0] * state.q.shape[1] + batch.action[0]
    target = targets.monte_carlo(batch.reward, batch.discount, batch.cut)[0]
    if config.first_visit:
        first = tabular.first_visits(pair, batch.cut[0])
        pair, target = pair[first], target[first]
    tabular.move_all(state.q, state.visits, pair, target, config)
    ended = float(batch.cut.sum())
    state.step += int(ended)
    return {"return": float(batch.reward.sum()) / ended, "length": batch.cut.shape[1] / ended}


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Sample episodes of the ε-greedy policy, average their returns, improve the policy (S&B p. 101)."""
    tables = tabular.Tables(env, config.gamma)
    state = state or build(config, env.spaces, device)
    state.q.masked_fill_(tables.forbidden.to(state.q.device), -torch.inf)
    while state.step < config.steps:
        count = min(config.improve_every, config.steps - state.step)
        policy = targets.epsilon_greedy(state.q, config.epsilon)
        batch = tabular.episodes(tables, policy, count, config.max_episode_steps, state.rng)
        metrics = update(state, batch)
        yield state.step, metrics, state


def picture(state: State, env: MDP) -> str:
    """The learned values of the greedy policy and its arrows, side by side."""
    return render.text(env, state.values, state.policy)
