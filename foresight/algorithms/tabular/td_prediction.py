"""TD prediction: Sutton (1988), Sutton & Barto (2018) sections 6.1 and 7.1.

Objective: v_π, the values of a fixed policy. The value of the state n steps back is updated toward the n rewards since
then plus the value of the state reached:

    v(s_t) ← v(s_t) + α [r_{t+1} + γ r_{t+2} + ... + γⁿ v(s_{t+n}) − v(s_t)]

n = 1 is TD(0): v(s) ← v(s) + α [r + γ v(s') − v(s)]. n beyond the length of an episode is constant-α Monte Carlo. An
intermediate n is best: the U-shaped curves of S&B's figure 7.2 (`foresight reproduce sutton-barto`).

Kept: the online form, in which a state is updated n steps late; the error against the exact v_π, computed from the MDP.
A time limit ends the episode, but the target still bootstraps from its last state. Left out: off-policy prediction
(S&B section 7.3); the mixture of all n (`td_lambda`).
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
from foresight.planning.dynamic import bellman
from foresight.training import tabular, tabular_kernels
from foresight.training.tabular_kernels import Floats

KIND = "tabular"
UNIT = "env steps"
METRICS = ("rms_error", "return", "td_error")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of TD prediction."""

    steps: int = 100_000  # env steps
    seed: int = 0  # seeds the sampled actions and transitions
    gamma: float = 0.99  # discount per action
    n_steps: int = 1  # rewards before the bootstrap; 1 is TD(0)
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
    return State(config, v, torch.zeros_like(v, dtype=torch.int64), uniform, tabular.start(config.seed, config.n_steps))


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """An action of the policy in states `obs` `[B]`: the most likely one, or with `explore`, a sampled one."""
    policy = state.probabilities[obs]
    return tabular.sample(policy, state.actor.rng) if explore else policy.argmax(-1), {}, carry


@tabular_kernels.compiled
def target(reward: float, discount: float, v: Floats, next_state: int) -> float:
    """r_1 + γ r_2 + ... + γⁿ v(s_n); `reward`: discounted sum of the n rewards, `discount`: γⁿ (S&B eq. 7.1)."""
    return reward + discount * v[next_state]


@tabular_kernels.compiled
def act_and_update(*args: Any) -> tabular_kernels.Predicted:
    """Follow the policy, and update v(s) ← v(s) + α [target − v(s)]: `tabular_kernels.predict` with this `target`."""
    return tabular_kernels.predict(target, args)


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu", policy: Tensor | None = None
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Follow the policy and update n steps late (S&B p. 144). `policy` `[S, A]`, if given, replaces `config.policy`."""
    tables = tabular.Tables(env, config.gamma)
    state = state or build(config, env.spaces, device)
    state.probabilities = tabular.policy_table(tables.mdp, config.policy, config.gamma, policy).to(device)
    exact = bellman.policy_value(tables.mdp, state.probabilities.cpu(), config.gamma)
    while tabular.unfinished(state):
        metrics = tabular.predict(tables, state, state.probabilities, act_and_update)
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
