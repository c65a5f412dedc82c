"""What must hold of GRPO whatever the model. What holds of every algorithm that samples is in tests/invariants."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from foresight.algorithms.language import grpo
from foresight.data.text import TokenBatch
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.ops import advantage
from foresight.ops.policy import clipped_surrogate
from foresight.planning.generation.rollout import complete
from foresight.training.options import build_config
from tests import tiny_language
from tests.algorithms.language.group_runs import REWARDS, first_gradients, second_pass
from tests.sabotage import begins_anew, change, flip_sign, sabotaged_by, scaled

PROMPTS = ["1+1?", "22+3?", "4?", "4?"]  # two are equal: groups are distinguished by place, not by text


def _config(**fields) -> grpo.Config:
    base = {"model": tiny_language.folder(), "precision": "float32", "prompts": 4, "group": 4, "max_new_tokens": 6}
    return build_config(grpo.Config, **{**base, **fields})


def _rollout(**fields) -> tuple[grpo.State, TokenBatch, torch.Tensor]:
    state = grpo.build(_config(**fields))
    batch = complete(state.policy, PROMPTS, 4, 6, state.config.temperature, state.generator)
    rewards = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.5, 0.0, 2.0]])
    return state, batch, rewards


def _gradient(state: grpo.State, batch: TokenBatch, rewards: torch.Tensor) -> list[torch.Tensor]:
    """The gradient that an update hands to the optimizer."""
    caught: list[torch.Tensor] = []
    parameters = list(state.policy.parameters())
    state.optimizer.register_step_pre_hook(lambda *_: caught.extend(p.grad.clone() for p in parameters))
    grpo.update(state, batch, rewards)
    return caught


def objective(logprob, rewards, length, stopped, batch) -> torch.Tensor:
    """arXiv:2402.03300, section 4.1: scaled advantages, the mean over tokens, then over completions."""
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return (advantage * logprob.sum(1) / length).sum() / REWARDS.numel()


@sabotaged_by("foresight.training.microbatch.split", lambda f: lambda *a: [part[:1] for part in f(*a)])
def test_the_first_gradient_is_that_of_the_papers_objective():
    """The gradient before any clipping, for GRPO and, in their own test files, its variants.

    Wrong: a loss that looks alike but has another denominator or baseline (TRL 3021; Dr. GRPO).
    Invariant: at ratio 1, ∇L = −Σ_i w_i A_i ∇log π(o_i) with the paper's own w and A, per answer.
    """
    for mine, expected in first_gradients(grpo, objective):
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-4)


@sabotaged_by("foresight.ops.advantage.group_scaled", flip_sign, scaled(2.0))
@sabotaged_by("foresight.ops.aggregate.per_sequence", scaled(0.5))
def test_the_first_gradient_is_the_policy_gradient():
    state, batch, rewards = _rollout(max_grad_norm=math.inf)
    caught = _gradient(copy.deepcopy(state), batch, rewards)
    logprob, _ = state.policy.logprob(batch)
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    objective = (logprob.sum(-1) / batch.length * advantage).sum() / rewards.numel()
    (-objective).backward()
    for mine, parameter in zip(caught, state.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-4)


@sabotaged_by("foresight.ops.advantage.group_scaled", change("rewards", torch.nan_to_num, "none_is_zero"))
def test_an_unscorable_completion_is_left_out_and_is_not_a_zero():
    state, batch, rewards = _rollout(max_grad_norm=math.inf)
    rewards[0, 1] = math.nan
    caught = _gradient(copy.deepcopy(state), batch, rewards)
    logprob, _ = state.policy.logprob(batch)
    advantage = torch.zeros_like(rewards)
    for i, row in enumerate(rewards):
        kept = ~row.isnan()
        advantage[i, kept] = (row[kept] - row[kept].mean()) / (row[kept].std() + 1e-4)
    objective = (logprob.sum(-1) / batch.length * advantage).sum() / 15  # sequences with a score
    (-objective).backward()
    for mine, parameter in zip(caught, state.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-4)


@sabotaged_by("foresight.ops.policy.clipped_surrogate", change("clip_low", lambda _: 1e9))
def test_a_second_pass_is_clipped_against_the_first():
    state, batch, rewards = _rollout()
    weights = torch.ones(batch.completion.shape)
    logprob = state.policy.logprob(batch)[0].detach()
    value, _, sums = grpo.loss(state, batch, torch.ones(rewards.shape), weights, logprob - 1.0)  # ratio e
    expected = -(1.2 * batch.mask.sum() + (~batch.mask).sum() * 1.2)
    torch.testing.assert_close(value, expected)
    assert sums["clip_fraction"] == batch.mask.sum()


@sabotaged_by("foresight.training.microbatch.descend", change("epochs", lambda n: 1))
def test_several_passes_move_the_ratio_and_report_it():
    state, batch, rewards = _rollout(epochs=3, learning_rate=1e-2)
    assert grpo.update(state, batch, rewards)["clip_fraction"] > 0


def steps_anyway(original):
    def mutant(state, *rest):
        metrics = original(state, *rest)
        with torch.no_grad():
            for weight in state.policy.parameters():
                weight.add_(0 * metrics["loss"] * metrics["grad_norm"])
        return metrics

    return mutant


@sabotaged_by("foresight.algorithms.language.grpo.update", steps_anyway)
def test_a_loss_that_is_not_finite_leaves_the_policy_unchanged():
    """An infinite reward or log-probability.

    Wrong: one bad answer turns every weight into NaN (TRL 6266).
    Invariant: a step is taken only if L and ‖∇L‖ are finite.
    """
    state, batch, rewards = _rollout()
    rewards[0, 0] = math.inf
    before = copy.deepcopy(state.policy.state_dict())
    metrics = grpo.update(state, batch, rewards)
    assert not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"])
    for name, value in state.policy.state_dict().items():
        assert torch.equal(value, before[name]), name


@sabotaged_by("foresight.algorithms.language.grpo.train", begins_anew)
def test_a_mid_run_state_continues_bit_for_bit():
    task = TextTask("t", [Example(p) for p in ["1?", "2?", "3?", "4?", "5?"]], [Example("6?")], _count_a)
    config = _config(steps=4, learning_rate=1e-3)
    *_, (_, _, whole) = grpo.train(config, task)
    halfway = next(state for step, _, state in grpo.train(config, task) if step == 2)
    *_, (_, _, resumed) = grpo.train(config, task, copy.deepcopy(halfway))
    for a, b in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def _count_a(examples, completions):
    return [float(c.count("a")) for c in completions]


def test_a_group_of_one_is_refused():
    with pytest.raises(UserError, match="at least 2"):
        grpo.build(_config(group=1))


def test_too_few_prompts_is_refused():
    task = TextTask("t", [Example("1?")], [Example("2?")], _count_a)
    with pytest.raises(UserError, match="1 training prompts"):
        next(grpo.train(_config(), task))


def _scaled_by_group(original):
    return lambda rewards, eps=1e-4: advantage.group_scaled(rewards)


@sabotaged_by("foresight.ops.advantage.batch_scaled", _scaled_by_group)
@sabotaged_by("foresight.ops.advantage.mean_scaled", _scaled_by_group)
def test_rewards_are_scaled_by_the_batch_their_mean_or_not_at_all():
    """The gradient is that of hand-made advantages, handed in as rewards that are not scaled any more."""
    for scale in ("batch", "mean", "none"):
        state, batch, rewards = _rollout(scale=scale)
        plain = grpo.build(_config(scale="none"))
        centered = rewards - rewards.mean(1, keepdim=True)
        deviation = (centered.square().sum() / 15).sqrt() + 1e-4
        by_mean = centered / rewards.mean(1, keepdim=True)
        expected = {"batch": centered / deviation, "mean": by_mean, "none": centered}[scale]
        for mine, theirs in zip(_gradient(state, batch, rewards), _gradient(plain, batch, expected), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


def test_rewards_below_zero_are_not_scaled_by_their_mean():
    state, batch, rewards = _rollout(scale="mean")
    with pytest.raises(UserError, match="at least 0"):
        grpo.update(state, batch, rewards - 10)


@sabotaged_by("foresight.ops.kl.k2", scaled(0.5))
def test_the_estimator_of_the_penalty_is_the_one_that_is_named():
    """Far from the reference k2 and k3 differ; the reported penalty is the named function of the log-probabilities."""
    found = {}
    for name in ("k2", "k3"):
        state, batch, rewards = _rollout(kl_coef=0.1, kl_estimator=name)
        with torch.no_grad():
            for weight in state.reference.parameters():
                weight.mul_(1.3)
            distance = state.policy.logprob(batch)[0] - state.reference.logprob(batch)[0]
        values = 0.5 * distance.square() if name == "k2" else torch.expm1(-distance) + distance
        found[name] = grpo.update(state, batch, rewards)["kl"]
        assert math.isclose(found[name], (values * batch.mask).sum() / batch.mask.sum(), rel_tol=1e-4)
    assert not math.isclose(found["k2"], found["k3"], rel_tol=1e-2)


@sabotaged_by("foresight.ops.kl.k1", scaled(0.5))
def test_a_penalty_in_the_reward_is_one_of_rewards_that_have_it():
    """With k1 the gradient is that of rewards minus β Σ_t k1, without a penalty; also where rewards are equal."""
    state, batch, rewards = _rollout(kl_coef=0.1, kl_estimator="k1")
    with torch.no_grad():
        for weight in state.reference.parameters():
            weight.mul_(1.3)
        distance = ((state.policy.logprob(batch)[0] - state.reference.logprob(batch)[0]) * batch.mask).sum(-1)
    for given in (rewards, torch.ones(4, 4)):
        plain, own = grpo.build(_config()), copy.deepcopy(state)
        mine, theirs = _gradient(own, batch, given), _gradient(plain, batch, given - 0.1 * distance)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)
        assert any(one.abs().max() > 1e-4 for one in mine)
    assert grpo.update(state, batch, rewards)["kl"] == pytest.approx(
        (distance.sum() / batch.mask.sum()).item(), rel=1e-3
    )
    with pytest.raises(UserError, match=r"k1 makes rewards negative.*--scale none"):
        grpo.build(_config(kl_coef=0.1, kl_estimator="k1", scale="mean"))


@sabotaged_by("foresight.ops.aggregate.per_sequence", scaled(0.5))
def test_the_entropy_bonus_is_the_mean_of_exact_entropies():
    """Its gradient, where rewards are equal: of H over the vocabulary, a mean over tokens, then over completions."""
    state, batch, _ = _rollout(entropy_coef=0.3, max_grad_norm=math.inf)
    caught = _gradient(copy.deepcopy(state), batch, torch.ones(4, 4))
    logits = state.policy.logits(state.policy.contexts(batch))
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    weights = (1 / batch.length)[..., None].expand(batch.mask.shape)[batch.mask] / batch.length.numel()
    (-0.3 * weights * entropy).sum().backward()
    for mine, parameter in zip(caught, state.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-4)


def test_an_entropy_bonus_raises_the_entropy_of_equal_rewards():
    state, batch, _ = _rollout(entropy_coef=1.0, learning_rate=1e-3)
    before = grpo.update(state, batch, torch.ones(4, 4))["entropy"]
    assert grpo.update(state, batch, torch.ones(4, 4))["entropy"] > before


@sabotaged_by("foresight.ops.policy.clipped_surrogate", change("clip_high", lambda _: None))
@sabotaged_by("foresight.ops.policy.clipped_surrogate", change("dual_clip", lambda _: None))
def test_each_bound_of_the_clip_is_its_own():
    """Which tokens of a second pass learn, by their ratio: the symmetric clip becomes others by one field each."""
    shift = torch.log(torch.tensor([0.7, 0.81, 1.19, 1.27, 2.9, 3.1]))
    for fields, gain, expected in (
        ({}, 1.0, [True, True, True, False, False, False]),
        ({"clip_high": 0.28}, 1.0, [True, True, True, True, False, False]),
        ({}, -1.0, [False, True, True, True, True, True]),
        ({"clip_most": 3.0}, -1.0, [False, True, True, True, True, False]),
    ):
        gradient, batch = second_pass(grpo, shift, gain, **fields)
        assert (gradient != 0)[batch.length == 6].all(0).tolist() == expected


def test_a_bound_inside_the_clip_range_is_refused():
    """The two-sided clip of arXiv:2505.07291 is above the range: inside, dual clip stops tokens that it lets learn."""
    for fields in ({"clip_most": 0.5}, {"clip_most": 1.1}, {"clip_most": 1.25, "clip_high": 0.28}):
        with pytest.raises(UserError, match=r"clip_most is .*clipped above 1.2.*anyway"):
            grpo.build(_config(**fields))
    grpo.choices(_config(clip_most=1.25))


@sabotaged_by("foresight.ops.policy.clipped_surrogate", change("dual_clip", lambda c: 0.9 * c))
def test_the_two_sided_clip_is_that_of_the_paper():
    """For A < 0: max(min(ρ, δ), clip(ρ, 1 - ε, 1 + ε)) |A|, read literally."""
    rho, gain = torch.linspace(0.1, 6, 200), torch.tensor(-2.0)
    for most in (1.2, 1.5, 4.0):
        expected = torch.maximum(rho.clamp(max=most), rho.clamp(0.8, 1.2)) * 2
        torch.testing.assert_close(clipped_surrogate(rho, gain, 0.2, None, most), expected)


@pytest.mark.parametrize("field", ["scale", "kl_estimator"])
def test_an_unknown_choice_names_the_valid_ones(field):
    with pytest.raises(UserError, match=field):
        grpo.build(_config(**{field: "k9"}))
