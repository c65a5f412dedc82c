"""Groups: the baseline and the scale of an answer, and answers without a score."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

from foresight.algorithms.language import dapo, dr_grpo, grpo, gspo, rlhf_ppo
from foresight.data.text import TokenBatch
from foresight.ops import advantage, kl
from foresight.ops.fused import clipped
from foresight.ops.policy import reinforce
from tests.invariants import subjects
from tests.invariants.subjects import FAMILY, REWARDS, of
from tests.sabotage import change, sabotaged_by


def _estimators():
    return advantage.group_centered, advantage.group_scaled, advantage.leave_one_out


def _unchanged(state, before) -> bool:
    return all(torch.equal(value, before[name]) for name, value in state.policy.state_dict().items())


# ---- groups that teach nothing


@sabotaged_by("foresight.ops.advantage._centered", lambda f: lambda r: (f(r)[0] + 1e-3, f(r)[1]))
@of(*FAMILY)
def test_groups_of_equal_rewards_change_nothing(module):
    """All answers to a question are right, or all are wrong.

    Wrong: rounding error is divided by a standard deviation of nearly 0 (NeMo 4158), or nothing reports that there was
    no gradient (autocontext 1067).
    Invariant: r_i = r for all i gives A_i = 0 exactly; such groups are skipped and counted.
    """
    state = subjects.build(module, overlong_penalty=0.0, overlong_filter=False)
    batch, before = subjects.sample(module, state), copy.deepcopy(state.policy.state_dict())
    rewards = torch.tensor([[1.0] * 4, [0.0] * 4, [0.3] * 4, [-1.0] * 4])
    assert subjects.update(module, state, batch, rewards)["equal_reward_groups"] == 1
    assert _unchanged(state, before)


@sabotaged_by("foresight.ops.advantage.group_centered", change("rewards", lambda r: r * torch.arange(1.0, 9)))
@sabotaged_by("foresight.ops.advantage.group_scaled", change("rewards", lambda r: r * torch.arange(1.0, 9)))
@sabotaged_by("foresight.ops.advantage.leave_one_out", change("rewards", lambda r: r * torch.arange(1.0, 9)))
@pytest.mark.parametrize("reward", [0.1, 1.0, 1 / 3, -7.7e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_of_the_mean_gives_no_advantage(reward, dtype):
    """The mean of equal numbers may differ from them by rounding.

    Wrong: `std == 0` is then false, and a group of equal rewards gets advantages of any size (NeMo 4158).
    Invariant: a group is equal if max r = min r, not if std r = 0.
    """
    rewards = torch.full((3, 8), reward, dtype=dtype)
    for estimator in _estimators():
        logprob = (-torch.rand(24, 4, dtype=dtype)).requires_grad_()
        gain = estimator(rewards).reshape(24, 1).expand(24, 4)
        assert (torch.autograd.grad(reinforce(logprob, gain).sum(), logprob)[0] == 0).all()


@sabotaged_by("foresight.training.microbatch.descend", change("groups", torch.zeros_like, "skip_them"))
def test_the_penalty_acts_where_all_rewards_are_equal():
    """A group with advantage 0 still has its KL term.

    Wrong: the penalty acts only where rewards differ (TRL 5640, 7068).
    Invariant: A = 0 leaves β ∇ 1/N Σ_i 1/|o_i| Σ_t k3_it, over all N answers.
    """
    state = subjects.build(grpo, kl_coef=0.5)
    subjects.disturb(state.reference)
    batch = subjects.sample(grpo, state)
    caught = subjects.gradient(grpo, copy.deepcopy(state), batch, torch.ones(4, 4))
    penalty = kl.k3(state.policy.logprob(batch)[0], state.reference.logprob(batch)[0].detach())
    (0.5 * (penalty * batch.mask).sum(-1) / batch.length).mean().backward()
    subjects.same(caught, [p.grad for p in state.policy.parameters()])


# ---- who belongs together


def by_text(original):
    """Groups of equal prompts are merged: the last two are."""

    def mutant(rewards):
        parts = original(rewards[:2]), original(rewards[2:].reshape(1, -1))
        return tuple(torch.cat([x, y.reshape(-1, x.shape[1]).expand(2, -1)]) for x, y in zip(*parts, strict=True))

    return mutant


@sabotaged_by("foresight.ops.advantage._centered", by_text)
@of(*FAMILY)
def test_groups_are_distinguished_by_position_and_not_by_text(module):
    """The same question occurs twice in a batch.

    Wrong: its answers are merged into one group, or a dictionary keeps only one of the two (NeMo 3882; d1 19; R1-V 67;
    TRL 2803; Search-R1 88).
    Invariant: A depends only on the rewards in its own row of `[P, G]`; two equal rows, each with equal rewards, have
    no gradient.
    """
    state = subjects.build(module, overlong_penalty=0.0)
    batch = subjects.sample(module, state)
    assert batch.prompts()[2] == batch.prompts()[3]
    rewards = torch.tensor([[0.0] * 4, [1.0] * 4, [1.0] * 4, [0.0] * 4])
    assert subjects.gradient(module, state, batch, rewards) == []


def without_each(original):
    """The deviation of the others only, another one for each."""

    def mutant(rewards, *rest):
        centered = original(rewards, *rest)
        others = torch.stack([rewards[:, [j for j in range(8) if j != i]].std(1) for i in range(8)], 1)
        return centered / (others + 1e-4)

    return mutant


@sabotaged_by("foresight.ops.advantage.leave_one_out", without_each)
@sabotaged_by("foresight.ops.advantage.group_scaled", without_each)
def test_a_group_has_one_baseline_and_one_scale():
    """All answers of a group have the same baseline and the same scale.

    Wrong: an answer that is left out of its own standard deviation gets a scale of its own, or none, which splits the
    group (NeMo 3469); rewards other than 0 and 1 are treated as 0 or 1 (OpenRLHF 1272).
    Invariant: A_i − A_j = (r_i − r_j) / s for all pairs, with one s > 0 per group, and Σ_i A_i = 0.
    """
    rewards = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0.5, 0], [0.1, -3, 7, 0.2, 0, 9, 1, 1]])
    apart = rewards[:, :, None] - rewards[:, None]
    for estimator in _estimators():
        gain = estimator(rewards)
        slope = (gain.amax(1) - gain.amin(1)) / (rewards.amax(1) - rewards.amin(1))
        assert (slope > 0).all()
        torch.testing.assert_close(gain[:, :, None] - gain[:, None], slope[:, None, None] * apart, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gain.sum(1), torch.zeros(3), atol=1e-5, rtol=0)


def naive(original):
    return lambda x, mask=None, eps=1e-8: (x - x.mean()) / (x.sub(x.mean()).square().sum() / (x.numel() - 1)).sqrt()


@sabotaged_by("foresight.ops.advantage.normalize", naive)
def test_one_sample_has_advantage_zero():
    """A batch or a group with a single score.

    Wrong: its standard deviation is NaN, and then every weight is (MetaClaw 47; verl sets the standard deviation to 1).
    Invariant: A = 0 if there is nothing to compare with.
    """
    assert advantage.normalize(torch.tensor([[3.0]])).tolist() == [[0.0]]
    assert advantage.normalize(torch.tensor([[3.0, 9.0]]), torch.tensor([[1.0, 0.0]])).tolist() == [[0.0, 0.0]]
    for estimator in _estimators():
        assert estimator(torch.tensor([[3.0], [math.nan]])).tolist() == [[0.0], [0.0]]
        assert estimator(torch.tensor([[3.0, math.nan]])).tolist() == [[0.0, 0.0]]


@sabotaged_by("foresight.ops.advantage.normalize", naive)
@pytest.mark.parametrize("count", [7, 13, 64])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3])
def test_equal_numbers_normalize_to_zero(value, count):
    """The mean of equal numbers may differ from them: in a whole batch, masked or not, and in PPO's compiled objective.

    Wrong: an error of the mean in the last place, over a deviation of the same size, is no small number.
    Invariant: A = 0 exactly where all are equal.
    """
    x = torch.full((count,), value)
    masked, mask = torch.cat([x, torch.tensor([5.0, math.nan])]), torch.cat([torch.ones(count), torch.zeros(2)])
    assert not advantage.normalize(x).any()
    assert not advantage.normalize(masked, mask).any() and not advantage.normalize(masked[None], mask[None]).any()
    zeros, nothing = torch.zeros(count), torch.zeros(count, 3)
    grad, _, watched = clipped.clipped_objective(
        nothing, zeros, zeros.long(), zeros - math.log(3), x, zeros, zeros, 0.2, None, 0.0, 0.0, True
    )
    assert not grad.any() and watched[0] == 0


@sabotaged_by("foresight.training.microbatch.step", lambda f: lambda *a: {**f(*a), "grad_norm": 0.0})
@of(grpo, dr_grpo, gspo)
def test_a_loss_of_zero_still_has_a_gradient(module):
    """On-policy and without a penalty, advantages that are centered in each group sum to 0.

    Wrong: a loss of 0 is mistaken for a bug (TRL 3452; open-r1 239).
    Invariant: at ratio 1, L = −Σ_i w A_i = 0, but ∇L = −Σ_i w A_i ∇log π(o_i) ≠ 0: look at `grad_norm`.
    """
    state = subjects.build(module)
    batch = subjects.sample(module, state)
    alike = dataclasses.replace(batch, length=torch.full_like(batch.length, 2))  # of one length, so that w is one too
    metrics = subjects.update(module, state, alike)
    assert abs(metrics["loss"]) < 1e-6 and metrics["grad_norm"] > 0.1


# ---- answers without a score


def _answers(batch: TokenBatch, chosen: list[int]) -> TokenBatch:
    """The first group with some of its answers."""
    first = batch.select(torch.tensor([0]))
    rows = ("completion", "length", "logprob", "stopped")
    return dataclasses.replace(first, **{name: getattr(first, name)[:, chosen] for name in rows})


@sabotaged_by("tests.invariants.subjects.update", change("rewards", lambda r: r.nan_to_num(), "none_is_zero"))
@of(*FAMILY, rlhf_ppo)
def test_an_unscorable_answer_is_left_out_and_is_not_a_zero(module):
    """A reward function returns None: the answer has no score.

    Wrong: None counts as 0 and shifts the baseline of its group, or NaN reaches the weights (verl 5635; TRL 5281).
    Invariant: ∇L = ∇L of the batch without that answer (Dr. GRPO's constant denominator does not change).
    """
    fields = {"overlong_penalty": 0.0, "overlong_filter": False}
    batch = subjects.sample(module, subjects.build(module))
    kept, rewards = [0, 1, 3], torch.tensor([[0.0, 1.0, math.nan, 2.0]])
    caught = subjects.gradient(module, subjects.build(module, **fields), _answers(batch, [0, 1, 2, 3]), rewards)
    expected = subjects.gradient(module, subjects.build(module, **fields), _answers(batch, kept), rewards[:, kept])
    share = 3 / 4 if module is dr_grpo else 1.0
    subjects.same(caught, [share * g for g in expected])


@sabotaged_by("tests.invariants.subjects.update", change("rewards", lambda r: torch.rand(r.shape), "guess"))
@of(*FAMILY, rlhf_ppo)
def test_a_batch_without_a_score_changes_nothing(module):
    """No answer has a score.

    Wrong: 0/0 reaches the weights (TRL 5826), or the optimizer takes a step with gradient 0, which momentum makes
    nonzero.
    Invariant: an empty sum is 0 and no step is taken; the metric `unscorable` gives the share.
    """
    for kl_coef in (0.0, 0.1):
        state = subjects.build(module, kl_coef=kl_coef)
        batch = subjects.sample(module, state)
        subjects.update(module, state, batch)  # so that the optimizer is under way
        before = copy.deepcopy(state.policy.state_dict())
        metrics = subjects.update(module, state, batch, torch.full_like(REWARDS, math.nan))
        assert metrics["unscorable"] == 1 and all(math.isfinite(value) for value in metrics.values())
        assert _unchanged(state, before)


@sabotaged_by("foresight.training.microbatch.descend", change("groups", torch.ones_like, "step_anyway"))
def test_a_batch_of_truncated_answers_is_skipped_and_reported():
    """Every answer hit the limit, and truncated answers are not trained on.

    Wrong: NaN (TRL 5826), or an unreported optimizer step with gradient 0 (TRL 3248, 4976).
    Invariant: no answer is left, so no step is taken, and `left_out_groups` is 1.
    """
    state = subjects.build(dapo)
    batch, before = subjects.sample(dapo, state), copy.deepcopy(state.policy.state_dict())
    batch.stopped.fill_(False)
    metrics = subjects.update(dapo, state, batch)
    assert metrics["left_out_groups"] == 1 and metrics["equal_reward_groups"] == 0 and "loss" not in metrics
    assert _unchanged(state, before)
