"""MC Exploring Starts: Sutton & Barto (2018) section 5.3.

Objective: q*(s, a), by q(s, a) ← the mean of the returns that followed (s, a), and π greedy with respect to q. Each
episode starts with a random state and a random action, so that every pair is visited although π itself never explores:

    G_t = r_{t+1} + γ G_{t+1}        q(s_t, a_t) ← q(s_t, a_t) + (G_t − q(s_t, a_t)) / n(s_t, a_t)

Kept: means over all returns so far, including those of older policies (S&B p. 99), or with `alpha_power` below 1 means
that weight older returns less; first or every visit; `improve_every` episodes between improvements, 1 in S&B. An
episode that the greedy policy would never end is truncated after `max_episode_steps` actions. Left out: nothing. Where
the start of an episode cannot be chosen, use `mc_epsilon_greedy`.
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
    """Hyperparameters of MC Exploring Starts."""

    steps: int = 100_000  # episodes
    seed: int = 0  # seeds the sampled episodes
    gamma: float = 0.99  # discount per action
    first_visit: bool = True  # count only the first visit of a pair in an episode, not every visit
    alpha: float = 1.0  # step size; α / m^alpha_power at the m-th visit of a pair
    alpha_power: float = 1.0  # 1: the mean of all returns; below 1: returns of newer policies have more weight
    initial: float = 0.0  # initial action values
    improve_every: int = 100  # episodes between improvements of the policy; 1 in S&B p. 99
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
    """The greedy action in states `obs` `[B]`; with `explore`, ties are broken at random."""
    q = state.q[obs]
    return tabular.sample(targets.greedy(q), state.rng) if explore else q.argmax(-1), {}, carry


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """q(s_t, a_t) ← the mean of G_t, over the concatenated episodes of `batch` `[1, N]`."""
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


def starts(pairs: Tensor, count: int, rng: np.random.Generator) -> Tensor:
    """`count` pairs (s, a), sampled uniformly from `pairs` `[P, 2]`."""
    return pairs[torch.from_numpy(rng.integers(len(pairs), size=count)).to(pairs.device)]


def train(
    config: Config, env: MDP, state: State | None = None, device: str = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Sample episodes with exploring starts, average their returns, improve the policy (S&B p. 99)."""
    tables = tabular.Tables(env, config.gamma)
    state = state or build(config, env.spaces, device)
    state.q.masked_fill_(tables.forbidden.to(state.q.device), -torch.inf)
    pairs = tables.pairs.to(state.q.device)
    while state.step < config.steps:
        first = starts(pairs, min(config.improve_every, config.steps - state.step), state.rng)
        batch = tabular.episodes(
            tables, targets.greedy(state.q), len(first), config.max_episode_steps, state.rng, first
        )
        metrics = update(state, batch)
        yield state.step, metrics, state


def picture(state: State, env: MDP) -> str:
    """The learned values of the greedy policy and its arrows, side by side."""
    return render.text(env, state.values, state.policy)
