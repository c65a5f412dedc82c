"""Laws of dynamic programming on random MDPs: one solution, contraction, monotone improvement, valid bounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from foresight.algorithms.tabular import policy_iteration, truncated_policy_iteration, value_iteration
from foresight.envs.tabular.mdp import MDP, assemble
from foresight.errors import UserError
from foresight.planning.dynamic import bellman
from tests.sabotage import change, sabotaged_by
from tests.small_mdps import backup, last, small_mdp

envs = st.builds(
    small_mdp,
    seed=st.integers(0, 10_000),
    states=st.integers(2, 25),
    actions=st.integers(1, 4),
    outcomes=st.integers(1, 3),
    ending=st.sampled_from([0.0, 0.1, 0.5]),
)
gammas = st.sampled_from([0.0, 0.5, 0.9, 0.95])


def worst(original: Callable[..., Any]) -> Callable[..., Any]:
    """The minimum where the maximum belongs."""

    def mutant(mdp: MDP, gamma: float, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return bellman.action_values(mdp, gamma, values).min(1)

    return mutant


def policy_stuck(original: Callable[..., Any]) -> Callable[..., Any]:
    """An improvement that leaves the policy as it was."""

    def mutant(self: Any, values: torch.Tensor, policy: torch.Tensor, *limits: Any) -> Any:
        new, _, change = original(self, values, policy.clone(), *limits)
        return new, policy, change

    return mutant


def ignores_the_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """Values are backed up through the end of an episode."""

    def mutant(mdp: MDP, policy: torch.Tensor) -> Any:
        rows = torch.arange(mdp.states), policy
        return (mdp.next_state[rows], mdp.prob[rows], mdp.reward[rows]) if policy.ndim == 1 else original(mdp, policy)

    return mutant


@sabotaged_by("foresight.planning.dynamic.bellman.greedy", worst)
@sabotaged_by("foresight.planning.dynamic.bellman.policy_model", ignores_the_end)
@given(envs, gammas)
def test_value_iteration_policy_iteration_and_the_linear_solve_agree(mdp: MDP, gamma: float) -> None:
    by_value = last(value_iteration, mdp, gamma=gamma, tolerance=1e-11).values
    by_policy = last(policy_iteration, mdp, gamma=gamma)
    by_sweeps = last(policy_iteration, mdp, gamma=gamma, evaluation="sweeps", tolerance=1e-11).values
    truncated = last(truncated_policy_iteration, mdp, gamma=gamma, tolerance=1e-11).values
    span = last(truncated_policy_iteration, mdp, gamma=gamma, tolerance=1e-11, span_bounds=True).values
    # The linear solve, without our library: (I - γ P_π) v = r_π.
    chain = np.zeros((mdp.states, mdp.states))
    for s, a in enumerate(by_policy.policy.tolist()):
        np.add.at(chain[s], mdp.next_state[s, a].numpy(), mdp.weight[s, a].numpy())
    reward = mdp.reward[torch.arange(mdp.states), by_policy.policy].numpy()
    exact = np.linalg.solve(np.eye(mdp.states) - gamma * chain, reward)
    for values in (by_value, by_policy.values, by_sweeps, truncated, span):
        np.testing.assert_allclose(values, exact, atol=1e-8)
    np.testing.assert_allclose(backup(mdp, gamma, exact).max(1), exact, atol=1e-9)  # and it is optimal


@sabotaged_by("foresight.planning.dynamic.bellman.Sweeps.improve", policy_stuck)
@given(envs.filter(lambda mdp: mdp.actions > 1 and mdp.states > 8), gammas)
def test_the_policy_of_value_iteration_is_optimal(mdp: MDP, gamma: float) -> None:
    state = last(value_iteration, mdp, gamma=gamma, tolerance=1e-11)
    np.testing.assert_allclose(bellman.policy_value(mdp, state.policy, gamma), state.values, atol=1e-8)


def goals(seed: int) -> MDP:
    """Few outcomes, so that some actions lead in circles, and rewards only at the end of an episode."""
    draw = np.random.default_rng(seed)
    states, actions, outcomes = int(draw.integers(2, 6)), int(draw.integers(2, 4)), int(draw.integers(1, 3))
    shape = (states, actions, outcomes)
    next_state = draw.integers(0, states, shape).astype(np.int32)
    prob = draw.dirichlet(np.ones(outcomes), shape[:2])
    ended = draw.random(shape) < 0.25
    reward = ended * draw.integers(0, 3, shape)
    return assemble("Goals", next_state, prob, reward.astype(float), 1.0 - ended, np.full(states, 1 / states))


def endless(mdp: MDP) -> bool:
    try:
        bellman.require_ending(mdp, 1.0)
    except UserError:
        return True
    return False


@sabotaged_by("foresight.planning.dynamic.bellman.ending", lambda f: lambda mdp, values, policy, slack: policy)
@given(st.integers(0, 10_000).map(goals).filter(lambda mdp: not endless(mdp)))
def test_without_discount_a_policy_collects_what_its_values_promise(mdp: MDP) -> None:
    for module in (value_iteration, truncated_policy_iteration):
        state = last(module, mdp, gamma=1.0, tolerance=1e-12)
        next_state, weight, collected = bellman.policy_model(mdp, state.policy)
        chain = torch.zeros(mdp.states, mdp.states, dtype=torch.float64).scatter_add_(1, next_state.long(), weight)
        for _ in range(40):  # Σ_{t < 2^40} Pᵗ r, by doubling
            collected, chain = collected + chain @ collected, chain @ chain
        np.testing.assert_allclose(collected, state.values, atol=1e-6)


@sabotaged_by(
    "foresight.planning.dynamic.bellman.Sweeps.__init__",
    change("gamma", lambda g: min(1.0, 2 * g + 0.5), "too_much_gamma"),
)
@given(envs, st.sampled_from([0.3, 0.6, 0.9]), st.integers(0, 1000))
def test_a_sweep_is_a_contraction(mdp: MDP, gamma: float, seed: int) -> None:
    """‖Lv - Lu‖∞ ≤ γ ‖v - u‖∞, for u = v + a constant with equality where nothing ends; L_π too."""
    generator = torch.Generator().manual_seed(seed)
    v, u = torch.randn(2, mdp.states, dtype=torch.float64, generator=generator) * 10
    policy = torch.zeros(mdp.states, dtype=torch.int64)
    lifted = v + 100.0
    for a, b in ((v, u), (v, lifted)):
        distance = float((a - b).abs().max())
        new_a, _, _ = bellman.Sweeps(mdp, gamma).improve(a, policy)
        new_b, _, _ = bellman.Sweeps(mdp, gamma).improve(b, policy)
        assert float((new_a - new_b).abs().max()) <= gamma * distance + 1e-9
        new_a, _ = bellman.Sweeps(mdp, gamma).evaluate(a, policy)
        new_b, _ = bellman.Sweeps(mdp, gamma).evaluate(b, policy)
        assert float((new_a - new_b).abs().max()) <= gamma * distance + 1e-9


@sabotaged_by("foresight.planning.dynamic.bellman.greedy", worst)
@given(envs.filter(lambda mdp: mdp.actions > 1 and mdp.states > 8))
def test_every_policy_is_at_least_as_good_as_the_last(mdp: MDP) -> None:
    config = policy_iteration.Config(gamma=0.9, steps=60)
    evaluations = [
        state.values.clone() for _, metrics, state in policy_iteration.train(config, mdp) if "change" in metrics
    ]
    assert len(evaluations) >= 2
    for before, after in itertools.pairwise(evaluations):
        assert bool((after >= before - 1e-10).all())
    assert float((evaluations[-1] - evaluations[0]).max()) > 1e-3


@sabotaged_by("foresight.planning.dynamic.bellman.extrapolate", change("gamma", lambda g: g / 2, "wrong_bounds"))
@given(envs, st.integers(0, 20))
def test_the_span_bounds_hold_after_any_sweep(mdp: MDP, sweeps: int) -> None:
    """‖v - v*‖∞ ≤ γ/(1-γ) · half span, after the correction, however early one stops."""
    gamma = 0.95
    exact = last(policy_iteration, mdp, gamma=gamma).values
    machine = bellman.Sweeps(mdp, gamma)
    values, policy = torch.zeros_like(exact), torch.zeros(mdp.states, dtype=torch.int64)
    for _ in range(sweeps + 1):
        values, policy, delta = machine.improve(values, policy)
    corrected = bellman.extrapolate(mdp, gamma, values, delta)
    bound = gamma / (1 - gamma) * delta.half_span
    assert float((corrected - exact).abs().max()) <= bound + 1e-9
    assert float((values - exact).abs().max()) <= gamma / (1 - gamma) * delta.norm + 1e-9
