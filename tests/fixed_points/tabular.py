"""What tabular algorithms must converge to, by linear solves, and what a run converges to.

The MDPs have rewards by outcome, discounts of their own between 0 and 1, and, where a case asks for it, forbidden
actions and a time limit. Learning from samples is compared by the mean of the tables over the second half of a run,
which has less noise than the last one. Each algorithm's test is in `tests/algorithms/tabular`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresight.envs.tabular.mdp import MDP
from tests.fixed_points import mdps

DECAYING = {"alpha": 1.0, "alpha_power": 0.8}
SELDOM = {**DECAYING, "yield_every": 5_000}  # with decaying steps tables change slowly: few have the mean of all
# Control by one-step targets: fields, forbidden actions, time limit.
CONTROL: list[tuple[dict[str, Any], int, int | None]] = [
    ({"steps": 1_500_000, **SELDOM}, 0, None),
    ({"gamma": 0.9, "epsilon": 0.5, "steps": 500_000, **SELDOM}, 1, 3),
    ({"gamma": 1.0, "epsilon": 1.0, "steps": 500_000, **SELDOM}, 1, None),
]


def env(seed: int, forbidden: int = 0, time_limit: int | None = None, ends: float = 0.25) -> MDP:
    """A random MDP whose rewards and whose own discount depend on the outcome."""
    mdp, rng = mdps.random_mdp(seed, ends=ends, forbidden=forbidden), np.random.default_rng(seed)
    noise = torch.from_numpy(rng.uniform(-0.5, 0.5, mdp.prob.shape))
    noise -= (mdp.prob * noise).sum(-1, keepdim=True)
    assert mdp.discount is not None
    return dataclasses.replace(
        mdp,
        outcome_reward=mdp.reward.unsqueeze(-1) + noise,
        discount=mdp.discount * torch.from_numpy(rng.uniform(0.8, 1.0, mdp.prob.shape)),
        time_limit=time_limit,
    )


def name(x: Any) -> str | None:
    """The name of a case: its fields, but not how long it runs."""
    if isinstance(x, dict):
        return (
            "-".join(f"{key}={value}" for key, value in x.items() if key not in ("steps", "yield_every")) or "default"
        )
    return None


def converged(module: Any, mdp: MDP, table: str, fields: dict[str, Any], **options: Any) -> tuple[Tensor, Any]:
    """`(the mean of state.<table> over the second half of the run, the last state)`."""
    config = module.Config(**fields)
    kept, count = torch.zeros(()), 0
    for step, _, state in module.train(config, mdp, **options):
        if 2 * step > config.steps:
            kept, count = kept + getattr(state, table), count + 1
    mean = kept / count
    return (mean.mean(0) if mean.ndim == 3 else mean), state


def optimal_q(mdp: MDP, gamma: float) -> Tensor:
    """Q* `[S, A]`."""
    return mdps.action_values(mdp, mdps.optimal_values(mdp, gamma), gamma)


def epsilon_soft_q(mdp: MDP, gamma: float, epsilon: float) -> Tensor:
    """Q of the best ε-soft policy, which is ε-greedy for its own Q (S&B section 5.4), by policy iteration."""
    policy = mdp.uniform()
    for _ in range(100):
        q = mdps.action_values(mdp, mdps.policy_values(mdp, policy, gamma), gamma)
        policy = (1 - epsilon) * torch.eye(mdp.actions).double()[q.argmax(1)] + epsilon * mdp.uniform()
    return q


def planned(module: Any, fields: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """`(values found, values of the policy found, V*)` of planning with the model, on three MDPs."""
    for seed in range(3):
        mdp, config = env(seed, forbidden=seed), module.Config(**fields)
        *_, (_, _, state) = module.train(config, mdp)
        chosen = torch.eye(mdp.actions).double()[state.policy]
        best = mdps.optimal_values(mdp, config.gamma)
        yield state.values, mdps.policy_values(mdp, chosen, config.gamma), best


def predicted(
    module: Any, fields: dict[str, Any], forbidden: int, time_limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """`(V found, V exact)` of the uniform policy, or of a random one if an action is forbidden.

    A time limit changes nothing where an algorithm bootstraps.
    """
    mdp, gamma = env(1, forbidden, time_limit), module.Config(**fields).gamma
    policy = mdps.random_policy(mdp, 1) if forbidden else mdp.uniform()
    options = {"policy": policy} if forbidden else {}
    found, _ = converged(module, mdp, "v", fields, **options)
    return found, mdps.policy_values(mdp, policy, gamma)


def controlled(
    module: Any, fields: dict[str, Any], forbidden: int, time_limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """`(Q found, Q of the best ε-soft policy)` of on-policy control."""
    config, mdp = module.Config(**fields), env(1, forbidden, time_limit)
    return converged(module, mdp, "q", fields)[0], epsilon_soft_q(mdp, config.gamma, config.epsilon)
