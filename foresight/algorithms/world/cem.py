"""The cross-entropy method in the true simulator, Rubinstein & Kroese 2004, *The Cross-Entropy Method*.

    plan  a_{t:t+H} ~ N(μ, σ²),   μ, σ ← mean and standard deviation of the elites of  Σ_{k=0..H-1} r_{t+k}
    act   a_t = first mean of the last iteration; the rest of the means is where the next step begins

Planning only: nothing is trained. Candidates are scored by the environment's own dynamics (`envs.control.simulators`),
so this is the ceiling of agents that plan the same way in a learned model. `train` plays `steps` env steps and reports
the returns, so that a run can be compared like any other.

With `iterations` 1 and `elites` 1 it is random shooting: the best of `candidates` random sequences.

Left out: a value after the horizon, discounting, noise that is correlated in time, a floor of σ.
"""

from __future__ import annotations

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
    elites: int = 20  # sequences that the next iteration is fitted to
    iterations: int = 4  # one, with one elite: random shooting
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
    plan = cem.cem(score, start, config.candidates, config.elites, config.iterations, state.generator)
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
