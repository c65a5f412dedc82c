"""n-step Expected Sarsa: Sutton & Barto (2018) section 7.2, eq. 7.7 and 7.8. One file, one method.

Objective: q_π(s, a) of the ε-greedy behavior policy π, from n rewards and the expected value after them:

    q(s_t, a_t) ← q(s_t, a_t) + α [r_{t+1} + γ r_{t+2} + ... + γⁿ Σ_a π(a|s_{t+n}) q(s_{t+n}, a) − q(s_t, a_t)]

n = 1 is Expected Sarsa. The target averages over the last action, so its variance is lower than in n-step Sarsa.

Kept: the n rewards are those of the actions taken. Left out: off-policy forms.

    foresight train examples/n_step_expected_sarsa.py --env CliffWalking-v1 --gamma 1.0
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
    """Defaults: S&B where they give a value."""

    steps: int = 100_000  # env steps, each of them an update
    seed: int = 0
    gamma: float = 0.99  # discount per action
    alpha: float = 0.1  # step size; at the m-th visit of a pair α / m^alpha_power
    alpha_power: float = 0.0  # 0: constant; above 1/2 up to 1: the values converge (Watkins & Dayan 1992)
    epsilon: float = 0.1  # probability of a random action (S&B §2.2)
    initial: float = 0.0  # initial action values; optimistic ones explore (S&B §2.6)
    episodes: int = 0  # stop after this many episodes, if sooner; 0: no limit
    yield_every: int = 1_000  # env steps between yields; 0: at the end of each episode
    n_steps: int = 4  # rewards before the bootstrap (S&B fig. 7.4)


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

    Raises UserError for spaces that are not finite and for values out of range.
    """
    tabular.check(config)
    states, actions = tabular.sizes(spaces)
    q = torch.full((states, actions), config.initial, dtype=torch.float64, device=device)
    return State(config, q, torch.zeros_like(q, dtype=torch.int64), tabular.start(config.seed, config.n_steps))


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """The greedy action in states `obs` `[B]`; ε-greedy if `explore`."""
    q = state.q[obs]
    if explore:
        return tabular.sample(targets.epsilon_greedy(q, state.config.epsilon), state.actor.rng), {}, carry
    return q.argmax(-1), {}, carry


@tabular_kernels.compiled
def target(
    reward: float, discount: float, q: Floats, table: int, next_state: int, next_action: int, epsilon: float
) -> float:
    """r_1 + γ r_2 + ... + γⁿ Σ_a π(a|s_n) q(s_n, a): `reward` is the sum of the n, `discount` is γⁿ."""
    return reward + discount * tabular_kernels.expected(q, next_state, epsilon)


@tabular_kernels.compiled
def act_and_update(*args: Any) -> tabular_kernels.Controlled:
    """Act, and move q(s, a) ← q(s, a) + α [target − q(s, a)]: `tabular_kernels.control` around `target`."""
    return tabular_kernels.control(target, tabular_kernels.UPDATE_FIRST, args)


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Update the pair n steps back, choose the next action, act; until `steps`."""
    tables = tabular.Tables(env, config.gamma)
    state = state or build(config, env.spaces, device)
    while tabular.unfinished(state):
        metrics = tabular.control(tables, state, act_and_update)
        yield state.step, metrics, state


def picture(state: State, env: MDP) -> str:
    """The learned values and the arrows of the greedy policy, side by side."""
    return render.text(env, state.values, state.policy)
