"""Where tabular algorithms are equal: one step is Sarsa or TD(0), many steps are Monte Carlo, greedy is Q-learning."""

from __future__ import annotations

import torch

from foresight.algorithms.tabular import (
    expected_sarsa,
    monte_carlo_prediction,
    n_step_sarsa,
    q_learning,
    sarsa,
    td_lambda,
    td_prediction,
)
from tests.sabotage import change, flip_sign, sabotaged_by
from tests.small_mdps import last, small_mdp


def test_one_step_is_sarsa_to_the_last_bit() -> None:
    mdp, common = small_mdp(1, 10), {"steps": 2_000, "gamma": 0.9, "alpha": 0.3}
    assert torch.equal(last(n_step_sarsa, mdp, n_steps=1, **common).q, last(sarsa, mdp, **common).q)
    assert not torch.equal(last(n_step_sarsa, mdp, n_steps=2, **common).q, last(sarsa, mdp, **common).q)


def test_expected_sarsa_without_exploration_is_q_learning() -> None:
    mdp, common = small_mdp(1, 10), {"steps": 2_000, "gamma": 0.9, "alpha": 0.3, "initial": 9.0}
    one, other = (last(module, mdp, epsilon=0.0, **common).q for module in (expected_sarsa, q_learning))
    torch.testing.assert_close(one, other)
    assert not torch.equal(
        last(expected_sarsa, mdp, epsilon=0.3, **common).q, last(q_learning, mdp, epsilon=0.3, **common).q
    )


def test_without_a_trace_it_is_one_step() -> None:
    mdp, common = small_mdp(2, 10), {"steps": 2_000, "gamma": 0.9, "alpha": 0.2}
    torch.testing.assert_close(last(td_lambda, mdp, trace_lambda=0.0, **common).v, last(td_prediction, mdp, **common).v)


@sabotaged_by("foresight.ops.returns.discounted_return", flip_sign, change("reward", lambda r: 2 * r))
def test_more_steps_than_an_episode_has_are_monte_carlo() -> None:
    """Both walk by the same numbers: an action and an outcome each step, and where to begin."""
    mdp, common = small_mdp(2, 10, ending=0.3), {"gamma": 0.9, "alpha": 0.2, "seed": 3}
    steps = last(td_prediction, mdp, n_steps=500, steps=10**6, episodes=40, **common)
    whole = last(monte_carlo_prediction, mdp, steps=40, alpha_power=0.0, first_visit=False, **common)
    torch.testing.assert_close(steps.v, whole.v)
