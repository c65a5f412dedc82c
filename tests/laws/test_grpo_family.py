"""What the members of GRPO's family share: the slots of their objectives, exact resume, and several steps a rollout."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

from foresight.algorithms.language import cispo, dapo, dr_grpo, grpo, gspo, rloo
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.ops import advantage, aggregate
from foresight.training import microbatch
from tests.algorithms.language.group_runs import REWARDS, TOKENS, build, count_a, gradient, rollout
from tests.sabotage import change, loses_generator, sabotaged_by

FAMILY = [grpo, dr_grpo, dapo, rloo, cispo, gspo]


def named(module):
    return module.__name__.rsplit(".", 1)[-1]


family = pytest.mark.parametrize("module", FAMILY, ids=named)


@pytest.mark.parametrize(
    ("module", "slot"),
    [
        (grpo, "advantage.scaled"),
        (grpo, "aggregate.per_sequence"),
        (dr_grpo, "advantage.group_centered"),
        (dr_grpo, "aggregate.per_budget"),
        (dapo, "advantage.group_scaled"),
        (dapo, "advantage.overlong"),
        (dapo, "aggregate.per_token"),
        (rloo, "advantage.leave_one_out"),
        (rloo, "aggregate.per_budget"),
        (cispo, "advantage.group_scaled"),
        (cispo, "aggregate.per_token"),
        (gspo, "advantage.group_scaled"),
        (gspo, "aggregate.per_sequence"),
    ],
)
def test_each_slot_decides_the_gradient(module, slot, monkeypatch):
    """The twin of the tests of first gradients, a file a member: with any slot mutated the gradient is another."""
    state, batch = rollout(module)
    sound = gradient(module, copy.deepcopy(state), batch)
    original = getattr(module, slot.split(".")[1])
    monkeypatch.setattr(module, slot.split(".")[1], lambda *a, **k: 1.5 * original(*a, **k))
    broken = gradient(module, copy.deepcopy(state), batch)
    assert any((a - b).abs().max() > 1e-3 * a.abs().max() for a, b in zip(sound, broken, strict=True))


@sabotaged_by("copy.deepcopy", loses_generator)
@family
def test_a_mid_run_state_continues_bit_for_bit(module):
    """A run is stopped and resumed.

    Wrong: the order of prompts or the sampler is reset, and some prompts are seen twice (TRL 5911; verl 7155).
    Invariant: weights after 2 + 2 updates = weights after 4, bit for bit.
    """
    _continues(module, 2 if module is not rloo else 1)


@pytest.mark.parametrize("module", [m for m in FAMILY if m is not rloo], ids=named)
def test_a_mid_run_state_continues_with_one_step_a_rollout(module):
    _continues(module, 1)


def _continues(module, minibatches):
    task = TextTask("t", [Example(f"{i}?") for i in range(5)], [Example("6?")], count_a)
    fields = {"minibatches": minibatches, "epochs": minibatches} if module is not rloo else {}  # it has one step
    begun = build(module, steps=4, learning_rate=1e-3, **fields)
    for step, _, whole in module.train(begun.config, task, begun):
        if step == 2:
            halfway = copy.deepcopy(whole)
    *_, (_, _, resumed) = module.train(halfway.config, task, halfway)
    for a, b in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(a, b)


@family
def test_a_group_of_one_and_too_few_prompts_are_refused(module):
    with pytest.raises(UserError, match="group must be at least 2"):
        build(module, group=1)
    task = TextTask("t", [Example("1?")], [Example("2?")], count_a)
    state = build(module)
    with pytest.raises(UserError, match="1 training prompts"):
        next(module.train(state.config, task, state))


# ---- several steps a rollout

STEPS = {  # those that divide by an old policy: their advantages, and what a token weighs in a minibatch
    grpo: (advantage.group_scaled, aggregate.per_sequence),
    dr_grpo: (advantage.group_centered, lambda mask: mask / (mask[..., 0].numel() * TOKENS)),
    dapo: (advantage.group_scaled, aggregate.per_token),
    cispo: (advantage.group_scaled, aggregate.per_token),
    gspo: (advantage.group_scaled, aggregate.per_sequence),
}
stepped = pytest.mark.parametrize("module", STEPS, ids=named)


def of_the_rollout(original):
    """A token weighs in its minibatch what it weighs in the whole rollout."""
    return lambda state, batch, scored, weigh, *rest: (original(state, batch, scored, weigh, *rest)[0], weigh(scored))


@sabotaged_by("foresight.training.microbatch.record_old_policy", lambda f: lambda *_: None)
@sabotaged_by("foresight.training.microbatch.plan", of_the_rollout)
@stepped
def test_each_minibatch_is_the_objective_of_its_own_groups(module):
    """A rollout is trained on in two steps, each on half of its groups.

    Wrong: the denominator is still that of the rollout, or the ratio is relative to the policy before this step and so
    always 1.
    Invariant: step k has the gradient of the objective of its own groups, at ρ = π_now / π_before-the-first-step.
    """
    fields = {"overlong_penalty": 0.0, "overlong_filter": False}
    fields = {name: value for name, value in fields.items() if hasattr(module.Config, name)}
    state, batch = rollout(module, minibatches=2, learning_rate=1e-2, micro_tokens=20, **fields)
    first = copy.deepcopy(state)
    steps: list[tuple] = []
    state.optimizer.register_step_pre_hook(
        lambda *_: steps.append((copy.deepcopy(state.policy), [p.grad.clone() for p in state.policy.parameters()]))
    )
    module.update(state, batch, REWARDS)
    gain, weigh = STEPS[module]
    order = torch.randperm(4, generator=first.generator).tensor_split(2)
    for groups, (now, caught) in zip(order, steps, strict=True):
        few, moved = batch.select(groups), dataclasses.replace(first, policy=now)
        old = first.policy.logprob(few)[0].detach()
        module.loss(moved, few, gain(REWARDS[groups]), weigh(few.mask), old)[0].backward()
        for mine, parameter in zip(caught, now.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-4)


@sabotaged_by("torch.randperm", lambda f: lambda n, **_: torch.arange(n))
def test_minibatches_are_shuffled_and_have_every_group_once():
    state, batch = rollout(grpo)
    groups, found = torch.ones(4, dtype=torch.bool), set()
    for _ in range(8):
        steps, weights = microbatch.plan(state, batch, batch.mask, aggregate.per_token, groups, 2)
        halves = [tuple(sorted(torch.cat(parts).tolist())) for parts in steps]
        assert [len(half) for half in halves] == [2, 2] and sorted(sum(halves, ())) == [0, 1, 2, 3]
        torch.testing.assert_close(weights.sum(), torch.tensor(2.0))
        found.add(halves[0])
    assert len(found) > 1
    before = state.generator.get_state()
    (parts,), _ = microbatch.plan(state, batch, batch.mask, aggregate.per_token, groups, 1)
    assert sorted(torch.cat(parts).tolist()) == [0, 1, 2, 3]
    assert torch.equal(before, state.generator.get_state())  # one minibatch has no order to draw


@stepped
def test_more_minibatches_than_prompts_are_refused(module):
    with pytest.raises(UserError, match="minibatches is 5"):
        build(module, minibatches=5)


@sabotaged_by("foresight.ops.policy.importance_weight", change("correction", lambda _: "none"))
@family
def test_tokens_of_another_sampler_are_weighted(module):
    """A sampler that gave each token a third, or 2/3, of the learner's probability: 1.5, 2 or 0 times the gradient."""
    state, batch = rollout(module)
    plain = gradient(module, copy.deepcopy(state), batch)
    for kind, gap, factor in (
        ("truncated", 1.5, 1.5),
        ("truncated", 3.0, 2.0),
        ("masked", 1.5, 1.5),
        ("masked", 3.0, 0),
    ):
        corrected = build(module, importance_correction=kind, importance_cap=2.0)
        shifted = dataclasses.replace(batch, logprob=corrected.policy.logprob(batch)[0].detach() - math.log(gap))
        for mine, theirs in zip(gradient(module, corrected, shifted), plain, strict=True):
            torch.testing.assert_close(mine, factor * theirs, atol=2e-6, rtol=1e-3)


def test_an_unknown_correction_and_a_cap_below_one_are_refused():
    with pytest.raises(UserError, match="Did you mean 'masked'"):
        build(grpo, importance_correction="mask")
    with pytest.raises(UserError, match=r"importance_cap is 0\.5"):
        build(rloo, importance_cap=0.5)


@pytest.mark.parametrize(("module", "fields"), [(grpo, {"kl_estimator": "k1", "scale": "batch"}), (rloo, {})])
def test_rewards_are_equal_before_a_penalty(module, fields):
    """The share of groups with equal rewards is that of the task's rewards, whatever the KL in the reward adds."""
    state, batch = rollout(module, kl_coef=0.1, **fields)
    for weight in state.reference.module.parameters():
        weight.data.add_(0.1 * torch.randn_like(weight))
    rewards = torch.tensor([[1.0] * 4, [0.0] * 4, [0.3] * 4, [-1.0, 1.0, 0.0, 0.0]])
    metrics = module.update(state, batch, rewards)
    assert metrics["equal_reward_groups"] == 0.75 and metrics["kl"] != 0
