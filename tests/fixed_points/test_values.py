"""DQN and Rainbow with tables, acting at random: what they settle at, and Q* by exact iteration.

Rewards are small, so that no error of a sample reaches where Huber's loss is no longer quadratic: beyond it DQN's fixed
point is not a mean. n-step targets are not corrected for who acted (nor are Rainbow's): their fixed point is that of
n - 1 steps of the behavior, then of the best action, and is solved as such. The mean of quantiles is that of the return
only where nothing is drawn: there the MDP is deterministic. Noisy layers are left out: they are no tables.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from foresight.algorithms.value import dqn, rainbow
from foresight.envs.tabular.mdp import MDP
from tests.fixed_points import mdps
from tests.sabotage import change, sabotaged_by

GAMMA = 0.8
COMMON: dict[str, Any] = {
    "steps": 20_000, "num_envs": 64, "rollout_steps": 4, "learning_starts": 1_000, "train_every": 40, "batch_size": 512,
    "learning_rate": 0.02, "target_every": 320, "hidden": (), "gamma": GAMMA,
}  # fmt: skip
FAR = 0.12  # a bound that no table leaves in the second half


def bounded_mdp(seed: int, forbidden: int, drawn: bool) -> MDP:
    mdp = mdps.random_mdp(seed, forbidden=forbidden)
    mdp = dataclasses.replace(mdp, reward=0.3 * mdp.reward)
    if drawn:
        return mdp
    likeliest = torch.nn.functional.one_hot(mdp.prob.argmax(-1), mdp.prob.shape[-1]).double()
    return dataclasses.replace(mdp, prob=likeliest)


def n_step_optimum(mdp: MDP, n: int) -> Tensor:
    """Q = (T_μ)ⁿ⁻¹ T* Q, μ uniform: with n = 1 it is Q*."""
    behavior, chain = mdp.uniform(), mdps.transition(mdp)
    reward = torch.where(behavior > 0, mdp.reward, 0.0)
    values = torch.zeros(mdp.states, dtype=torch.float64)
    for _ in range(300):
        q = reward + GAMMA * chain @ values
        for _ in range(n - 1):
            q = reward + GAMMA * chain @ (behavior * q).sum(1)
        values = q.masked_fill(behavior == 0, -torch.inf).amax(1)
    return q


def problem(options: dict[str, Any], forbidden: int, drawn: bool) -> tuple[MDP, mdps.Tabled]:
    mdp = bounded_mdp(1, forbidden, drawn)
    limit = 7 if options.get("n_steps", 1) == 1 else None  # it would make some transitions shorter
    return mdp, mdps.Tabled(mdp, COMMON["num_envs"], limit)


@functools.cache
def halfway(module: Any, options: tuple[tuple[str, Any], ...], forbidden: int, drawn: bool) -> Any:
    """The State after half of the steps."""
    _, env = problem(dict(options), forbidden, drawn)
    config = module.Config(**{**COMMON, **dict(options), "steps": COMMON["steps"] // 2})
    *_, (_, _, state) = module.train(config, env)
    return state


def learned(module: Any, options: dict[str, Any], forbidden: int, drawn: bool) -> Tensor:
    """The mean of Q over the second half, in which the rate is lower and Q stays near the solution.

    A twin begins halfway, as the sound test did, and must leave it.
    """
    mdp, env = problem(options, forbidden, drawn)
    state = copy.deepcopy(halfway(module, tuple(options.items()), forbidden, drawn))
    state.config = module.Config(**{**COMMON, **options})
    state.optimizer.param_groups[0]["lr"] *= 0.25
    exact, real, seen = n_step_optimum(mdp, options.get("n_steps", 1)), mdps.allowed(mdp), []
    for _, _, now in module.train(state.config, env, state):
        with torch.no_grad():
            seen.append(now.network(mdps.observations(mdp)).mean().double())
        torch.testing.assert_close(seen[-1][real], exact[real], atol=FAR, rtol=0)
    return torch.stack(seen).mean(0)


def check(module: Any, options: dict[str, Any], forbidden: int, drawn: bool = True) -> None:
    mdp, n = bounded_mdp(1, forbidden, drawn), options.get("n_steps", 1)
    found = learned(module, options, forbidden, drawn)
    real = mdps.allowed(mdp)
    exact = n_step_optimum(mdp, n)
    if n == 1:
        best = mdps.action_values(mdp, mdps.optimal_values(mdp, GAMMA), GAMMA)
        torch.testing.assert_close(exact[real], best[real])
    torch.testing.assert_close(found[real], exact[real], atol=0.03, rtol=0)


RANDOM = {"epsilon_start": 1.0, "epsilon_end": 1.0}
DQN = [
    ({}, 0, True),
    ({"double": True, "dueling": True}, 1, True),
    ({"n_steps": 3}, 0, True),
    ({"target_every": 1, "tau": 0.1, "double": True}, 1, True),
    ({"values": "atoms", "value_range": (-2.0, 2.0), "learning_rate": 0.05}, 0, True),
    ({"values": "quantiles", "atoms": 11}, 0, False),
]


@sabotaged_by("foresight.data.replay.Replay.gather", change("gamma", lambda g: 0.9 * g))
@pytest.mark.parametrize(("options", "forbidden", "drawn"), DQN, ids=["plain", "double", "n", "tau", "c51", "qr"])
def test_dqn_settles_at_the_optimal_values(options: dict[str, Any], forbidden: int, drawn: bool) -> None:
    check(dqn, {**RANDOM, **options}, forbidden, drawn)


@sabotaged_by("foresight.data.replay.Replay.gather", change("gamma", lambda g: 0.9 * g))
@pytest.mark.parametrize(
    ("options", "forbidden"),
    [({"n_steps": 3}, 0), ({"n_steps": 1}, 1), ({"n_steps": 1, "priority_exponent": 0.0, "dueling": False}, 0)],
    ids=["n", "mask", "uniform"],
)
def test_rainbow_settles_at_the_optimal_values(options: dict[str, Any], forbidden: int) -> None:
    """Priorities with their whole correction, without which drawn outcomes would count by how they surprise."""
    fixed = {"sigma": None, "epsilon": 1.0, "priority_correction": 1.0, "value_range": (-2.0, 2.0)}
    check(rainbow, {**fixed, "learning_rate": 0.05, **options}, forbidden)
