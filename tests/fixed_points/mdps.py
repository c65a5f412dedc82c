"""Small random MDPs, the same sampled through one-hot observations, and their exact values by linear solves.

Nothing here uses `foresight.planning` or `foresight.ops`: these are the definitions that the rest is compared with.
All tables are float64: a policy `[S, A]`, values `[S]`, action values `[S, A]`. An action that is not allowed has the
reward -inf in the MDP, probability 0 in a policy and the action value -inf.
"""

from __future__ import annotations

from typing import Any

import gymnasium.spaces as gs
import numpy as np
import torch
from torch import Tensor

from foresight.envs.base import Feedback, Spaces
from foresight.envs.tabular.mdp import MDP, TableEnv


def random_mdp(seed: int, states: int = 4, actions: int = 3, ends: float = 0.1, forbidden: int = 0) -> MDP:
    """Dirichlet(1) transitions to all states, rewards U[-1, 1], `ends` the mean probability of termination a step.

    In every state `forbidden` actions, other ones in each state, are not allowed. Episodes begin anywhere.
    """
    rng = np.random.default_rng(seed)
    prob = rng.dirichlet(np.ones(states), (states, actions))
    stop = rng.uniform(0, 2 * ends, (states, actions, 1))
    reward = rng.uniform(-1, 1, (states, actions))
    for s in range(states):
        reward[s, (s + np.arange(forbidden)) % actions] = -np.inf
    shape = (states, actions, states)
    return MDP(
        name="RandomMDP",
        next_state=torch.arange(states, dtype=torch.int32).expand(states, actions, states).repeat(1, 1, 2),
        prob=torch.from_numpy(np.concatenate([prob * (1 - stop), prob * stop], -1)),
        reward=torch.from_numpy(reward),
        start=torch.full((states,), 1 / states, dtype=torch.float64),
        discount=torch.cat([torch.ones(shape), torch.zeros(shape)], -1).double(),
    )


def random_policy(mdp: MDP, seed: int) -> Tensor:
    """Dirichlet(1) over the actions that are allowed, mixed with a little of the uniform policy. `[S, A]`."""
    draw = torch.from_numpy(np.random.default_rng(seed).exponential(size=(mdp.states, mdp.actions)))
    draw = draw.masked_fill(~allowed(mdp), 0.0)
    return 0.9 * draw / draw.sum(1, keepdim=True) + 0.1 * mdp.uniform()


def allowed(mdp: MDP) -> Tensor:
    """`[S, A]` bool."""
    return mdp.reward.isfinite()


def transition(mdp: MDP) -> Tensor:
    """P(s', and the episode continues | s, a), `[S, A, S]`."""
    weight = mdp.prob if mdp.discount is None else mdp.prob * mdp.discount
    found = torch.zeros(mdp.states, mdp.actions, mdp.states, dtype=torch.float64)
    return found.scatter_add(2, mdp.next_state.long(), weight)


def policy_values(mdp: MDP, policy: Tensor, gamma: float, bonus: Tensor | None = None) -> Tensor:
    """V^π `[S]`: (I - γ P_π) V = r_π + `bonus` (`[S]`, earned wherever a state is left, such as its entropy)."""
    reward = torch.where(policy > 0, policy * mdp.reward, 0.0).sum(1)
    chain = torch.einsum("sa,sat->st", policy, transition(mdp))
    system = torch.eye(mdp.states, dtype=torch.float64) - gamma * chain
    return torch.linalg.solve(system, reward if bonus is None else reward + bonus)


def action_values(mdp: MDP, values: Tensor, gamma: float) -> Tensor:
    """r(s, a) + γ Σ P(s'|s, a) V(s'), `[S, A]`: Q^π of V^π, Q* of V*."""
    return mdp.reward + gamma * transition(mdp) @ values


def beside(exact: Tensor, wrong: float) -> Tensor:
    """The table `exact` `[N, M]`, wrong by ±`wrong` in turn; what is not finite becomes 0."""
    sign = 1 - 2 * (torch.arange(exact.shape[0]).unsqueeze(1) + torch.arange(exact.shape[1])) % 2
    return torch.where(exact.isfinite(), exact + wrong * sign, 0.0)


