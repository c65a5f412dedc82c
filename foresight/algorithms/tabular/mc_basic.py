"""MC Basic: policy iteration without a model, Zhao, "Mathematical Foundations of Reinforcement Learning" (2025), 5.2.

Objective: alternately q_π(s, a), by sampling instead of the Bellman equation, and π ← greedy with respect to q:

    q(s, a) ← mean of r_1 + γ r_2 + γ² r_3 + ... over episodes that start with (s, a) and follow π
    π(s) ← argmax_a q(s, a)

It is `policy_iteration` with experience in place of the model, and deliberately wasteful: each pair has its own
episodes, and each episode is used for one pair.

Kept: `episodes_per_pair` episodes of at most `max_episode_steps` actions; in a tie, the current action stays. With a
`max_episode_steps` below the distance to the goal, the values of distant states do not include the goal's reward (Zhao,
figures 5.2 and 5.3). Left out: nothing; `mc_exploring_starts` uses each episode for all of its pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from foresight import errors
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Spaces
from foresight.envs.tabular import render
from foresight.envs.tabular.mdp import MDP
from foresight.ops import targets
from foresight.training import tabular

KIND = "tabular"
UNIT = "updates"
METRICS = ("switched", "return", "length")


@dataclass(frozen=True)
class Config:
    """Hyperparameters of MC Basic."""

    steps: int = 20  # maximum number of policy iterations; stops when an improvement changes no action
    seed: int = 0  # seeds the sampled episodes
    gamma: float = 0.9  # discount per action (Zhao section 5.2)
    episodes_per_pair: int = 30  # in each iteration; 1 is enough if environment and policy are deterministic
    max_episode_steps: int = 100  # actions after which an episode is truncated


@dataclass
class State:
    """The table."""

    config: Config
    q: Tensor  # q [S, A] float64
    policy: Tensor  # the action in each state [S]
    rng: np.random.Generator
    stable: bool = False  # the last improvement changed nothing
    step: int = 0

    @property
    def values(self) -> Tensor:
        """max_a q(s, a) `[S]`."""
        return self.q.amax(1)


def build(config: Config, spaces: Spaces, device: str = "cpu") -> State:
    """q = 0 for the S states and A actions of `spaces`.

    Raises UserError for spaces that are not finite, and for hyperparameters out of range.
    """
    errors.at_least(1, config, "episodes_per_pair")
    tabular.check(config)
    q = torch.zeros(tabular.sizes(spaces), dtype=torch.float64, device=device)
    return State(config, q, q.argmax(1), np.random.default_rng(config.seed))


def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """The action of the policy in states `obs` `[B]`."""
    return state.policy[obs], {}, carry


def update(state: State, batch: Trajectory, pairs: Tensor) -> dict[str, float]:
    """q(s, a) ← the mean return of its episodes; π ← greedy. `batch` `[1, N]`: episodes of `pairs` `[P, 2]`, in order.

    An action is replaced only by a better one, otherwise equally good actions may alternate forever.
    """
    target = targets.monte_carlo(batch.reward, batch.discount, batch.cut)[0]
    cut = batch.cut[0].bool()
    starts = torch.cat([torch.ones_like(cut[:1]), cut[:-1]])
    s, a = pairs.T
    state.q[s, a] = target[starts].view(len(pairs), -1).mean(1)
    better = state.q.amax(1) > targets.taken(state.q, state.policy) + 1e-9
    state.policy = torch.where(better, state.q.argmax(1), state.policy)
    state.stable = not bool(better.any())
    state.step += 1
    ended = float(cut.sum())
    averages = {"return": float(batch.reward.sum()) / ended, "length": cut.shape[0] / ended}
    return {"switched": float(better.sum()), **averages}


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Evaluate each pair by episodes, then improve, until no action changes (Zhao, algorithm 5.1)."""
    tables = tabular.Tables(env, config.gamma)
    state = state or build(config, env.spaces, device)
    state.q.masked_fill_(tables.forbidden.to(state.q.device), -torch.inf)
    if state.step == 0:
        state.policy = state.q.argmax(1)
    pairs = tables.pairs.to(state.q.device)
    first = pairs.repeat_interleave(config.episodes_per_pair, 0)
    while state.step < config.steps and not state.stable:
        policy = one_hot(state.policy, state.q.shape[1]).double()
        batch = tabular.episodes(tables, policy, len(first), config.max_episode_steps, state.rng, first)
        metrics = update(state, batch, pairs)
        yield state.step, metrics, state


def picture(state: State, env: MDP) -> str:
    """The sampled values and the policy, side by side."""
    return render.text(env, state.values, state.policy)
