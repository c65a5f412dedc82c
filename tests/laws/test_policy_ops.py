"""What must hold for losses, advantages, weights and divergences, whatever the numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foresight.ops import advantage, aggregate, kl, policy, value
from tests.sabotage import change, drop, flip_sign, returns, sabotaged_by, scaled, swap

SEEDS = st.integers(0, 2**31)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ragged(seed: int, rows: int, steps: int) -> Tensor:
    lengths = torch.randint(1, steps + 1, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return (torch.arange(steps) < lengths).double()


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    at = at.clone().requires_grad_()
    return torch.autograd.grad(loss(at).sum(), at)[0]


# --- ratio 1


@sabotaged_by("foresight.ops.policy.clipped_surrogate", flip_sign, change("ratio", torch.square), scaled(2.0))
@sabotaged_by("foresight.ops.policy.clipped_weight", flip_sign, change("logprob", lambda x: 2 * x))
@sabotaged_by("foresight.ops.policy.ratio", scaled(1.5), change("old_logprob", lambda x: x - 1))
@given(SEEDS)
def test_at_ratio_1_every_surrogate_has_the_policy_gradient(seed: int) -> None:
    logprob, gain = -randn(seed, 3, 5).abs(), randn(seed + 1, 3, 5)
    assert (policy.ratio(logprob, logprob) == 1).all()  # exactly
    expected = gradient(lambda x: policy.reinforce(x, gain), logprob)
    close(expected, -gain)
    for loss in (
        lambda x: policy.clipped_surrogate(policy.ratio(x, logprob), gain, 0.2),
        lambda x: policy.clipped_surrogate(policy.ratio(x, logprob), gain, 0.2, 0.28),
        lambda x: policy.clipped_surrogate(policy.ratio(x, logprob), gain, 0.2, dual_clip=3.0),
        lambda x: policy.clipped_weight(x, policy.ratio(x, logprob), gain, 5.0),
    ):
        close(gradient(loss, logprob), expected)


@sabotaged_by("foresight.ops.policy.sequence_ratio", change("mask", torch.ones_like), scaled(2.0))
@given(SEEDS)
def test_at_ratio_1_the_sequence_ratio_has_the_policy_gradient_of_sequences(seed: int) -> None:
    logprob, mask = -randn(seed, 4, 6).abs(), ragged(seed, 4, 6)
    gain = randn(seed + 1, 4, 1).expand(4, 6)
    weights = aggregate.per_sequence(mask)
    expected = gradient(lambda x: weights * policy.reinforce(x, gain), logprob)
    ratio = policy.sequence_ratio(logprob, logprob, mask)
    assert (ratio == 1).all()
    close(
        gradient(
            lambda x: weights * policy.clipped_surrogate(policy.sequence_ratio(x, logprob, mask), gain, 0.2), logprob
        ),
        expected,
    )


@sabotaged_by("foresight.ops.policy.clipped_surrogate", flip_sign, change("clip_low", lambda c: 9.0))
@given(SEEDS)
def test_clipping_is_a_lower_bound_that_forgets_gains_outside_the_range(seed: int) -> None:
    ratio, gain = randn(seed, 3, 5).exp(), randn(seed + 1, 3, 5)
    loss = policy.clipped_surrogate(ratio, gain, 0.2)
    assert (loss >= -ratio * gain).all()
    outside = ((ratio > 1.2) & (gain > 0)) | ((ratio < 0.8) & (gain < 0))
    slope = gradient(lambda r: policy.clipped_surrogate(r, gain, 0.2), ratio)
    close(slope, torch.where(outside, 0.0, -gain))


# --- groups


@sabotaged_by("foresight.ops.advantage.leave_one_out", flip_sign, scaled(1.1))
@sabotaged_by("foresight.ops.advantage.group_scaled", flip_sign, scaled(1.1), change("rewards", torch.square))
@sabotaged_by("foresight.ops.advantage.group_centered", flip_sign, scaled(1.1))
@given(SEEDS, st.integers(2, 6))
def test_group_advantages_by_definition(seed: int, size: int) -> None:
    rewards = randn(seed, 4, size)
    close(advantage.group_centered(rewards), rewards - rewards.mean(1, keepdim=True))
    others = torch.stack([rewards[:, [j for j in range(size) if j != i]].mean(1) for i in range(size)], 1)
    close(advantage.leave_one_out(rewards), rewards - others)
    scaled_once = advantage.group_scaled(rewards, eps=1e-12)
    close(scaled_once * rewards.std(1, keepdim=True), rewards - rewards.mean(1, keepdim=True))
    close(advantage.group_scaled(3 * rewards - 5, eps=1e-12), scaled_once)


@pytest.mark.parametrize("name", [
    "group_centered", "group_scaled", "batch_scaled", "mean_scaled", "leave_one_out", "differs",
])  # fmt: skip
def test_rewards_may_be_integers(name: str) -> None:
    rewards, function = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [2, 0, 0, 0]]), getattr(advantage, name)
    assert torch.equal(function(rewards), function(rewards.float())) and function(rewards).any()


@sabotaged_by("foresight.ops.advantage.batch_scaled", flip_sign, scaled(1.1), change("rewards", torch.square))
@given(SEEDS, st.integers(2, 6))
def test_one_group_is_scaled_as_a_batch(seed: int, size: int) -> None:
    """With several groups the deviation is that of all centered rewards."""
    rewards = randn(seed, 4, size)
    close(advantage.batch_scaled(rewards[:1]), advantage.group_scaled(rewards[:1]))
    centered = advantage.group_centered(rewards)
    close(advantage.batch_scaled(rewards, eps=1e-12) * centered.flatten().std(), centered)


@sabotaged_by("foresight.ops.value.popart", returns(lambda x: x + 1e-3), change("rate", lambda r: 1.0))
@given(SEEDS, st.floats(1e-4, 1.0))
def test_popart_is_the_identity_at_moments_that_it_knows(seed: int, rate: float) -> None:
    weight, bias, target = randn(seed, 1, 5), randn(seed + 1, 1), 7 + 3 * randn(seed + 2, 40)
    known = torch.stack([target.mean(), target.std(correction=0)])
    for found, before in zip(value.popart(weight, bias, known, target, rate), (weight, bias, known), strict=True):
        close(found, before)
    moved = value.popart(weight, bias, known, target + 1, 0.5 * rate)[2][0]
    close(moved, known[0] + 0.5 * rate)


@sabotaged_by("foresight.ops.policy.clipped_surrogate", change("dual_clip", lambda c: 1.5), scaled(1.1))
@given(SEEDS)
def test_the_two_sided_clip_is_the_usual_one_without_a_bound(seed: int) -> None:
    ratio, gain = (3 * randn(seed, 4, 6)).exp(), randn(seed + 1, 4, 6)
    usual = policy.clipped_surrogate(ratio, gain, 0.2)
    close(policy.clipped_surrogate(ratio, gain, 0.2, dual_clip=float("inf")), usual)
    bounded = policy.clipped_surrogate(ratio, gain, 0.2, dual_clip=3.0)
    close(bounded, torch.where(gain < 0, torch.minimum(usual, -3 * gain), usual))


@sabotaged_by("foresight.ops.advantage.mean_scaled", flip_sign, scaled(1.1))
@given(st.floats(0.05, 0.95), st.integers(2, 6))
def test_rewards_over_their_mean_have_the_gradient_of_the_logarithm(p: float, size: int) -> None:
    """The expected gradient over all groups is dp · Σ_{k < G} (1 - p)^(k - 1), which tends to dp / p = d log p."""
    rewards = torch.tensor(list(itertools.product((0.0, 1.0), repeat=size)), dtype=torch.float64)
    chance = (p * rewards + (1 - p) * (1 - rewards)).prod(1)
    score = rewards / p - (1 - rewards) / (1 - p)  # of each answer, with respect to p
    found = (chance * (advantage.mean_scaled(rewards) * score).mean(1)).sum()
    close(found, torch.tensor(sum((1 - p) ** (k - 1) for k in range(1, size)), dtype=torch.float64))
    assert (advantage.mean_scaled(torch.zeros(1, size)) == 0).all()


@sabotaged_by("foresight.ops.advantage.normalize", drop("mask"), change("x", torch.square))
@given(SEEDS)
def test_normalize_sees_only_real_rows(seed: int) -> None:
    x, mask = 3 + 2 * randn(seed, 4, 6), ragged(seed, 4, 6)
    mask[0] = 1
    normal = advantage.normalize(torch.where(mask == 1, x, torch.inf), mask)
    real = normal[mask == 1]
    seen = x[mask == 1]
    torch.testing.assert_close(real, (seen - seen.mean()) / seen.std(), rtol=1e-6, atol=1e-9)
    assert (normal[mask == 0] == 0).all()
    close(real, advantage.normalize(seen))


# --- weights


def first_row_only(mask: Tensor) -> Tensor:
    return mask * (torch.arange(mask.shape[1]) == 0)


@sabotaged_by("foresight.ops.aggregate.per_token", scaled(2.0), change("mask", lambda m: m.cumsum(1)))
@sabotaged_by("foresight.ops.aggregate.per_sequence", scaled(2.0))
@sabotaged_by("foresight.ops.aggregate.per_budget", scaled(2.0), change("mask", first_row_only))
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
def test_for_equal_lengths_all_aggregations_agree(rows: int, length: int, padding: int) -> None:
    mask = torch.cat([torch.ones(rows, length), torch.zeros(rows, padding)], 1)
    expected = mask / (rows * length)
    torch.testing.assert_close(aggregate.per_token(mask), expected)
    torch.testing.assert_close(aggregate.per_sequence(mask), expected)
    torch.testing.assert_close(aggregate.per_budget(mask, rows * length), expected)


RULES: dict[str, Callable[..., Tensor]] = {
    "token": lambda mask, whole: aggregate.per_token(mask, tokens=whole.sum()),
    "sequence": lambda mask, whole: aggregate.per_sequence(mask, sequences=len(whole)),
    "budget": lambda mask, whole: aggregate.per_budget(mask, budget=whole.numel()),
}


@sabotaged_by("foresight.ops.aggregate.per_token", drop("tokens"))
@sabotaged_by("foresight.ops.aggregate.per_sequence", drop("sequences"))
@sabotaged_by("foresight.ops.aggregate.per_budget", change("budget", lambda b: b * torch.rand(()).item()))
@given(SEEDS, st.lists(st.integers(1, 5), max_size=3))
def test_the_gradient_does_not_depend_on_the_micro_batch_split(seed: int, edges: list[int]) -> None:
    features, mask, gain = randn(seed, 6, 4, 3), ragged(seed, 6, 4), randn(seed + 1, 6, 4)

    def gradient_of(rows: slice, weights: Tensor) -> Tensor:
        parameters = torch.ones(3, dtype=torch.float64, requires_grad=True)
        loss = policy.reinforce((features[rows] @ parameters).sigmoid().log(), gain[rows])
        return torch.autograd.grad((weights * loss).sum(), parameters)[0]

    bounds = [0, *sorted({*edges, 3}), 6]
    parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    for rule in RULES.values():
        weights = rule(mask, mask)
        whole = gradient_of(slice(0, 6), weights)
        close(sum(gradient_of(part, weights[part]) for part in parts), whole)
        # The same where a part knows only its own mask and the global denominator.
        close(sum(gradient_of(part, rule(mask[part], mask)) for part in parts), whole)


@sabotaged_by("foresight.ops.aggregate.per_token", lambda f: lambda mask: mask / mask.sum())
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_batch_without_real_rows_weighs_nothing(dtype: torch.dtype) -> None:
    mask = torch.zeros(2, 3, dtype=dtype)
    for weights in (aggregate.per_token(mask), aggregate.per_sequence(mask), aggregate.per_budget(mask, 6)):
        assert weights.dtype == torch.float32
        assert (weights == 0).all()
    with pytest.raises(ValueError, match="positive"):
        aggregate.per_budget(mask, 0)


# --- divergences


def expected(x: Tensor, logits: Tensor) -> Tensor:
    """E_{a~π} x(a), with the chances held fixed: what sampling would see."""
    return (logits.softmax(-1).detach() * x).sum(-1)


def numeric_gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """By central differences."""
    basis = torch.eye(at.numel(), dtype=at.dtype) * 1e-5
    return torch.stack([(function(at + step) - function(at - step)) / 2e-5 for step in basis])


@sabotaged_by("foresight.ops.kl.k1", flip_sign, change("logprob", torch.Tensor.exp))
@sabotaged_by("foresight.ops.kl.k3", scaled(2.0), swap("logprob", "ref_logprob"))
@sabotaged_by("foresight.ops.kl.categorical", flip_sign, swap("logits", "ref_logits"))
@given(SEEDS)
def test_k1_and_k3_are_unbiased(seed: int) -> None:
    logits, ref = randn(seed, 2, 5).unbind()
    logprob, ref_logprob = logits.log_softmax(-1), ref.log_softmax(-1)
    exact = kl.categorical(logits, ref)
    close(expected(kl.k1(logprob, ref_logprob), logits), exact)
    close(expected(kl.k3(logprob, ref_logprob), logits), exact)
    assert (kl.k3(logprob, ref_logprob) >= 0).all() and (kl.k2(logprob, ref_logprob) >= 0).all()


@sabotaged_by("foresight.ops.kl.k1", change("logprob", torch.Tensor.square))
@sabotaged_by("foresight.ops.kl.k2", flip_sign, scaled(2.0))
@sabotaged_by("foresight.ops.kl.k3", flip_sign, swap("logprob", "ref_logprob"))
@sabotaged_by("foresight.ops.kl.categorical", flip_sign, swap("logits", "ref_logits"))
@given(SEEDS)
def test_which_gradient_each_estimator_has_on_average(seed: int) -> None:
    """As a loss: k1 none, k2 that of the KL, k3 that of the reverse KL. In the reward: k1 that of the KL."""
    logits, ref = randn(seed, 2, 4).unbind()
    forward_kl = numeric_gradient(lambda x: kl.categorical(x, ref), logits)
    reverse_kl = numeric_gradient(lambda x: kl.categorical(ref, x), logits)

    def of(estimator: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return gradient(lambda x: expected(estimator(x.log_softmax(-1), ref.log_softmax(-1)), logits), logits)

    torch.testing.assert_close(of(kl.k1), torch.zeros_like(logits), rtol=0, atol=1e-9)
    torch.testing.assert_close(of(kl.k2), forward_kl, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(of(kl.k3), reverse_kl, rtol=1e-5, atol=1e-7)

    def in_the_reward(x: Tensor) -> Tensor:
        logprob = x.log_softmax(-1)
        return expected(policy.reinforce(logprob, -kl.k1(logprob, ref.log_softmax(-1))), logits)

    torch.testing.assert_close(gradient(in_the_reward, logits), forward_kl, rtol=1e-5, atol=1e-7)


@sabotaged_by("foresight.ops.kl.likeliest", flip_sign, swap("logprob", "ref_logprob"))
@given(SEEDS, st.integers(1, 5))
def test_the_divergence_of_the_likeliest_outcomes_is_at_most_the_exact_one(seed: int, count: int) -> None:
    """With all but one of them it is exact."""
    own, ref = randn(seed, 2, 3, 6).log_softmax(-1)
    exact, chosen = kl.categorical(own, ref), ref.topk(5).indices
    some = chosen[..., :count]
    found = kl.likeliest(own.gather(-1, some), ref.gather(-1, some))
    assert (found <= exact + 1e-9).all() and (found >= -1e-9).all()
    close(kl.likeliest(own.gather(-1, chosen), ref.gather(-1, chosen)), exact)


@sabotaged_by("foresight.ops.kl.normal", flip_sign, swap("mean", "std"), swap("std", "ref_std"))
@sabotaged_by("foresight.ops.kl.categorical", flip_sign, swap("logits", "ref_logits"))
@given(SEEDS)
def test_exact_divergences_agree_with_torch(seed: int) -> None:
    from torch.distributions import Categorical, Normal, kl_divergence

    logits, ref = randn(seed, 2, 3, 5).unbind()
    close(kl.categorical(logits, ref), kl_divergence(Categorical(logits=logits), Categorical(logits=ref)))
    mean, ref_mean, std, ref_std = randn(seed + 1, 4, 3, 2).unbind()
    std, ref_std = std.exp(), ref_std.exp()
    exact = kl_divergence(Normal(mean, std), Normal(ref_mean, ref_std)).sum(-1)
    close(kl.normal(mean, std, ref_mean, ref_std), exact)


def naive(original):
    return lambda logits, other: (logits.softmax(-1) * (logits.log_softmax(-1) - other.log_softmax(-1))).sum(-1)


@sabotaged_by("foresight.ops.kl.categorical", naive)
def test_a_ruled_out_action_gives_no_nan_and_no_gradient() -> None:
    logits, ref = torch.tensor([0.5, -0.3, -torch.inf]), torch.tensor([0.1, 0.2, -torch.inf])
    slope = gradient(lambda x: kl.categorical(x, ref), logits)
    assert slope.isfinite().all() and slope[2] == 0 and slope[0] != 0
    one_sided = kl.categorical(torch.zeros(3), ref)
    assert one_sided == torch.inf


# --- value losses


@sabotaged_by("foresight.ops.value.clipped_loss", swap("value", "old_value"), change("clip", lambda c: 0.1 * c))
@sabotaged_by("foresight.ops.value.squared_loss", flip_sign, scaled(2.0))
@given(SEEDS)
def test_value_losses_agree_where_they_must(seed: int) -> None:
    target, old = randn(seed, 2, 3, 4).unbind()
    near = old + 0.2 * randn(seed + 1, 3, 4).tanh()
    far = old + 5 * randn(seed + 2, 3, 4)
    close(value.clipped_loss(near, old, target, 0.2), value.squared_loss(near, target))
    assert (value.clipped_loss(far, old, target, 0.2) >= value.squared_loss(far, target)).all()
    close(gradient(lambda v: value.squared_loss(v, target), near), near - target)
    # A value that has already moved out of the range toward the target is not pulled any further.
    up = gradient(lambda v: value.clipped_loss(v, old, old + 5, 0.2), old + 1)
    assert (up == 0).all()
    close(value.huber_loss(near, target, delta=1e3), value.squared_loss(near, target))


@sabotaged_by("foresight.ops.policy.reinforce", lambda f: lambda logprob, gain: -logprob * gain)
@sabotaged_by("foresight.ops.value.squared_loss", lambda f: lambda found, target: 0.5 * (found - target).square())
def test_no_gradient_flows_into_what_is_data() -> None:
    x = [torch.rand(2, 3, requires_grad=True) for _ in range(4)]
    mask = torch.ones(2, 3)
    losses = [
        policy.reinforce(x[0], x[1]),
        policy.clipped_surrogate(policy.ratio(x[0], x[1]), x[2], 0.2, dual_clip=3.0),
        policy.clipped_surrogate(policy.sequence_ratio(x[0], x[1], mask), x[2], 0.2),
        policy.clipped_weight(x[0], policy.ratio(x[1], x[2]), x[3], 0.2),
        value.squared_loss(x[0], x[1]),
        value.clipped_loss(x[0], x[1], x[2], 10.0),
        value.huber_loss(x[0], x[1]),
    ]
    for loss in losses:
        slopes = torch.autograd.grad(loss.sum(), x, allow_unused=True)
        assert slopes[0] is not None and all(slope is None for slope in slopes[1:])


def _unbounded(original):
    return lambda logprob, sampled, correction, cap: original(logprob, sampled, correction, 1e9)


@sabotaged_by("foresight.ops.policy.importance_weight", _unbounded, swap("logprob", "sampled_logprob"))
def test_importance_weights_are_truncated_or_masked():
    """At w = 1/8, 1, 3/2 and 8 with a cap of 2; without a cap both are w; equal policies have weight 1."""
    learner, sampler = torch.tensor([[0.125, 1.0, 1.5, 8.0]]).log(), torch.zeros(1, 4)
    expected = {"none": [1, 1, 1, 1], "truncated": [0.125, 1, 1.5, 2], "masked": [0, 1, 1.5, 0]}
    for name in policy.CORRECTIONS:
        found = policy.importance_weight(learner, sampler, name, 2.0)
        torch.testing.assert_close(found, torch.tensor([expected[name]], dtype=torch.float32))
        assert torch.equal(policy.importance_weight(learner, learner, name, 2.0), torch.ones(1, 4))
        if name != "none":
            torch.testing.assert_close(policy.importance_weight(learner, sampler, name, 1e9), learner.exp())
