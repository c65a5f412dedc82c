"""The recursion over time of which every return and advantage estimator is a case.

    x_t = delta_t + decay_t · x_{t+1}            (`backward`)

Every estimator below is a choice of `delta` and `decay`. All tensors are `[B, T]`, with the meaning that
they have in a `Trajectory`:

- `reward`: of action t;
- `discount`: the continuation after action t: 0 at termination, γ otherwise, -γ when the mover changes,
  1 between tokens. Termination is discount 0 and nothing else;
- `cut`: 1 where step t+1 belongs to another episode, for any reason. A time limit is cut 1 with discount γ:
  the trace stops, and the estimate bootstraps from the value of the true successor;
- `value`: of the state at step t;
- `next_value`: of the true successor of step t. Inside an episode it equals `value` of step t+1; at a cut, and at
  the last step of the segment, it is the value of the final observation;
- `mask` (or None): 1 where the step is real. A step with mask 0 yields 0 and passes nothing through: the step
  before it ends there, as at the end of the segment. Its content is never used, even if it is NaN.

This is the only file with loops over time. They take ⌈log₂ T⌉ iterations, not T (see `backward`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foresight.ops import shapes


def backward(delta: Tensor, decay: Tensor) -> Tensor:
    """The recursion x_t = delta_t + decay_t · x_{t+1}, with x_T = 0.

    Shapes: delta, decay `[B, T]`; returns `[B, T]`. The last column of `decay` has no effect.

    Solved by doubling: after j rounds, x_t is the sum of its first 2ʲ terms and d_t the product of its
    first 2ʲ decays, so ⌈log₂ T⌉ rounds over whole tensors replace T rounds over columns (on one core 4
    times faster at [8, 128], 40 times at [1, 2048]). It only multiplies and adds, so a decay of 0 is safe
    and rounding errors grow no faster than in the loop. Gradients flow to both arguments.

    Becomes `discounted_return` when delta is the reward and decay the discount, and each of the other
    functions of this file for other choices.

    Raises ValueError if the shapes differ.
    """
    shapes.same_steps(delta=delta, decay=decay)
    steps = delta.shape[1]
    x, d, span = delta, decay, 1
    while span < steps:
        x = x + functional.pad(d[:, : steps - span] * x[:, span:], (0, span))
        if 2 * span < steps:  # d_t for the steps that the next round reads
            d = d[:, : steps - 2 * span] * d[:, span : steps - span]
        span *= 2
    return x


def forward(delta: Tensor, decay: Tensor, start: Tensor | None = None) -> Tensor:
    """The same recursion forward in time: x_t = delta_t + decay_t · x_{t-1}, with x_{-1} = start.

    Shapes: delta, decay `[B, T]`, start `[B]` (0 if None); returns `[B, T]`.

    Becomes the running return whose standard deviation scales rewards (Engstrom et al. 2020,
    arXiv:2005.12729, §3; Gymnasium's NormalizeReward) when delta is the reward and decay_t is
    γ · (1 - cut_{t-1}); an accumulating eligibility trace (Sutton & Barto 2018, eq. 12.5) when delta is the
    gradient and decay is γλ.

    Raises ValueError if the shapes differ.
    """
    shapes.same_steps(delta=delta, decay=decay)
    if start is not None:
        first = delta[:, :1] + decay[:, :1] * start.unsqueeze(1)
        delta = torch.cat([first, delta[:, 1:]], dim=1)
    return backward(delta.flip(1), decay.flip(1)).flip(1)


def discounted_return(
    reward: Tensor, discount: Tensor, cut: Tensor, next_value: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """The Monte Carlo return: the rewards until the episode or the segment ends, plus the value there.

        G_t = reward_t + discount_t · G_{t+1}           inside an episode
        G_t = reward_t + discount_t · next_value_t      at a cut and at the last step

    Shapes: all `[B, T]`; returns `[B, T]`. Source: Sutton & Barto 2018, eq. 3.8 and 3.9.

    Becomes the plain sum of rewards when discount is 1 and next_value None (no bootstrap: the value of the
    successor counts as 0).

    Raises ValueError if the shapes differ.
    """
    successor = torch.zeros_like(reward) if next_value is None else next_value
    return lambda_return(reward, discount, cut, successor, 1.0, mask)


def n_step_return(
    reward: Tensor, discount: Tensor, cut: Tensor, next_value: Tensor, n: int, mask: Tensor | None = None
) -> Tensor:
    """The n-step return: n rewards, then the value, or fewer rewards where the episode or the segment ends first.

        G⁽¹⁾_t = reward_t + discount_t · next_value_t
        G⁽ⁿ⁾_t = reward_t + discount_t · G⁽ⁿ⁻¹⁾_{t+1}    inside an episode; G⁽¹⁾_t at a cut and at the last step

    Shapes: all `[B, T]`; returns `[B, T]`. Source: Sutton & Barto 2018, eq. 7.1.

    Becomes the TD(0) target when n = 1, and `discounted_return` when n ≥ T.

    Raises ValueError if the shapes differ or n < 1.
    """
    shapes.same_steps(reward=reward, discount=discount, cut=cut, next_value=next_value, mask=mask)
    if n < 1:
        raise ValueError(f"n must be at least 1, but it is {n}.")
    reward, discount, next_value = _real(mask, reward, discount, next_value)
    one_step = reward + discount * next_value
    continues = _continues(cut, mask) != 0
    x = one_step
    for _ in range(min(n, reward.shape[1]) - 1):
        x = torch.where(continues, reward + discount * _next(x), one_step)
    return x


def lambda_return(
    reward: Tensor,
    discount: Tensor,
    cut: Tensor,
    next_value: Tensor,
    lam: float | Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """The λ-return: the mixture of all n-step returns with weights (1-λ) λⁿ⁻¹.

        G_t = reward_t + discount_t · ((1 - λ_t) · next_value_t + λ_t · G_{t+1})    inside an episode
        G_t = reward_t + discount_t · next_value_t                                  at a cut, at the last step

    Shapes: all `[B, T]`, lam a number or `[B, T]`; returns `[B, T]`.
    Source: Sutton & Barto 2018, §12.8; with a predicted discount it is the imagined return of
    Dreamer (Hafner et al. 2020, arXiv:1912.01603, eq. 6).

    Becomes the TD(0) target when λ = 0, `discounted_return` when λ = 1, and `value` plus the advantage of
    `gae` whenever next_value_t = value_{t+1} inside episodes.

    Raises ValueError if the shapes differ.
    """
    shapes.same_steps(reward=reward, discount=discount, cut=cut, next_value=next_value, mask=mask)
    reward, discount, next_value = _real(mask, reward, discount, next_value)
    weight = lam * _continues(cut, mask)
    return backward(reward + discount * (1 - weight) * next_value, discount * weight)


def gae(
    reward: Tensor,
    discount: Tensor,
    cut: Tensor,
    value: Tensor,
    next_value: Tensor,
    lam: float | Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: `(advantage, target)`, where target = advantage + value.

        δ_t = reward_t + discount_t · next_value_t - value_t
        A_t = δ_t + discount_t · λ · (1 - cut_t) · A_{t+1}

    Shapes: all `[B, T]`, lam a number or `[B, T]`; returns two `[B, T]`. Pass values without gradient:
    nothing is detached here. Source: Schulman et al. 2016 (arXiv:1506.02438), eq. 16.

    Becomes the TD error when λ = 0, the Monte Carlo return minus the value when λ = 1; its target is the
    λ-return.

    Raises ValueError if the shapes differ.
    """
    shapes.same_steps(reward=reward, discount=discount, cut=cut, value=value, next_value=next_value, mask=mask)
    reward, discount, value, next_value = _real(mask, reward, discount, value, next_value)
    delta = reward + discount * next_value - value
    advantage = backward(delta, discount * (1 - cut.to(discount.dtype)) * lam)
    return advantage, advantage + value


def vtrace(
    reward: Tensor,
    discount: Tensor,
    cut: Tensor,
    value: Tensor,
    next_value: Tensor,
    ratio: Tensor,
    lam: float | Tensor = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    clip_pg: float = 1.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """V-trace: `(advantage, target)` for the current policy, from steps of an older policy.

        ρ_t = min(ρ̄, ratio_t)      c_t = λ_t · min(c̄, ratio_t)
        v_t - V_t = ρ_t · δ_t + discount_t · c_t · (1 - cut_t) · (v_{t+1} - V_{t+1})
        A_t = min(ρ̄_pg, ratio_t) · (reward_t + discount_t · (λ_t · v_{t+1} + (1 - λ_t) · V_{t+1}) - V_t)

    where at a cut and at the last step next_value_t replaces v_{t+1} and V_{t+1}. The target is v.

    Shapes: all `[B, T]`; `ratio` is π(a|s) / μ(a|s), the current policy over the behavior policy, without
    gradient; lam a number or `[B, T]`; returns two `[B, T]`. Source: Espeholt et al. 2018 (arXiv:1802.01561),
    eq. 1, §4.2 and, for λ in the traces, remark 2. The paper's advantage has no λ and uses v_{t+1} only; this one is
    rlax's (`vtrace_td_error_and_advantage`), and the two are equal when λ is 1. ρ̄ determines the fixed point, the
    value of the policy ∝ min(ρ̄ μ, π); c̄ and λ determine only the speed.

    Becomes `gae` for every λ when ratio is 1: the same advantage, and the λ-return as the target.

    Raises ValueError if the shapes differ.
    """
    shapes.same_steps(
        reward=reward, discount=discount, cut=cut, value=value, next_value=next_value, ratio=ratio, mask=mask
    )
    reward, discount, value, next_value, ratio = _real(mask, reward, discount, value, next_value, ratio)
    continues = _continues(cut, mask)
    delta = ratio.clamp(max=clip_rho) * (reward + discount * next_value - value)
    target = value + backward(delta, discount * continues * lam * ratio.clamp(max=clip_c))
    successor = torch.where(continues != 0, lam * _next(target) + (1 - lam) * next_value, next_value)
    advantage = ratio.clamp(max=clip_pg) * (reward + discount * successor - value)
    return advantage, target


def retrace(
    reward: Tensor,
    discount: Tensor,
    cut: Tensor,
    value: Tensor,
    next_value: Tensor,
    ratio: Tensor,
    lam: float | Tensor = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Retrace(λ): the target for Q(s_t, a_t) of the current policy, from steps of any policy.

        δ_t = reward_t + discount_t · next_value_t - value_t
        G_t - value_t = δ_t + discount_t · (1 - cut_t) · c_{t+1} · (G_{t+1} - value_{t+1}),  c = λ · min(1, ratio)

    Shapes: all `[B, T]`; `value` is Q(s_t, a_t), `next_value` is Σ_a π(a|s) Q(s, a) at the true successor,
    `ratio` is π(a_t|s_t) / μ(a_t|s_t); returns `[B, T]`.
    Source: Munos et al. 2016 (arXiv:1606.02647), eq. 3 and §3.

    Becomes the expected-Sarsa target when λ = 0, the on-policy Q^π(λ) of Harutyunyan et al. 2016
    (arXiv:1602.04951) when ratio is 1, and Tree-backup(λ) when ratio is given as π(a|s) itself.

    Raises ValueError if the shapes differ.
    """
    shapes.same_steps(
        reward=reward, discount=discount, cut=cut, value=value, next_value=next_value, ratio=ratio, mask=mask
    )
    reward, discount, value, next_value, ratio = _real(mask, reward, discount, value, next_value, ratio)
    trace = _next(lam * ratio.clamp(max=1.0))
    delta = reward + discount * next_value - value
    return value + backward(delta, discount * _continues(cut, mask) * trace)


def n_step_transition(
    reward: Tensor, discount: Tensor, cut: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Each segment of n steps as one n-step transition: `(R, D, last)`.

        R = Σ_k (Π_{j<k} discount_j) reward_k,  D = Π_k discount_k,  k = 0 .. last

    so that R + D · V(true successor of step `last`) is the n-step target of step 0. A transition ends at the first cut
    of its segment, and before the first step with mask 0.

    Shapes: all `[B, n]`; returns three `[B]`, the last int64. Step 0 must have mask 1. Source: Sutton & Barto 2018,
    eq. 7.1; as stored by Rainbow (arXiv:1710.02298, §3).

    Becomes the step itself when n = 1; R + D · V is `n_step_return` of step 0.

    Raises ValueError if the shapes differ.
    """
    shapes.same_steps(reward=reward, discount=discount, cut=cut, mask=mask)
    reward, discount = _real(mask, reward, discount)
    belongs, reached = _transition(discount, cut, mask)
    return (n_step_weights(discount, cut, mask) * reward).sum(1), reached[:, -1], belongs.sum(1).long() - 1


def n_step_weights(discount: Tensor, cut: Tensor, mask: Tensor | None = None) -> Tensor:
    """The weight of each step in the n-step return of step 0: Π_{j<k} discount_j, and 0 after the transition's end.

    Shapes: all `[B, n]`; returns `[B, n]`, the first column 1. Step 0 must have mask 1. R of `n_step_transition` is the
    sum of the rewards with these weights.

    Raises ValueError if the shapes differ.
    """
    shapes.same_steps(discount=discount, cut=cut, mask=mask)
    (discount,) = _real(mask, discount)
    belongs, reached = _transition(discount, cut, mask)
    return belongs * torch.cat([torch.ones_like(reached[:, :1]), reached[:, :-1]], dim=1)


def following(value: Tensor, last: Tensor) -> Tensor:
    """The values of the next step, and `last` `[B, ...]` at the last step: `[B, T, ...]` to `[B, T, ...]`.

    This is the value of each step's successor, except at a cut, where the next step belongs to another episode.
    """
    return torch.cat([value[:, 1:], last.unsqueeze(1)], 1)


def _real(mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with 0 where `mask` is 0 (not by a product, as masked steps may contain NaN)."""
    if mask is None:
        return tensors
    return tuple(tensor.masked_fill(mask == 0, 0) for tensor in tensors)


def _continues(cut: Tensor, mask: Tensor | None) -> Tensor:
    """1 where step t+1 is the true successor of step t and has mask 1; 0 in the last column. `[B, T]`."""
    continues = 1 - cut if cut.is_floating_point() else (cut == 0).to(torch.get_default_dtype())
    if mask is not None:
        continues = continues * _next(mask.to(continues.dtype))
    return torch.cat([continues[:, :-1], torch.zeros_like(continues[:, -1:])], dim=1)


def _transition(discount: Tensor, cut: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """1 for the steps of the transition of step 0, and the product of its discounts up to each step, both `[B, n]`."""
    belongs = torch.cat([torch.ones_like(discount[:, :1]), _continues(cut, mask)[:, :-1]], dim=1).cumprod(1)
    return belongs, torch.where(belongs != 0, discount, 1.0).cumprod(1)


def _next(x: Tensor) -> Tensor:
    """x_{t+1}, with 0 at the last step. `[B, T]`."""
    return functional.pad(x[:, 1:], (0, 1))