def optimal_values(mdp: MDP, gamma: float) -> Tensor:
    """V* `[S]`, by policy iteration: every policy that it passes is solved exactly."""
    policy = mdp.uniform()
    for _ in range(100):
        values = policy_values(mdp, policy, gamma)
        policy = torch.eye(mdp.actions, dtype=torch.float64)[action_values(mdp, values, gamma).argmax(1)]
    return values


def entropy(policy: Tensor) -> Tensor:
    """-Σ π log π in nats, `[S]`."""
    return -torch.special.xlogy(policy, policy).sum(1)


def soft_policy_values(mdp: MDP, policy: Tensor, gamma: float, alpha: float) -> Tensor:
    """Soft V^π `[S]`: entropy earns α a nat, also in the state where it is counted from (Haarnoja et al. 2018)."""
    return policy_values(mdp, policy, gamma, alpha * entropy(policy))


def soft_optimal_values(mdp: MDP, gamma: float, alpha: float) -> Tensor:
    """The greatest soft values `[S]`, by soft policy iteration, each policy of which is solved exactly."""
    policy = mdp.uniform()
    for _ in range(100):
        values = soft_policy_values(mdp, policy, gamma, alpha)
        policy = torch.softmax(action_values(mdp, values, gamma) / alpha, 1)
    return values


def observations(mdp: MDP) -> Any:
    """What `Tabled` shows in each of the states: one-hot `[S, S]`, in a dict with masks where actions are forbidden."""
    return _see(mdp, torch.arange(mdp.states))


class Even:
    """Draws of U[0, 1): those of equal `group` fall one into each of as many equal parts, in random order.

    Every draw by itself is uniform, whatever was drawn before; but the share of an outcome among environments in the
    same state that take the same action is off by one at most.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.group = rng, np.zeros(0, np.int64)

    def random(self, count: int) -> np.ndarray:
        drawn, group = self.rng.random(count), self.group
        self.group = group[:0]  # of one call only
        if len(group) != count:
            return drawn
        order = np.lexsort((self.rng.random(count), group))
        _, first, size = np.unique(group[order], return_index=True, return_counts=True)
        drawn[order] = (np.arange(count) - first.repeat(size) + drawn[order]) / size.repeat(size)
        return drawn


class Tabled:
    """An `envs.base.Env`: an MDP, sampled, with its states shown as one-hot vectors.

    Where it forbids actions, observations are dicts with an `action_mask`. A `time_limit` cuts episodes, but ends none.
    Outcomes are drawn evenly, so that fewer environments have as little noise.
    """

    def __init__(self, mdp: MDP, num_envs: int = 64, time_limit: int | None = None) -> None:
        self.mdp, self.num_envs, self.name = mdp, num_envs, mdp.name
        self._env = TableEnv(mdp, num_envs, time_limit)
        state: gs.Space[Any] = gs.Box(0, 1, (mdp.states,), np.float32)
        if not allowed(mdp).all():
            state = gs.Dict({"state": state, "action_mask": gs.MultiBinary(mdp.actions)})
        self.spaces = Spaces(state, gs.Discrete(mdp.actions))

    def reset(self, seed: int) -> Any:
        """Start all environments."""
        obs = self._env.reset(seed)
        self._env._rng = self._draws = Even(self._env._rng)  # type: ignore[assignment]
        return _see(self.mdp, obs)

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B]` in every environment."""
        self._draws.group = self._env._state * self.mdp.actions + action.numpy()
        feedback = self._env.step(action)
        obs = _see(self.mdp, feedback.obs)
        same = feedback.final_obs is feedback.obs
        return feedback._replace(obs=obs, final_obs=obs if same else _see(self.mdp, feedback.final_obs))

    def render(self) -> None:
        """Nothing to see."""

    def close(self) -> None:
        """Nothing to free."""


def _see(mdp: MDP, state: Tensor) -> Any:
    shown = torch.eye(mdp.states)[state]
    mask = allowed(mdp)
    return shown if mask.all() else {"state": shown, "action_mask": mask.to(torch.int8)[state]}
