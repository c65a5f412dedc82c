"""Sarsa: Rummery & Niranjan (1994), Sutton & Barto (2018) section 6.4.

Objective: q_π(s, a) of the ε-greedy policy π that is followed (on-policy). Each step (s, a, r, s', a') updates

    q(s, a) ← q(s, a) + α [r + γ q(s', a') − q(s, a)]

toward the reward plus the value of the next action *that will be taken*. So the values include the cost of exploration,
and on CliffWalking the agent stays away from the cliff. If ε → 0 slowly enough, q converges to q* (Singh et al. 2000).

Kept: one table, an ε-greedy policy, ties broken at random, step size α or α / m^p. A time limit ends the episode, but
the target still bootstraps from its last state. Left out: schedules of ε; eligibility traces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresight.envs.base import Spaces
from foresight.envs.tabular import render
from foresight.envs.tabular.mdp import MDP
from foresight.ops import targets
from foresight.training import tabular, tabular_kernels
from foresight.training.tabular_kernels import Floats

KIND = "tabular"
UNIT = "env steps"
METRICS = ("return", "length", "td_error")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of Sarsa."""

    steps: int = 100_000  # env steps, each of them an update
    seed: int = 0  # seeds the sampled actions and transitions
    gamma: float = 0.99  # discount per action
    alpha: float = 0.1  # step size; α / m^alpha_power at the m-th visit of a pair
    alpha_power: float = 0.0  # 0: constant step size; in (1/2, 1] the values converge (Watkins & Dayan 1992)
    epsilon: float = 0.1  # probability of a random action (S&B §2.2)
    initial: float = 0.0  # initial action values; optimistic values encourage exploration (S&B §2.6)
    episodes: int = 0  # also stop after this many episodes; 0: no limit
    yield_every: int = 1_000  # env steps between yields; 0: at the end of each episode


@dataclass
class State:
    """The table, and the position in the environment."""

    config: Config
    q: Tensor  # q [S, A] float64
    visits: Tensor  # updates of each pair [S, A]
    actor: tabular.ActorState
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
    states, actions = tabular.sizes(spaces)
    q = torch.full((states, actions), config.initial, dtype=torch.float64, device=device)
    return State(config, q, torch.zeros_like(q, dtype=torch.int64), tabular.start(config.seed))


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """The greedy action in states `obs` `[B]`; with `explore`, one sampled from the ε-greedy policy."""
    q = state.q[obs]
    if explore:
        return tabular.sample(targets.epsilon_greedy(q, state.config.epsilon), state.actor.rng), {}, carry
    return q.argmax(-1), {}, carry


@tabular_kernels.compiled
def target(
    reward: float, discount: float, q: Floats, table: int, next_state: int, next_action: int, epsilon: float
) -> float:
    """r + γ q(s', a'), where a' is the action that will be taken in s' (S&B eq. 6.7)."""
    return reward + discount * q[table, next_state, next_action]


@tabular_kernels.compiled
def act_and_update(*args: Any) -> tabular_kernels.Controlled:
    """Act, and update q(s, a) ← q(s, a) + α [target − q(s, a)]: `tabular_kernels.control` with this `target`."""
    return tabular_kernels.control(target, tabular_kernels.ACTION_FIRST, args)


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Choose a', update on (s, a, r, s', a'), then take a' (S&B p. 130)."""
    tables = tabular.Tables(env, config.gamma)
    state = state or build(config, env.spaces, device)
    while tabular.unfinished(state):
        metrics = tabular.control(tables, state, act_and_update)
        yield state.step, metrics, state


def picture(state: State, env: MDP) -> str:
    """The learned values of the greedy policy and its arrows, side by side."""
    return render.text(env, state.values, state.policy)
