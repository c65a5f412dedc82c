"""Scaling: the weight of a token, for any split into micro-batches and any precision."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from foresight.algorithms.language import dapo, dpo, dr_grpo, rlhf_ppo
from foresight.ops import aggregate
from tests.invariants import subjects
from tests.invariants.subjects import ALL, FAMILY, REWARDS, of
from tests.sabotage import change, sabotaged_by


def averaged(original):
    """The mean of a mean of each part: what gradient accumulation does by itself."""

    def mutant(optimizer, pieces, *rest):
        pieces = list(pieces)

        def share(piece):
            value, sums = piece()
            return value / len(pieces), sums

        return original(optimizer, [lambda p=piece: share(p) for piece in pieces], *rest)

    return mutant


@sabotaged_by("foresight.training.microbatch.step", averaged)
@pytest.mark.parametrize("micro_tokens", [1, 20])
@of(*ALL)
def test_the_gradient_does_not_depend_on_the_micro_batches(module, micro_tokens):
    """A batch is split into micro-batches to fit into memory.

    Wrong: the means of the parts are averaged, so tokens in short parts weigh more (TRL 3231, 2881; verl 3332; ms-swift
    10117; mlx-lm 1413).
    Invariant: ∇L = Σ_parts ∇ Σ w_it l_it with weights w computed from the whole batch before the split.
    """
    fields = {"kl_coef": 0.1, "entropy_coef": 0.1}
    batch = subjects.sample(module, subjects.build(module))
    whole = subjects.gradient(module, subjects.build(module, micro_tokens=10_000, **fields), batch)
    split = subjects.gradient(module, subjects.build(module, micro_tokens=micro_tokens, **fields), batch)
    subjects.same(whole, split, atol=1e-6)


@sabotaged_by("foresight.ops.aggregate.per_token", change("mask", torch.ones_like, "all_tokens"))
def test_the_denominator_counts_only_what_is_trained_on():
    """Truncated answers are filtered out of the loss.

    Wrong: they stay in the denominator, so the step shrinks as more answers are truncated (TRL 6369, 6439).
    Invariant: L = Σ_kept l_it / Σ_kept |o_i|: a group of truncated answers changes nothing.
    """
    fields = {"overlong_penalty": 0.0}
    batch = subjects.sample(dapo, subjects.build(dapo))
    batch.stopped[1] = False
    caught = subjects.gradient(dapo, subjects.build(dapo, **fields), batch)
    others = torch.tensor([0, 2, 3])
    expected = subjects.gradient(dapo, subjects.build(dapo, **fields), batch.select(others), REWARDS[others])
    subjects.same(caught, expected)


@sabotaged_by("foresight.data.text.TokenBatch.scored", change("whole", lambda whole: False, "all_answers"))
@of(*FAMILY, rlhf_ppo)
def test_no_gradient_reaches_a_truncated_answer(module):
    """A truncated answer counts in the baseline of its group, but is not trained on.

    Wrong: it is penalized for a missing end.
    Invariant: ∂L/∂log π(o_t) = 0 for all t of an answer that hit the limit; without the filter it is not.
    """
    state = subjects.build(module, overlong_penalty=0.0, mask_truncated=True)
    batch, caught = subjects.sample(module, state), list[torch.Tensor]()
    original = state.policy.logprob

    def watched(few, *rest):
        logprob, entropy = original(few, *rest)
        if logprob.requires_grad:
            logprob.register_hook(lambda grad: caught.append(grad[~few.stopped]))
        return logprob, entropy

    state.policy.logprob = watched
    subjects.update(module, state, batch)
    assert caught and all(len(grad) and (grad == 0).all() for grad in caught)
    caught.clear()
    name = "overlong_filter" if module is dapo else "mask_truncated"
    state.config = dataclasses.replace(state.config, **{name: False})
    subjects.update(module, state, batch)
    assert any((grad != 0).any() for grad in caught)


@sabotaged_by("foresight.ops.aggregate.per_budget", lambda f: lambda mask, _: aggregate.per_sequence(mask))
def test_a_token_of_a_long_answer_weighs_as_much_as_any_other():
    """Dr. GRPO divides neither by the length of the answer nor by the standard deviation of the rewards.

    Wrong: 1/|o| penalizes a token of a long wrong answer less than one of a short one, so wrong answers grow
    (arXiv:2503.20783).
    Invariant: |∂L/∂log π(o_t)| = |A| / (P · G · limit), for every token of every answer.
    """
    state = subjects.build(dr_grpo, micro_tokens=10_000)
    batch, caught = subjects.sample(dr_grpo, state), list[torch.Tensor]()
    original = state.policy.logprob

    def watched(few, *rest):
        logprob, entropy = original(few, *rest)
        logprob.register_hook(lambda grad: caught.append(grad[few.mask].abs()))
        return logprob, entropy

    state.policy.logprob = watched
    subjects.update(dr_grpo, state, batch, torch.tensor([[0.0, 1.0, 1.0, 0.0]] * 4))
    (weights,) = caught
    torch.testing.assert_close(weights, torch.full_like(weights, 0.5 / (4 * 4 * subjects.TOKENS)))


@sabotaged_by("foresight.algorithms.language.dpo.log_odds", lambda f: lambda s, b: f(s, b) * b.length)
def test_the_weight_of_an_answer_does_not_depend_on_its_length():
    """DPO with `length_normalized`: a mean over tokens instead of a sum.

    Wrong: sums of log-ratios grow with the length, so the longer answer of a pair dominates (dpo 35; TRL 2003, 2964).
    Invariant: Σ_t ∂D/∂log π(y_t) = 1 for the chosen and −1 for the rejected answer, whatever their lengths.
    """
    state = subjects.build(dpo, length_normalized=True)
    batch = subjects.sample(dpo, state)
    assert len(batch.length.unique()) > 2
    known = state.policy.logprob(batch)[0].detach().requires_grad_()
    state.policy.logprob = lambda _: (known, None)
    odds = dpo.log_odds(state, batch)
    (odds[:, 0] - odds[:, 1]).sum().backward()
    torch.testing.assert_close((known.grad * batch.mask).sum(-1), torch.tensor([[1.0, -1.0]]).expand(len(odds), 2))


def coarse(original):
    """Where products are narrow, hidden states are rounded to halves; their gradient passes."""

    def mutant(self, tree):
        hidden = original(self, tree)
        return hidden if self.autocast is None else hidden + ((2 * hidden).round() / 2 - hidden).detach()

    return mutant


@sabotaged_by("foresight.nets.language.model.LanguageModel.states", coarse)
@of(*ALL)
def test_the_gradient_in_bfloat16_is_close_to_that_in_float32(module):
    """Matrix products in bfloat16 with float32 weights.

    Wrong: sums, softmax, norms or weights are in bfloat16 too, and small gradients are rounded away (arXiv:2510.26788).
    Invariant: on one batch, cos(∇L_bf16, ∇L_fp32) > 0.9985, and the norms are within 3%.
    """
    batch = subjects.sample(module, subjects.build(module))
    wide, narrow = (
        torch.cat([g.flatten() for g in subjects.gradient(module, subjects.build(module, precision=p), batch)])
        for p in ("float32", "bfloat16")
    )
    assert torch.nn.functional.cosine_similarity(wide, narrow, dim=0) > 0.9985
    assert abs(narrow.norm() / wide.norm() - 1) < 0.03
