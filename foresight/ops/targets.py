"""Temporal-difference learning: one update rule and its targets.

    q(s, a) ← q(s, a) + α · (target − q(s, a))                                              (`moved`)

    Sarsa             r + γ q(s', a')                         the action that will be taken
    Expected Sarsa    r + γ Σ_a' π(a'|s') q(s', a')           its expectation
    Q-learning        r + γ max_a' q(s', a')                  the best action
    n-step Sarsa      r_1 + γ r_2 + ... + γⁿ q(s_n, a_n)      n rewards, then q
    Monte Carlo       r_1 + γ r_2 + γ² r_3 + ...              rewards only

(Sutton & Barto 2018, chapters 5 to 7; Zhao, "Mathematical Foundations of Reinforcement Learning", table 7.2.) They
differ in the value of the successor and in the number of rewards before it. In Double Q-learning one table selects
the action and another evaluates it. Shapes: scalars `[B, T]`, `discount` as in a `Trajectory` (0 where the episode
ended, else γ), action values `[B, T, A]` of the *true successor*. An invalid action has the value -inf.
Shapes that differ raise ValueError, except that a scalar fits any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresight.ops import returns, shapes


def moved(value: Tensor, target: Tensor, step_size: float | Tensor) -> Tensor:
    """The update rule: value + α · (target − value). All of one shape; α a scalar, or 1/n for a sample mean.

    Source: Sutton & Barto 2018, eq. 2.4. Becomes the target itself when α is 1.
    """
    return value + step_size * (target - value)


def td(reward: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """TD(0): r + γ v(s'). `[B, T]`. Source: Sutton & Barto 2018, eq. 6.2.

    Every one-step target below is this, with its own `next_value`.
    """
    shapes.same(reward=reward, discount=discount, next_value=next_value)
    return reward + discount * next_value


def sarsa(reward: Tensor, discount: Tensor, next_q: Tensor, next_action: Tensor) -> Tensor:
    """Sarsa: r + γ q(s', a'), with a' `[B, T]` the action that is taken next.

    Source: Sutton & Barto 2018, eq. 6.7.
    """
    return td(reward, discount, taken(next_q, next_action))


def expected_sarsa(reward: Tensor, discount: Tensor, next_q: Tensor, next_policy: Tensor) -> Tensor:
    """Expected Sarsa: r + γ Σ_a' π(a'|s') q(s', a'), with π `[B, T, A]`.

    Source: Sutton & Barto 2018, eq. 6.9. Becomes `q_learning` when π is greedy.
    """
    return td(reward, discount, expected(next_q, next_policy))


def q_learning(reward: Tensor, discount: Tensor, next_q: Tensor) -> Tensor:
    """Q-learning: r + γ max_a' q(s', a'). Source: Watkins 1989; Sutton & Barto 2018, eq. 6.8."""
    return td(reward, discount, next_q.amax(-1))


def double_q_learning(reward: Tensor, discount: Tensor, next_q: Tensor, eval_q: Tensor) -> Tensor:
    """Double Q-learning: r + γ q'(s', argmax_a' q(s', a')). `next_q` selects the action, `eval_q` q' evaluates it.

    Ties count equally. Source: van Hasselt 2010; Sutton & Barto 2018, eq. 6.10. Becomes `q_learning`
    when the two tables are the same.
    """
    return td(reward, discount, expected(eval_q, greedy(next_q)))


def n_step_sarsa(
    reward: Tensor,
    discount: Tensor,
    cut: Tensor,
    next_q: Tensor,
    next_action: Tensor,
    n: int,
    mask: Tensor | None = None,
) -> Tensor:
    """n-step Sarsa: n rewards, then q of the next pair; fewer where the episode ends first.

    Source: Sutton & Barto 2018, eq. 7.4. Becomes `sarsa` when n is 1 and `monte_carlo` when n is the whole episode.
    """
    return returns.n_step_return(reward, discount, cut, taken(next_q, next_action), n, mask)


def monte_carlo(reward: Tensor, discount: Tensor, cut: Tensor, mask: Tensor | None = None) -> Tensor:
    """Monte Carlo: all rewards to the end of the episode. Source: Sutton & Barto 2018, eq. 3.8."""
    return returns.discounted_return(reward, discount, cut, None, mask)


def taken(q: Tensor, action: Tensor) -> Tensor:
    """q(s, a) of the actions taken: `[..., A]` and `[...]` give `[...]`."""
    shapes.same(action=action, q=q[..., 0])
    return q.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def expected(q: Tensor, policy: Tensor) -> Tensor:
    """Σ_a π(a|s) q(s, a): `[..., A]` both, gives `[...]`. An action of probability 0 adds 0, even at -inf."""
    shapes.same(q=q, policy=policy)
    return torch.where(policy > 0, policy * q, 0.0).sum(-1)


def greedy(q: Tensor) -> Tensor:
    """The greedy policy; ties are equally likely: `[..., A]` gives `[..., A]`."""
    best = (q == q.amax(-1, keepdim=True)).to(q.dtype)
    return best / best.sum(-1, keepdim=True)


def epsilon_greedy(q: Tensor, epsilon: float) -> Tensor:
    """ε-greedy: with probability ε a uniform valid action, else a greedy one. `[..., A]` gives `[..., A]`.

    Source: Sutton & Barto 2018, §2.2 and eq. 5.2. Becomes `greedy` when ε is 0.
    """
    valid = (q > -torch.inf).to(q.dtype)
    return epsilon * valid / valid.sum(-1, keepdim=True) + (1 - epsilon) * greedy(q)


def soft_maximum(q: Tensor, temperature: float) -> Tensor:
    """The soft value: α log Σ_a exp(q(s, a) / α) = max_π Σ_a π(a|s) (q(s, a) − α log π(a|s)). `[..., A]` gives `[...]`.

    Source: Ziebart 2010, eq. 6.10; Haarnoja et al. 2017 (arXiv:1702.08165), eq. 3. Tends to the maximum as α → 0, from
    above and by at most α log A. Temperature 0 is the maximum itself.
    """
    if temperature == 0:
        return q.amax(-1)
    return temperature * torch.logsumexp(q / temperature, -1)


def soft_policy(q: Tensor, temperature: float) -> Tensor:
    """The policy that attains `soft_maximum`: π(a|s) ∝ exp(q(s, a) / α). `[..., A]` gives `[..., A]`.

    Source: Haarnoja et al. 2017 (arXiv:1702.08165), eq. 4. Becomes `greedy` as α → 0.
    """
    return greedy(q) if temperature == 0 else torch.softmax(q / temperature, -1)
