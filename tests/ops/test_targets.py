"""The targets of temporal differences: goldens by hand, and where they meet."""

from __future__ import annotations

import math

import pytest
import torch

from foresight.ops import targets
from tests.sabotage import change, flip_sign, sabotaged_by, scaled, swap

# Two rows of one episode, γ = 0.1: rewards are digits, so a target reads like a number.
REWARD = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
DISCOUNT = torch.tensor([[0.1, 0.0]], dtype=torch.float64)  # the second row ends it
CUT = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
NEXT_Q = torch.tensor([[[3.0, 5.0], [7.0, 9.0]]], dtype=torch.float64)
ACTION = torch.tensor([[0, 1]])


def close(found: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))


@sabotaged_by("foresight.ops.targets.td", swap("reward", "discount"), flip_sign, change("discount", torch.ones_like))
def test_goldens() -> None:
    policy = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    close(targets.td(REWARD, DISCOUNT, NEXT_Q[..., 1]), [1.5, 2.0])
    close(targets.sarsa(REWARD, DISCOUNT, NEXT_Q, ACTION), [1.3, 2.0])
    close(targets.expected_sarsa(REWARD, DISCOUNT, NEXT_Q, policy), [1.4, 2.0])
    close(targets.q_learning(REWARD, DISCOUNT, NEXT_Q), [1.5, 2.0])
    close(targets.double_q_learning(REWARD, DISCOUNT, NEXT_Q, NEXT_Q.roll(1, -1)), [1.3, 2.0])


@sabotaged_by("foresight.ops.returns.n_step_return", flip_sign, change("n", lambda n: n + 1))
@sabotaged_by("foresight.ops.returns.discounted_return", flip_sign, change("cut", torch.ones_like))
def test_more_than_one_reward() -> None:
    going_on = torch.tensor([[0.1, 0.1]], dtype=torch.float64)
    nothing_cut = torch.zeros_like(CUT)
    close(targets.monte_carlo(REWARD, DISCOUNT, CUT), [1.2, 2.0])
    close(targets.n_step_sarsa(REWARD, going_on, nothing_cut, NEXT_Q, ACTION, 1), [1.3, 2.9])
    close(targets.n_step_sarsa(REWARD, going_on, nothing_cut, NEXT_Q, ACTION, 2), [1.29, 2.9])


@sabotaged_by("foresight.ops.targets.moved", flip_sign, scaled(2.0), swap("value", "target"))
def test_the_rule() -> None:
    value, target = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])
    torch.testing.assert_close(targets.moved(value, target, 0.25), torch.tensor([1.5, 1.0]))
    torch.testing.assert_close(targets.moved(value, target, 1.0), target)
    mean = torch.tensor(0.0)
    for n, x in enumerate([4.0, 1.0, 7.0], 1):  # steps 1/n make a mean
        mean = targets.moved(mean, torch.tensor(x), 1 / n)
    assert float(mean) == pytest.approx(4.0)


@sabotaged_by("foresight.ops.targets.greedy", scaled(0.5), flip_sign)
@sabotaged_by("foresight.ops.targets.epsilon_greedy", change("epsilon", lambda e: e + 0.2))
def test_policies() -> None:
    q = torch.tensor([[1.0, 4.0, 4.0, -torch.inf], [0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    expected = torch.tensor([[0.1, 0.45, 0.45, 0.0], [0.075, 0.075, 0.075, 0.775]], dtype=torch.float64)
    torch.testing.assert_close(targets.epsilon_greedy(q, 0.3), expected)
    torch.testing.assert_close(targets.epsilon_greedy(q, 0.0), targets.greedy(q))
    torch.testing.assert_close(targets.greedy(q)[0], torch.tensor([0, 0.5, 0.5, 0], dtype=torch.float64))
    assert targets.expected(q, targets.greedy(q)).tolist() == [4.0, 3.0]  # 0 · -inf counts nothing


@sabotaged_by("foresight.ops.targets.expected_sarsa", scaled(1.01))
@sabotaged_by("foresight.ops.targets.double_q_learning", scaled(1.01))
def test_where_targets_meet() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 6, 3, generator=generator, dtype=torch.float64)
    reward = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    discount = torch.rand(4, 6, generator=generator, dtype=torch.float64)
    best = targets.q_learning(reward, discount, q)
    torch.testing.assert_close(targets.expected_sarsa(reward, discount, q, targets.greedy(q)), best)
    torch.testing.assert_close(targets.double_q_learning(reward, discount, q, q), best)
    torch.testing.assert_close(targets.sarsa(reward, discount, q, q.argmax(-1)), best)
    one_step = targets.n_step_sarsa(reward, discount, torch.zeros_like(reward), q, q.argmax(-1), 1)
    torch.testing.assert_close(one_step, best)


@sabotaged_by("foresight.ops.targets.soft_maximum", scaled(1.1), flip_sign)
@sabotaged_by("foresight.ops.targets.soft_policy", change("temperature", lambda t: 2 * t))
def test_the_soft_maximum_is_the_most_reward_and_entropy() -> None:
    q = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64)
    for temperature in (0.01, 0.3, 5.0):
        policy = targets.soft_policy(q, temperature)
        entropy = -(policy * policy.log()).nan_to_num().sum(-1)
        attained = (policy * q).sum(-1) + temperature * entropy
        torch.testing.assert_close(targets.soft_maximum(q, temperature), attained)
        other = torch.tensor([[0.3, 0.6, 0.1]], dtype=torch.float64)
        worse = (other * q).sum(-1) - temperature * (other * other.log()).sum(-1)
        assert bool((targets.soft_maximum(q, temperature) > worse).all())


@sabotaged_by("foresight.ops.targets.soft_maximum", change("temperature", lambda t: t + 0.5))
def test_the_soft_maximum_becomes_the_hard_one() -> None:
    q = torch.randn(20, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for temperature in (1.0, 0.1, 1e-2, 1e-4, 0.0):
        gap = targets.soft_maximum(q, temperature) - q.amax(-1)
        assert float(gap.min()) > -1e-12 and float(gap.max()) <= temperature * math.log(5) + 1e-12
    torch.testing.assert_close(targets.soft_policy(q, 0.0), targets.greedy(q))
