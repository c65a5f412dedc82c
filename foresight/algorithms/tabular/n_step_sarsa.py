"""n-step Sarsa: Sutton & Barto (2018) section 7.2.

Objective: q_π(s, a) of the ε-greedy policy π that is followed, with targets of n rewards and then a bootstrap:

    q(s_t, a_t) ← q(s_t, a_t) + α [r_{t+1} + γ r_{t+2} + ... + γⁿ q(s_{t+n}, a_{t+n}) − q(s_t, a_t)]

n = 1 is Sarsa, n beyond the length of an episode is Monte Carlo. A reward reaches the n preceding pairs at once.

Kept: a pair is updated n steps late; at the end of the episode, the pending pairs use the rewards up to there. Left
out: off-policy forms with importance weights, tree backup and Q(σ) (S&B sections 7.3 to 7.6).
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
    """Hyperparameters of n-step Sarsa."""

    steps: int = 100_000  # env steps, each of them an update
    seed: int = 0  # seeds the sampled actions and transitions
    gamma: float = 0.99  # discount per action
    alpha: float = 0.1  # step size; α / m^alpha_power at the m-th visit of a pair
    alpha_power: float = 0.0  # 0: constant step size; in (1/2, 1] the values converge (Watkins & Dayan 1992)
    epsilon: float = 0.1  # probability of a random action (S&B §2.2)
    initial: float = 0.0  # initial action values; optimistic values encourage exploration (S&B §2.6)
    episodes: int = 0  # also stop after this many episodes; 0: no limit
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

    Raises UserError for spaces that are not finite, and for hyperparameters out of range.
    """
    tabular.check(config)
    states, actions = tabular.sizes(spaces)
    q = torch.full((states, actions), config.initial, dtype=torch.float64, device=device)
    return State(config, q, torch.zeros_like(q, dtype=torch.int64), tabular.start(config.seed, config.n_steps))


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
    """r_1 + γ r_2 + ... + γⁿ q(s_n, a_n); `reward`: discounted sum of the n rewards, `discount`: γⁿ (S&B eq. 7.4)."""
    return reward + discount * q[table, next_state, next_action]


@tabular_kernels.compiled
def act_and_update(*args: Any) -> tabular_kernels.Controlled:
    """Act, and update q(s, a) ← q(s, a) + α [target − q(s, a)]: `tabular_kernels.control` with this `target`."""
    return tabular_kernels.control(target, tabular_kernels.ACTION_FIRST, args)


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Choose the next action, update the pair n steps back, then act (S&B p. 147)."""
    tables = tabular.Tables(env, config.gamma)
    state = state or build(config, env.spaces, device)
    while tabular.unfinished(state):
        metrics = tabular.control(tables, state, act_and_update)
        yield state.step, metrics, state


def picture(state: State, env: MDP) -> str:
    """The learned values of the greedy policy and its arrows, side by side."""
    return render.text(env, state.values, state.policy)
