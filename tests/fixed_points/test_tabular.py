"""Every algorithm on tables, run as a whole: what it settles at is compared with a linear solve.

The worlds have rewards by outcome, discounts of their own between 0 and 1, and, where a case says so, actions that are
not allowed and a time limit. Learning from samples is compared by the mean of the tables over the second half of a run,
which has less noise than the last one.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foresight.algorithms.tabular import (
    double_q_learning,
    expected_sarsa,
    mc_basic,
    mc_epsilon_greedy,
    mc_exploring_starts,
    monte_carlo_prediction,
    n_step_sarsa,
    policy_iteration,
    q_learning,
    sarsa,
    soft_value_iteration,
    td_lambda,
    td_prediction,
    truncated_policy_iteration,
    value_iteration,
)
from foresight.envs.tabular.mdp import MDP
from tests.fixed_points import mdps
from tests.sabotage import change, sabotaged_by

DECAYING = {"alpha": 1.0, "alpha_power": 0.8}
Case = tuple[ModuleType, dict[str, Any], int, int | None]


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


def settled(module: Any, mdp: MDP, table: str, fields: dict[str, Any], **options: Any) -> tuple[Tensor, Any]:
    """`(the mean of state.<table> over the second half of the run, the last state)`."""
    config = module.Config(**fields)
    kept, count = torch.zeros(()), 0
    for step, _, state in module.train(config, mdp, **options):
        if 2 * step > config.steps:
            kept, count = kept + getattr(state, table), count + 1
    mean = kept / count
    return (mean.mean(0) if mean.ndim == 3 else mean), state


def near(found: Tensor, exact: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, exact, atol=tolerance, rtol=0)


def name(x: Any) -> str | None:
    if isinstance(x, dict):
        return "-".join(f"{key}={value}" for key, value in x.items() if key not in ("steps", "every")) or "default"
    return x.__name__.split(".")[-1] if isinstance(x, ModuleType) else None


def optimal_q(mdp: MDP, gamma: float) -> Tensor:
    return mdps.action_values(mdp, mdps.optimal_values(mdp, gamma), gamma)


def soft_policy(q: Tensor, epsilon: float, mdp: MDP) -> Tensor:
    """ε-greedy, the ε over the actions that are allowed."""
    return (1 - epsilon) * torch.eye(mdp.actions).double()[q.argmax(1)] + epsilon * mdp.uniform()


def epsilon_soft_q(mdp: MDP, gamma: float, epsilon: float) -> Tensor:
    """Q of the best ε-soft policy, which is ε-greedy for its own Q (S&B section 5.4), by policy iteration."""
    policy = mdp.uniform()
    for _ in range(100):
        q = mdps.action_values(mdp, mdps.policy_values(mdp, policy, gamma), gamma)
        policy = soft_policy(q, epsilon, mdp)
    return q


# --- with the model


PLANNED: list[tuple[ModuleType, dict[str, Any]]] = [
    (value_iteration, {}),
    (value_iteration, {"gamma": 0.8}),
    (value_iteration, {"gamma": 1.0, "yield_every": 7}),
    (policy_iteration, {}),
    (policy_iteration, {"gamma": 0.8, "evaluation": "sweeps"}),
    (policy_iteration, {"gamma": 1.0}),
    (truncated_policy_iteration, {}),
    (truncated_policy_iteration, {"gamma": 0.8, "evaluation_sweeps": 0}),
    (truncated_policy_iteration, {"gamma": 0.95, "span_bounds": True}),
    (truncated_policy_iteration, {"gamma": 1.0, "evaluation_sweeps": 3}),
]


@pytest.mark.parametrize(("module", "fields"), PLANNED, ids=name)
@sabotaged_by("foresight.planning.dynamic.bellman.Sweeps.__init__", change("gamma", lambda gamma: 0.9 * gamma))
def test_planning_finds_the_optimal_values(module: Any, fields: dict[str, Any]) -> None:
    for seed in range(3):
        mdp, config = env(seed, forbidden=seed), module.Config(**fields)
        *_, (_, _, state) = module.train(config, mdp)
        best = mdps.optimal_values(mdp, config.gamma)
        near(state.values, best, 1e-6)
        chosen = torch.eye(mdp.actions).double()[state.policy]
        near(mdps.policy_values(mdp, chosen, config.gamma), best, 1e-9)


@pytest.mark.parametrize(
    "fields", [{}, {"gamma": 0.8, "entropy_temperature": 0.5}, {"gamma": 1.0, "entropy_temperature": 0.0}], ids=name
)
@sabotaged_by("foresight.ops.targets.soft_maximum", change("temperature", lambda alpha: alpha + 0.1))
def test_soft_planning_finds_the_soft_values(fields: dict[str, Any]) -> None:
    config = soft_value_iteration.Config(**fields)
    for seed in range(3):
        mdp = env(seed, forbidden=seed)
        *_, (_, _, state) = soft_value_iteration.train(config, mdp)
        if config.entropy_temperature == 0:
            near(state.values, mdps.optimal_values(mdp, config.gamma), 1e-6)
            continue
        best = mdps.soft_optimal_values(mdp, config.gamma, config.entropy_temperature)
        near(state.values, best, 1e-6)
        q = mdps.action_values(mdp, best, config.gamma)
        near(state.policy, torch.softmax(q / config.entropy_temperature, 1), 1e-4)


# --- the values of a policy, from samples; (module, fields, forbidden actions, time limit)


FOLLOWED: list[Case] = [
    (td_prediction, {"alpha": 0.01, "steps": 2_000_000}, 0, None),
    (td_prediction, {"n_steps": 5, "gamma": 0.9, "steps": 2_000_000, **DECAYING}, 1, 3),
    (td_prediction, {"n_steps": 2, "gamma": 1.0, "steps": 2_000_000, **DECAYING}, 1, None),
    (td_lambda, {"alpha": 0.01, "steps": 2_000_000}, 0, None),
    (td_lambda, {"trace_lambda": 1.0, "replacing": True, "gamma": 0.9, "steps": 2_000_000, **DECAYING}, 1, None),
    (td_lambda, {"trace_lambda": 0.5, "gamma": 1.0, "steps": 2_000_000, **DECAYING}, 1, 3),
    (monte_carlo_prediction, {"steps": 100_000}, 0, None),
    (monte_carlo_prediction, {"first_visit": False, "gamma": 0.9, "steps": 100_000}, 1, None),
    (monte_carlo_prediction, {"alpha": 0.001, "alpha_power": 0.0, "gamma": 1.0, "steps": 100_000}, 1, None),
]


@pytest.mark.learning
@pytest.mark.parametrize(("module", "fields", "forbidden", "time_limit"), FOLLOWED, ids=name)
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_prediction_settles_at_the_values_of_the_policy(
    module: Any, fields: dict[str, Any], forbidden: int, time_limit: int | None
) -> None:
    """Uniform at the default settings, some policy at the others. Bootstrapping, a time limit changes nothing."""
    mdp, gamma = env(1, forbidden, time_limit), module.Config(**fields).gamma
    policy = mdps.random_policy(mdp, 1) if forbidden else mdp.uniform()
    options = {"policy": policy} if forbidden else {}
    found, _ = settled(module, mdp, "v", fields, **options)
    near(found, mdps.policy_values(mdp, policy, gamma), 0.03)


# --- control, from samples


ON_POLICY: list[Case] = [
    (sarsa, {"steps": 3_000_000, **DECAYING}, 0, None),
    (sarsa, {"gamma": 0.9, "epsilon": 0.5, "steps": 2_000_000, **DECAYING}, 1, 3),
    (sarsa, {"gamma": 1.0, "epsilon": 1.0, "steps": 2_000_000, **DECAYING}, 1, None),
    (expected_sarsa, {"steps": 3_000_000, **DECAYING}, 0, None),
    (expected_sarsa, {"gamma": 0.9, "epsilon": 0.5, "steps": 2_000_000, **DECAYING}, 1, 3),
    (expected_sarsa, {"gamma": 1.0, "epsilon": 1.0, "steps": 2_000_000, **DECAYING}, 1, None),
]


@pytest.mark.learning
@pytest.mark.parametrize(("module", "fields", "forbidden", "time_limit"), ON_POLICY, ids=name)
@sabotaged_by("foresight.training.tabular.control", change("walk", lambda _: q_learning.walk))
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_on_policy_control_settles_at_the_best_epsilon_soft_policy(
    module: Any, fields: dict[str, Any], forbidden: int, time_limit: int | None
) -> None:
    _settles_at_the_best_epsilon_soft_policy(module, fields, env(1, forbidden, time_limit))


N_STEP: list[Case] = [
    (n_step_sarsa, {"steps": 3_000_000, **DECAYING}, 0, None),
    (n_step_sarsa, {"n_steps": 2, "gamma": 0.9, "epsilon": 0.5, "steps": 2_000_000, **DECAYING}, 1, 3),
    (n_step_sarsa, {"n_steps": 9, "gamma": 1.0, "epsilon": 1.0, "steps": 2_000_000, **DECAYING}, 1, None),
]


@pytest.mark.learning
@pytest.mark.parametrize(("module", "fields", "forbidden", "time_limit"), N_STEP, ids=name)
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_so_does_n_step_sarsa(module: Any, fields: dict[str, Any], forbidden: int, time_limit: int | None) -> None:
    _settles_at_the_best_epsilon_soft_policy(module, fields, env(1, forbidden, time_limit))


def _settles_at_the_best_epsilon_soft_policy(module: Any, fields: dict[str, Any], mdp: MDP) -> None:
    config = module.Config(**fields)
    found, _ = settled(module, mdp, "q", fields)
    near(found, epsilon_soft_q(mdp, config.gamma, config.epsilon), 0.05)


OFF_POLICY: list[Case] = [
    (q_learning, {"steps": 3_000_000, **DECAYING}, 0, None),
    (q_learning, {"gamma": 0.9, "epsilon": 0.5, "steps": 2_000_000, **DECAYING}, 1, 3),
    (q_learning, {"gamma": 1.0, "epsilon": 1.0, "steps": 2_000_000, **DECAYING}, 1, None),
    (double_q_learning, {"steps": 3_000_000, **DECAYING}, 0, None),
    (double_q_learning, {"gamma": 0.9, "epsilon": 0.5, "steps": 2_000_000, **DECAYING}, 1, 3),
    (double_q_learning, {"gamma": 1.0, "epsilon": 1.0, "steps": 2_000_000, **DECAYING}, 1, None),
]


@pytest.mark.learning
@pytest.mark.parametrize(("module", "fields", "forbidden", "time_limit"), OFF_POLICY, ids=name)
@sabotaged_by("foresight.training.tabular.control", change("walk", lambda _: sarsa.walk))
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_off_policy_control_settles_at_the_optimal_values(
    module: Any, fields: dict[str, Any], forbidden: int, time_limit: int | None
) -> None:
    mdp, config = env(1, forbidden, time_limit), module.Config(**fields)
    found, state = settled(module, mdp, "q", fields)
    exact = optimal_q(mdp, config.gamma)
    near(found, exact, 0.05)
    assert torch.equal(state.policy, exact.argmax(1))


@pytest.mark.learning
@pytest.mark.parametrize(
    ("fields", "forbidden"),
    [
        ({"steps": 200_000, "improve_every": 1_000, **DECAYING}, 0),
        (
            {"gamma": 0.9, "epsilon": 0.5, "first_visit": False, "alpha": 0.005, "steps": 60_000, "improve_every": 100},
            1,
        ),
        ({"gamma": 1.0, "epsilon": 1.0, "steps": 200_000, "improve_every": 1_000, **DECAYING}, 1),
    ],
    ids=name,
)
@sabotaged_by("foresight.ops.targets.epsilon_greedy", change("epsilon", lambda epsilon: abs(epsilon - 0.6)))
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_monte_carlo_control_settles_at_the_best_epsilon_soft_policy(fields: dict[str, Any], forbidden: int) -> None:
    _settles_at_the_best_epsilon_soft_policy(mc_epsilon_greedy, fields, env(1, forbidden))


@pytest.mark.learning
@pytest.mark.parametrize(
    ("fields", "forbidden"),
    [
        ({"steps": 200_000, "improve_every": 1_000, "alpha_power": 0.8}, 0),
        ({"gamma": 0.9, "first_visit": False, "steps": 200_000, "improve_every": 1_000}, 1),
        ({"gamma": 1.0, "alpha": 0.01, "alpha_power": 0.0, "steps": 200_000, "improve_every": 1_000}, 1),
    ],
    ids=name,
)
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
def test_exploring_starts_settle_at_the_optimal_values(fields: dict[str, Any], forbidden: int) -> None:
    mdp, config = env(1, forbidden), mc_exploring_starts.Config(**fields)
    found, _ = settled(mc_exploring_starts, mdp, "q", fields)
    near(found, optimal_q(mdp, config.gamma), 0.05)


@pytest.mark.learning
@pytest.mark.parametrize(
    "fields", [{}, {"gamma": 0.99, "max_episode_steps": 2}, {"gamma": 1.0, "max_episode_steps": 3}], ids=name
)
@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.8 * gamma))
@sabotaged_by("foresight.ops.targets.monte_carlo", change("reward", lambda r: 1.1 * r))
def test_mc_basic(fields: dict[str, Any]) -> None:
    """The action values of the policy it ends with, as far as its episodes reach; optimal where they reach the end."""
    config = mc_basic.Config(episodes=5_000, **fields)
    mdp = env(1, 1)
    *_, (_, _, state) = mc_basic.train(config, mdp)
    assert state.stable
    values, rows = torch.zeros(mdp.states, dtype=torch.float64), torch.arange(mdp.states)
    for _ in range(config.max_episode_steps):
        q = mdps.action_values(mdp, values, config.gamma)
        values = q[rows, state.policy]
    near(state.q, q, 0.06)
    if config.max_episode_steps == 100:
        near(q, optimal_q(mdp, config.gamma), 1e-6)
