"""Losses, advantages, weights and divergences that a person can check by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foresight.ops import advantage, aggregate, kl, policy, value
from tests.sabotage import change, drop, flip_sign, sabotaged_by, scaled, swap

NAN = float("nan")


def rows(*lines: tuple[float, ...]) -> Tensor:
    return torch.tensor(lines, dtype=torch.float64)


def close(actual: Tensor, *expected: tuple[float, ...]) -> None:
    torch.testing.assert_close(actual, rows(*expected), rtol=0, atol=1e-9)


@sabotaged_by("foresight.ops.policy.reinforce", flip_sign, change("advantage", torch.abs))
def test_reinforce() -> None:
    logprob = rows((-2.0, -3.0)).requires_grad_()
    loss = policy.reinforce(logprob, rows((1, -1)))
    close(loss, (2, -3))
    assert torch.autograd.grad(loss.sum(), logprob)[0].tolist() == [[-1, 1]]


@sabotaged_by("foresight.ops.policy.ratio", swap("logprob", "old_logprob"))
@sabotaged_by("foresight.ops.policy.sequence_ratio", swap("logprob", "old_logprob"), change("mask", torch.ones_like))
def test_ratios() -> None:
    new, old, mask = rows((-1, -2, -3)), rows((-1, -4, -9)), rows((1, 1, 0))
    close(policy.ratio(new, old), (1, math.exp(2), math.exp(6)))
    close(policy.sequence_ratio(new, old, mask), (math.e, math.e, math.e))


@sabotaged_by(
    "foresight.ops.policy.clipped_surrogate",
    flip_sign,
    drop("clip_high"),
    drop("dual_clip"),
    change("advantage", torch.abs),
)
def test_clipped_surrogate() -> None:
    ratio = rows((0.5, 1, 1.5, 2, 9))
    good, bad = torch.full_like(ratio, 2), torch.full_like(ratio, -2)
    close(policy.clipped_surrogate(ratio, good, 0.2), (-1, -2, -2.4, -2.4, -2.4))
    close(policy.clipped_surrogate(ratio, bad, 0.2), (1.6, 2, 3, 4, 18))
    close(policy.clipped_surrogate(ratio, good, 0.2, 0.5), (-1, -2, -3, -3, -3))
    close(policy.clipped_surrogate(ratio, bad, 0.2, dual_clip=3), (1.6, 2, 3, 4, 6))
    close(policy.clipped_surrogate(ratio, good, 0.2, dual_clip=3), (-1, -2, -2.4, -2.4, -2.4))


@sabotaged_by("foresight.ops.policy.clipped_weight", flip_sign, drop("clip_low"), swap("logprob", "ratio"))
def test_clipped_weight() -> None:
    ratio, logprob, ones = rows((0.1, 1, 9)), rows((-1, -1, -1)).requires_grad_(), rows((1, 1, 1))
    close(policy.clipped_weight(logprob, ratio, ones, clip_high=1.0), (0.1, 1, 2))
    loss = policy.clipped_weight(logprob, ratio, ones, clip_high=1.0, clip_low=0.5)
    close(loss, (0.5, 1, 2))
    # No row is dropped: each keeps a gradient of the size of its weight.
    close(torch.autograd.grad(loss.sum(), logprob)[0], (-0.5, -1, -2))


@sabotaged_by("foresight.ops.policy.clip_fraction", drop("mask"), drop("clip_high"))
def test_clip_fraction() -> None:
    ratio = rows((0.5, 1, 1.25, 2))
    assert policy.clip_fraction(ratio, 0.2).item() == 0.75
    assert policy.clip_fraction(ratio, 0.2, 0.3).item() == 0.5
    assert policy.clip_fraction(ratio, 0.2, mask=rows((0, 1, 1, 0))).item() == 0.5


@sabotaged_by("foresight.ops.policy.temperature_loss", flip_sign, change("target_entropy", lambda h: -h))
def test_the_temperature_rises_where_the_policy_is_too_certain() -> None:
    log_alpha = torch.tensor(0.5, requires_grad=True)
    loss = policy.temperature_loss(log_alpha, torch.tensor(-3.0, requires_grad=True), -1.0)
    assert loss.item() == -1  # 0.5 · (-3 + 1)
    assert torch.autograd.grad(loss, log_alpha)[0].item() == -2


@sabotaged_by("foresight.ops.value.squared_loss", flip_sign, scaled(2.0))
@sabotaged_by("foresight.ops.value.huber_loss", flip_sign, change("delta", lambda d: 9.0))
@sabotaged_by("foresight.ops.value.clipped_loss", swap("value", "old_value"), change("clip", lambda c: 9.0))
def test_value_losses() -> None:
    close(value.squared_loss(rows((1, 2)), rows((3, 2))), (2, 0))
    close(value.huber_loss(rows((1, 2.5)), rows((4, 2))), (2.5, 0.125))
    # From old value 0: V = 2 counts as 1. Target 1: ½·1 against 0. Target 4: ½·4 against ½·9.
    close(value.clipped_loss(rows((2, 2, 0.5)), rows((0, 0, 0)), rows((1, 4, 0.5)), 1.0), (0.5, 4.5, 0))


@sabotaged_by("foresight.ops.advantage.normalize", flip_sign, drop("mask"))
def test_normalize() -> None:
    # 1, 3, 5: mean 3, standard deviation 2
    close(advantage.normalize(rows((1, 3, 5)), eps=0), (-1, 0, 1))
    close(advantage.normalize(rows((1, NAN, 3, 5)), rows((1, 0, 1, 1)), eps=0), (-1, 0, 0, 1))
    close(advantage.normalize(rows((7,))), (0,))


@sabotaged_by("foresight.ops.advantage.group_centered", flip_sign, change("rewards", torch.nan_to_num))
@sabotaged_by("foresight.ops.advantage.group_scaled", flip_sign, change("rewards", torch.nan_to_num))
@sabotaged_by("foresight.ops.advantage.leave_one_out", flip_sign, change("rewards", torch.nan_to_num))
def test_group_advantages() -> None:
    # NaN is unscorable: without it, the mean is 3, the deviation 2, and the mean of the others 4, 3, 2.
    rewards = rows((1, 3, NAN, 5), (0.1, 0.1, 0.1, 0.1), (NAN, NAN, NAN, 6), (NAN, NAN, NAN, NAN))
    nothing = (0, 0, 0, 0)
    close(advantage.group_centered(rewards), (-2, 0, 0, 2), nothing, nothing, nothing)
    close(advantage.group_scaled(rewards, eps=1e-12), (-1, 0, 0, 1), nothing, nothing, nothing)
    close(advantage.leave_one_out(rewards), (-3, 0, 0, 3), nothing, nothing, nothing)


@sabotaged_by("foresight.ops.aggregate.per_token", change("mask", torch.ones_like), scaled(2.0))
@sabotaged_by("foresight.ops.aggregate.per_sequence", change("mask", torch.ones_like), scaled(2.0))
@sabotaged_by("foresight.ops.aggregate.per_budget", change("mask", torch.ones_like), scaled(2.0))
def test_weights() -> None:
    mask = rows((1, 0, 0), (1, 1, 1), (0, 0, 0))
    close(aggregate.per_token(mask), (0.25, 0, 0), (0.25, 0.25, 0.25), (0, 0, 0))
    close(aggregate.per_token(mask, tokens=10), (0.1, 0, 0), (0.1, 0.1, 0.1), (0, 0, 0))
    close(aggregate.per_sequence(mask), (1 / 2, 0, 0), (1 / 6, 1 / 6, 1 / 6), (0, 0, 0))
    close(aggregate.per_sequence(mask, sequences=3), (1 / 3, 0, 0), (1 / 9, 1 / 9, 1 / 9), (0, 0, 0))
    close(aggregate.per_budget(mask, 9), (1 / 9, 0, 0), (1 / 9, 1 / 9, 1 / 9), (0, 0, 0))


@sabotaged_by("foresight.ops.kl.k1", flip_sign)
@sabotaged_by("foresight.ops.kl.k2", flip_sign)
@sabotaged_by("foresight.ops.kl.k3", swap("logprob", "ref_logprob"))
def test_kl_estimators() -> None:
    logprob, ref = rows((-1, -1)), rows((-3, -1))
    close(kl.k1(logprob, ref), (2, 0))
    close(kl.k2(logprob, ref), (2, 0))
    close(kl.k3(logprob, ref), (math.exp(-2) + 1, 0))


@sabotaged_by("foresight.ops.kl.categorical", flip_sign, swap("logits", "ref_logits"))
@sabotaged_by("foresight.ops.kl.normal", flip_sign, swap("mean", "std"), swap("std", "ref_std"))
def test_exact_kl() -> None:
    # (½, ½) against (¼, ¾): ½ ln 2 + ½ ln ⅔.  A ruled-out action adds nothing.
    half, quarter = rows((0, 0, -math.inf)), rows((0, math.log(3), -math.inf))
    close(kl.categorical(half, quarter)[None], (0.5 * math.log(2) + 0.5 * math.log(2 / 3),))
    # N(1, 1) against N(0, 2) in one dim, equal in the other: ln 2 + (1 + 1) / 8 - ½
    args = rows((1, 5)), rows((1, 3)), rows((0, 5)), rows((2, 3))
    close(kl.normal(*args)[None], (math.log(2) + 0.25 - 0.5,))
