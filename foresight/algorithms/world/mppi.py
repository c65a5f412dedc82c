"""Model predictive path integral control in the true simulator, Williams et al. 2017 (arXiv:1707.02342).

    plan  a_{t:t+H} ~ N(μ, σ²),   w_i ∝ exp(τ (R_i - max R)),   μ ← Σ_i w_i a_i,   σ² ← Σ_i w_i (a_i - μ)²
    act   a_t = first μ of the last iteration; the rest of μ is where the next step begins

where R is the sum of rewards over H steps and the sums are over the elites. It differs from the cross-entropy method
(`cem`) in these weights. Planning only: nothing is trained; see `cem`.

What is kept: weights by exponentiated return, the warm start. What is from TD-MPC2 (arXiv:2310.16828): the σ is fitted
too, within bounds, several iterations, and only the elites count. The original keeps σ fixed, has one iteration and all
candidates are elites: `iterations` 1, `elites` as many as `candidates`. Left out: the cost of control in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.trajectory import Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Simulator, Spaces, require_num_envs
from foresight.planning.continuous import bounds, cem, simulation

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length")


@dataclass(frozen=True)
class Config:
    """Defaults: own choice, enough for Pendulum-v1; see the presets for tasks."""

    steps: int = 1_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 1  # parallel environments
    horizon: int = 20  # planned steps; H
    candidates: int = 200  # action sequences per iteration
    elites: int = 20  # sequences of the highest return, which are weighted
    iterations: int = 4  # one in the original
    temperature: float = 0.5  # τ, per unit of reward: larger is greedier; TD-MPC2
    min_std: float = 0.05  # of σ; TD-MPC2
    initial_std: float = 1.0  # σ before the first iteration, in units of half the range of actions
    warm_start: bool = True  # begin with the means of the plan before, one step later; else with 0
    threads: int = 1  # of the simulator and torch; 0: one per core


@dataclass
class State:
    """Random numbers and counters."""

    config: Config
    generator: torch.Generator
    step: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones
    space: Any = field(default=None, metadata={"save": False})  # of actions
    simulator: Simulator | None = field(default=None, metadata={"save": False})


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """The State. Raises UserError for actions that are not bounded, and environments that cannot be simulated."""
    _check(config)
    bounds.width(spaces.action)
    simulator = simulation.simulator(spaces)
    generator = torch.Generator().manual_seed(config.seed)
    return State(config, generator, space=spaces.action, simulator=simulator)


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """The first action of a plan for every row of `obs`; the carry are the means of the rest of the plan."""
    assert state.simulator is not None
    config = state.config
    root = state.simulator.root(trees.to(obs, "cpu"))
    start = cem.initial(len(root), config.horizon, bounds.width(state.space), config.initial_std)
    if carry is not None and config.warm_start:
        start = start._replace(mean=carry["mean"])
    score = simulation.score(state.simulator, root, state.space)
    between = (config.min_std, max(config.min_std, config.initial_std))
    plan, _, _ = cem.mppi(
        score, start, config.candidates, config.elites, config.iterations, state.generator, config.temperature, between
    )
    return bounds.to_env(plan.mean[:, 0], state.space), {}, {"mean": cem.shifted(plan, config.initial_std).mean}


def reset_carry(carry: Tree, cut: Tensor) -> Tree:
    """The carry with the rows set to zero where an episode was cut."""
    return trees.reset_carry(carry, cut)


def update(state: State, steps: int) -> dict[str, float]:
    """Count `steps` env steps; nothing is trained."""
    state.step += steps
    return state.episodes.metrics()


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """A whole episode of every environment at a time, until `steps`."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    while state.step < config.steps:
        seed = config.seed + state.step
        for segment in collect.whole_episodes(env, seed, lambda *seen: act(state, *seen), state.episodes):
            metrics = update(state, segment.trajectory.reward.numel())
        yield state.step, metrics, state


def _check(config: Config) -> None:
    errors.at_least(1, config, "num_envs", "horizon", "candidates", "elites", "iterations")
    cem.require_elites(config.candidates, config.elites)
    if not config.initial_std > 0:
        raise errors.UserError(f"initial_std must be above 0, not {config.initial_std}.")
    errors.at_least(0, config, "temperature", "min_std")
    if config.temperature == math.inf:
        raise errors.UserError("temperature must be finite: the largest weights the best elite alone.")
