"""What must hold of every member of GRPO's family: each objective as its paper writes it, and what they share."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from foresight.algorithms.language import cispo, dapo, dr_grpo, grpo, gspo, rloo
from foresight.data.text import TokenBatch
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.ops import advantage, aggregate
from foresight.ops.advantage import overlong
from foresight.planning.generation.rollout import complete, roll_until
from foresight.training import microbatch
from foresight.training.options import build_config
from tests import tiny_language
from tests.sabotage import change, flip_sign, loses_generator, returns, sabotaged_by, scaled

FAMILY = [grpo, dr_grpo, dapo, rloo, cispo, gspo]
PROMPTS = ["1+1?", "22+3?", "4?", "4?"]
REWARDS = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.5, 0.0, 2.0]])
TOKENS = 6
family = pytest.mark.parametrize("module", FAMILY, ids=lambda module: module.__name__.rsplit(".", 1)[-1])


def _build(module: ModuleType, **fields):
    base = {"model": tiny_language.folder(), "precision": "float32", "prompts": 4, "group": 4, "max_new_tokens": TOKENS}
    state = module.build(build_config(module.Config, **{**base, "max_grad_norm": math.inf, **fields}))
    state.policy.stop_ids = [0, 5, 9, 14, 20]  # so that completions differ in length
    return state


def _rollout(module: ModuleType, **fields) -> tuple:
    state = _build(module, **fields)
    batch = complete(state.policy, PROMPTS, 4, TOKENS, state.config.temperature, state.generator)
    assert 0 < batch.stopped.float().mean() < 1
    assert len(batch.length.unique()) > 2
    return state, batch


def _gradient(module: ModuleType, state, batch: TokenBatch, rewards: torch.Tensor = REWARDS) -> list[torch.Tensor]:
    """The gradient that an update hands to the optimizer."""
    caught: list[torch.Tensor] = []
    parameters = list(state.policy.parameters())
    state.optimizer.register_step_pre_hook(lambda *_: caught.extend(p.grad.clone() for p in parameters))
    module.update(state, batch, rewards)
    return caught


def _plain_logprob(state, batch: TokenBatch) -> torch.Tensor:
    """Each completion by itself through the untouched transformers model: no cache, no sharing, no padding."""
    module = state.policy.module
    rows = torch.zeros(batch.completion.shape)
    for p, prompt in enumerate(batch.prompts()):
        for g in range(batch.completion.shape[1]):
            length = int(batch.length[p, g])
            tokens = torch.tensor([prompt + batch.completion[p, g, :length].tolist()])
            cached = state.policy.forward(tokens, torch.tensor([tokens.shape[1]]))[0]
            logits = module.get_output_embeddings()(cached)[0, len(prompt) - 1 : -1]
            row = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
            rows = rows.index_put((torch.tensor(p), torch.tensor(g), torch.arange(length)), row)
    return rows


def _objective(module: ModuleType, logprob: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """The objective of each paper at ratio 1, where ∇ρ = ∇log π: written out, completion by completion."""
    total, groups, size = torch.zeros(()), *REWARDS.shape
    kept_tokens = sum(
        int(batch.length[p, g]) for p in range(groups) for g in range(size) if module is not dapo or batch.stopped[p, g]
    )
    for p in range(groups):
        r = REWARDS[p].clone()
        if module is dapo:
            for g in range(size):
                past = max(0, int(batch.length[p, g]) - (TOKENS - 4))
                r[g] -= past / 4
        for g in range(size):
            tokens = int(batch.length[p, g])
            row = logprob[p, g, :tokens]
            if module is dr_grpo:
                total = total + (r[g] - r.mean()) * row.sum() / (groups * size * TOKENS)
            elif module is rloo:
                others = (r.sum() - r[g]) / (size - 1)
                total = total + (r[g] - others) * row.sum() / (groups * size)
            else:
                gain = (r[g] - r.mean()) / (r.std() + 1e-4)
                if module in (grpo, gspo):
                    total = total + gain * row.mean() / (groups * size)
                elif module is cispo or batch.stopped[p, g]:
                    total = total + gain * row.sum() / kept_tokens
    return total


@sabotaged_by("foresight.training.microbatch.split", lambda f: lambda *a: [part[:1] for part in f(*a)])
@family
def test_the_first_gradient_is_that_of_the_papers_objective(module):
    """What each member of GRPO's family computes, before any clip.

    Wrong: a loss that looks alike, with another denominator or another baseline (TRL 3021; Dr. GRPO).
    Decides: at ratio 1, ∇L = −Σ_i w_i A_i ∇log π(o_i) with the paper's own w and A, answer by answer.
    """
    state, batch = _rollout(module)
    caught = _gradient(module, copy.deepcopy(state), batch)
    (-_objective(module, _plain_logprob(state, batch), batch)).backward()
    for mine, parameter in zip(caught, state.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("module", "slot"),
    [
        (grpo, "advantage.group_scaled"),
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
    """The twin of the test above: with any slot mutated the gradient is another."""
    state, batch = _rollout(module)
    sound = _gradient(module, copy.deepcopy(state), batch)
    original = getattr(module, slot.split(".")[1])
    monkeypatch.setattr(module, slot.split(".")[1], lambda *a, **k: 1.5 * original(*a, **k))
    broken = _gradient(module, copy.deepcopy(state), batch)
    assert any((a - b).abs().max() > 1e-3 * a.abs().max() for a, b in zip(sound, broken, strict=True))


@sabotaged_by("copy.deepcopy", loses_generator)
@pytest.mark.parametrize("minibatches", [1, 2])
@family
def test_a_mid_run_state_continues_bit_for_bit(module, minibatches):
    """A run that was stopped and goes on.

    Wrong: the order of prompts or the sampler begins anew, and some are seen twice (TRL 5911; verl 7155).
    Decides: weights after 2 + 2 updates = weights after 4, bit for bit.
    """
    task = TextTask("t", [Example(f"{i}?") for i in range(5)], [Example("6?")], _count_a)
    fields = {"minibatches": minibatches, "epochs": minibatches} if module is not rloo else {}  # it has one step

    def begun() -> Iterator:
        state = _build(module, steps=4, learning_rate=1e-3, **fields)
        return module.train(state.config, task, state)

    *_, (_, _, whole) = begun()
    halfway = next(state for step, _, state in begun() if step == 2)
    *_, (_, _, resumed) = module.train(halfway.config, task, copy.deepcopy(halfway))
    for a, b in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def _count_a(examples, completions):
    return [float(c.count("a")) for c in completions]


@family
def test_a_group_of_one_and_too_few_prompts_are_refused(module):
    with pytest.raises(UserError, match="group must be at least 2"):
        _build(module, group=1)
    task = TextTask("t", [Example("1?")], [Example("2?")], _count_a)
    state = _build(module)
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
stepped = pytest.mark.parametrize("module", STEPS, ids=lambda module: module.__name__.rsplit(".", 1)[-1])


def of_the_rollout(original):
    """A token weighs in its minibatch what it weighs in the whole rollout."""
    return lambda state, batch, scored, weigh, *rest: (original(state, batch, scored, weigh, *rest)[0], weigh(scored))


@sabotaged_by("foresight.training.microbatch.before_the_first", lambda f: lambda *_: None)
@sabotaged_by("foresight.training.microbatch.plan", of_the_rollout)
@stepped
def test_each_minibatch_is_the_objective_of_its_own_groups(module):
    """A rollout is learned from in two steps, each on half of its groups.

    Wrong: the denominator is still the rollout's; or the ratio is to the policy before this step, and so always 1.
    Decides: step k has the gradient of the objective over its own groups, at ρ = π_now / π_before-the-first-step.
    """
    fields = {"overlong_penalty": 0.0, "overlong_filter": False}
    fields = {name: value for name, value in fields.items() if hasattr(module.Config, name)}
    state, batch = _rollout(module, minibatches=2, learning_rate=1e-2, micro_tokens=20, **fields)
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
    state, batch = _rollout(grpo)
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
        _build(module, minibatches=5)


# ---- what only one of them has


def _second_pass(module: ModuleType, shift: torch.Tensor, advantage: float) -> tuple[torch.Tensor, TokenBatch]:
    """∂loss / ∂log π `[P, G, T]`, per token of weight 1, where log π - log π_old is `shift`."""
    state, batch = _rollout(module)
    logprob = state.policy.logprob(batch)[0].detach()
    known = logprob.clone().requires_grad_()
    state.policy.logprob = lambda *_: (known, torch.zeros_like(known))  # type: ignore[method-assign]
    gain, weights = torch.full(REWARDS.shape, advantage), batch.mask.float()
    module.loss(state, batch, gain, weights, logprob - shift)[0].backward()
    return known.grad, batch


@sabotaged_by("foresight.ops.policy.clipped_surrogate", change("clip_high", lambda _: 0.2))
def test_dapo_clips_higher_above_than_below():
    shift = torch.log(torch.tensor([0.7, 0.81, 1.0, 1.19, 1.27, 1.3]))
    up, batch = _second_pass(dapo, shift[:6], 1.0)
    learns = (up != 0)[batch.length == 6].all(0)
    assert learns.tolist() == [True, True, True, True, True, False]
    down, batch = _second_pass(dapo, shift, -1.0)
    assert (down != 0)[batch.length == 6].all(0).tolist() == [False, True, True, True, True, True]


@sabotaged_by("foresight.ops.policy.clipped_weight", change("clip_high", lambda _: 0.2))
def test_cispo_drops_no_token_and_bounds_its_weight():
    shift = torch.log(torch.tensor([0.01, 0.5, 1.0, 2.0, 5.0, 50.0]))
    grad, batch = _second_pass(cispo, shift, 1.0)
    for row in grad[batch.length == 6]:
        torch.testing.assert_close(-row, torch.tensor([0.01, 0.5, 1.0, 2.0, 5.0, 5.0]))


def without_length(original):
    return lambda logprob, old, mask: original(logprob, old, mask) ** mask.sum(1, keepdim=True)


@sabotaged_by("foresight.ops.policy.sequence_ratio", without_length)
def test_gspo_has_one_ratio_for_a_whole_completion():
    shift = 1e-4 * torch.arange(6.0)
    grad, batch = _second_pass(gspo, shift, -1.0)  # a wrong answer: no clip above
    for row, n in zip(grad.flatten(0, 1), batch.length.flatten().tolist(), strict=True):
        s = shift[:n].mean().exp()
        torch.testing.assert_close(row[:n], s.expand(n))  # Σ_t weight 1 · s · 1/n, over n tokens
        assert (row[n:] == 0).all()


@sabotaged_by("foresight.ops.kl.k1", flip_sign, scaled(2.0))
def test_rloo_pays_for_its_distance_from_the_reference_in_the_reward():
    state, batch = _rollout(rloo, kl_coef=0.5)
    torch.manual_seed(1)
    for weight in state.reference.parameters():
        weight.mul_(1 + 0.1 * torch.randn_like(weight))
    with torch.no_grad():
        distance = (_plain_logprob(state, batch) - state.reference.logprob(batch)[0]).sum(-1)
    shaped = REWARDS - 0.5 * distance
    caught = _gradient(rloo, copy.deepcopy(state), batch)
    state.reference = None
    expected = _gradient(rloo, state, batch, shaped)
    for a, b in zip(caught, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@sabotaged_by("foresight.ops.advantage.overlong", flip_sign, returns(lambda x: x * 0))
def test_soft_overlong_punishment_as_equation_13_has_it():
    length = torch.tensor([[1, 12, 13, 14, 16, 20]])
    assert overlong(length, 16, 4).tolist() == [[0.0, 0.0, -0.25, -0.5, -1.0, -1.0]]


def everything(original):
    return lambda rewards: torch.ones(len(rewards), dtype=torch.bool)


@sabotaged_by("foresight.ops.advantage.differs", everything)
def test_dynamic_sampling_refills_until_the_batch_is_full():
    from foresight.ops.advantage import differs

    state = _build(dapo)
    task = TextTask("t", [Example(f"{i}?") for i in range(8)], [Example("9?")], _count_a)
    rollout, seen = roll_until(differs, 20, state.policy, task, 6, 4, TOKENS, 1.0, state.generator)
    assert seen["filled"] == 1 and seen["batches"] > 1
    assert len(rollout.examples) == 6 and len(rollout.answers) == 24
    assert (rollout.rewards.amax(1) > rollout.rewards.amin(1)).all()
    for g, text in enumerate(rollout.answers):  # tokens, text, example and reward still belong together
        p, k = divmod(g, 4)
        row = rollout.batch.completion[p, k, : rollout.batch.length[p, k]].tolist()
        assert state.policy.decode(row) == text
        assert rollout.rewards[p, k] == text.count("a")
        assert rollout.batch.prompts()[p] == state.policy.encode(rollout.examples[p].prompt)


@sabotaged_by("foresight.ops.advantage.differs", lambda f: lambda rewards: ~f(rewards))
def test_dynamic_sampling_has_a_limit_and_says_how_full_it_is():
    from foresight.ops.advantage import differs

    state = _build(dapo)
    task = TextTask("t", [Example(f"{i}?") for i in range(8)], [], lambda e, c: [1.0] * len(c))
    rollout, seen = roll_until(differs, 3, state.policy, task, 4, 4, TOKENS, 1.0, state.generator)
    assert seen == {"reward": 1.0, "batches": 3.0, "filled": 0.0}
    assert dapo.update(state, rollout.batch, rollout.rewards)["equal_reward_groups"] < 1  # lengths differ
    fields = {"overlong_penalty": 0.0, "overlong_filter": False}
    state.config = build_config(dapo.Config, tiny_language.folder(), precision="float32", **fields)
    assert dapo.update(state, rollout.batch, rollout.rewards)["equal_reward_groups"] == 1


def test_an_overlong_buffer_longer_than_the_limit_is_refused_where_there_is_a_punishment():
    with pytest.raises(UserError, match="overlong_buffer"):
        _build(dapo, overlong_buffer=7)
    assert _build(dapo, overlong_buffer=7, overlong_penalty=0.0).step == 0
