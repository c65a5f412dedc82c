"""Double Q-learning: van Hasselt (2010), Sutton & Barto (2018) section 6.7.

Objective: q* as in Q-learning, without its maximization bias: the maximum of noisy estimates is too high on average,
because the same estimates select the action and evaluate it. Here a fair coin chooses the table i that is updated, and
the other table j evaluates the action that i selects:

    q_i(s, a) ← q_i(s, a) + α [r + γ q_j(s', argmax_a' q_i(s', a')) − q_i(s, a)]

Kept: two tables; the behavior policy is ε-greedy with respect to their sum; the target averages over equally good
actions of table i. Left out: schedules of ε.
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
    """Hyperparameters of Double Q-learning."""

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
    q: Tensor  # q_0 and q_1 [2, S, A] float64
    visits: Tensor  # updates of each entry [2, S, A]
    actor: tabular.ActorState
    step: int = 0

    @property
    def values(self) -> Tensor:
        """max_a of the mean of q_0 and q_1 `[S]`."""
        return self.q.mean(0).amax(1)

    @property
    def policy(self) -> Tensor:
        """The greedy action `[S]`."""
        return self.q.mean(0).argmax(1)


def build(config: Config, spaces: Spaces, device: str = "cpu") -> State:
    """q_0 = q_1 = `initial` for the S states and A actions of `spaces`.

    Raises UserError for spaces that are not finite, and for hyperparameters out of range.
    """
    tabular.check(config)
    states, actions = tabular.sizes(spaces)
    q = torch.full((2, states, actions), config.initial, dtype=torch.float64, device=device)
    return State(config, q, torch.zeros_like(q, dtype=torch.int64), tabular.start(config.seed))


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """The greedy action in states `obs` `[B]` for q_0 + q_1; with `explore`, one sampled from the ε-greedy policy."""
    q = state.q.sum(0)[obs]
    if explore:
        return tabular.sample(targets.epsilon_greedy(q, state.config.epsilon), state.actor.rng), {}, carry
    return q.argmax(-1), {}, carry


@tabular_kernels.compiled
def target(
    reward: float, discount: float, q: Floats, table: int, next_state: int, next_action: int, epsilon: float
) -> float:
    """r + γ q_j(s', argmax_a' q_i(s', a')), where i is `table`; the mean over ties of the argmax (S&B eq. 6.10)."""
    selects, evaluates = q[table, next_state], q[1 - table, next_state]
    highest, total, ties = selects.max(), 0.0, 0
    for a in range(len(selects)):
        if selects[a] == highest:
            total += evaluates[a]
            ties += 1
    return reward + discount * (total / ties)


@tabular_kernels.compiled
def act_and_update(*args: Any) -> tabular_kernels.Controlled:
    """Act, and update q(s, a) ← q(s, a) + α [target − q(s, a)]: `tabular_kernels.control` with this `target`."""
    return tabular_kernels.control(target, tabular_kernels.UPDATE_FIRST, args)


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Act, and update on (s, a, r, s') before the next action is chosen (S&B p. 136)."""
    tables = tabular.Tables(env, config.gamma)
    state = state or build(config, env.spaces, device)
    while tabular.unfinished(state):
        metrics = tabular.control(tables, state, act_and_update)
        yield state.step, metrics, state


def picture(state: State, env: MDP) -> str:
    """The learned values of the greedy policy and its arrows, side by side."""
    return render.text(env, state.values, state.policy)
