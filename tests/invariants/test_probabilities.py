"""The sampler and the learner compute the same log-probabilities."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from foresight.algorithms.language import dpo, grpo, rlhf_ppo, rloo
from foresight.ops import tokens
from foresight.ops.fused import tokens as fused
from foresight.planning.generation import sampling
from foresight.planning.generation.rollout import complete
from tests import tiny_language
from tests.invariants import subjects
from tests.invariants.subjects import FAMILY, PROMPTS, SAMPLED, TOKENS, both, of
from tests.sabotage import change, sabotaged_by

WIDE = 49_152  # the vocabulary of SmolLM2


@sabotaged_by("foresight.planning.generation.sampling.choose", change("temperature", lambda t: 2 * t))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@both
def test_the_sampler_and_the_learner_agree_on_every_log_probability(precision, temperature):
    """Two code paths, one with a KV cache and one without, compute the log-probability of a token.

    Wrong: every ratio is off from the first update on, and long answers are silently clipped or dropped (TRL 4772,
    3867; verl 2953, 3694; NeMo stops where exp|Δ| is above 1.05).
    Invariant: log π_sampler(o_t | q, o_<t) = log π_learner(o_t | q, o_<t), to rounding; exp(mean |Δ|) ≤ 1.05 in
    bfloat16.
    """
    state = subjects.build(grpo, precision=precision, temperature=temperature)
    batch = subjects.sample(grpo, state)
    gap = (state.policy.logprob(batch, temperature)[0] - batch.logprob).abs()[batch.mask]
    assert gap.max() < 2e-5 if precision == "float32" else gap.mean().exp() < 1.05


@sabotaged_by("foresight.planning.generation.decoding.generate", change("temperature", lambda t: 1.5 * t))
@sabotaged_by("foresight.nets.language.model.LanguageModel.logprob", change("temperature", lambda t: 1.0))
@both
@of(*SAMPLED)
def test_the_temperature_divides_every_log_probability(module, precision):
    """The sampler divides logits by the temperature; the policy, old policy, reference and teacher must too.

    Wrong: the ratio is not 1 and the KL is not 0 before the first update (TRL 4159: ratio 2 at temperature 0.6; TRL
    3029; ms-swift 8427; slime 2686).
    Invariant: log π(a) = log softmax(z / τ)_a with the same τ in all of them.
    """
    state = subjects.build(module, precision=precision, temperature=0.6, kl_coef=0.1, teacher=tiny_language.folder(0))
    metrics = subjects.update(module, state, subjects.sample(module, state))
    assert abs(metrics.get("sampler_error", metrics.get("teacher_kl", math.inf))) < (
        1e-5 if precision == "float32" else 0.05
    )


def at_temperature_1_where_frozen(original):
    """The reference was forgotten."""

    def mutant(self, batch, temperature=1.0):
        return original(self, batch, temperature if next(self.parameters()).requires_grad else 1.0)

    return mutant


@sabotaged_by("foresight.nets.language.model.LanguageModel.logprob", at_temperature_1_where_frozen)
@both
@of(grpo, rloo, rlhf_ppo)
def test_the_kl_is_zero_before_the_first_update(module, precision):
    """The reference equals the policy at the start and is computed in the same way.

    Wrong: a KL penalty although the two models are equal (TRL 454; slime's check at step 0).
    Invariant: KL(π_θ ‖ π_ref) = 0 at θ = θ_ref: exactly if one function computes both, to rounding if the sampler's
    log-probability is used as log π_θ.
    """
    state = subjects.build(module, precision=precision, temperature=0.6, kl_coef=0.1)
    metrics = subjects.update(module, state, subjects.sample(module, state))
    if module is rloo:
        assert abs(metrics["kl"]) < (1e-5 if precision == "float32" else 0.05)
    else:
        assert metrics["kl"] == 0


@sabotaged_by("foresight.algorithms.language.dpo.log_odds", lambda f: lambda *a: f(*a) + 0.1 * torch.arange(2))
@pytest.mark.parametrize(("loss", "expected"), [("sigmoid", math.log(2)), ("ipo", 25.0), ("hinge", 1.0)])
@both
def test_the_initial_margin_of_dpo_is_zero(precision, loss, expected):
    """DPO's policy and reference are the same model at the start, both without dropout.

    Wrong: a nonzero margin before the first update (TRL 744).
    Invariant: D = 0, so the loss is log 2 (IPO: 1/(2β)², hinge: 1).
    """
    state = subjects.build(dpo, precision=precision, loss=loss)
    metrics = subjects.update(dpo, state, subjects.sample(dpo, state))
    assert math.isclose(metrics["loss"], expected, rel_tol=1e-6)
    assert metrics["margin"] == metrics["chosen_reward"] == 0


def noisy(original):
    """What dropout does: two passes over the same tokens differ."""
    return lambda *args: tuple(x * (1 + 0.1 * torch.rand_like(x)) for x in original(*args))


@sabotaged_by("foresight.nets.language.model.LanguageModel.logprob", noisy)
@both
@of(*(m for m in FAMILY if subjects.has(m, "epochs")), rlhf_ppo)
def test_the_ratio_is_one_while_the_weights_are_those_that_sampled(module, precision, monkeypatch):
    """With a learning rate of 0, nothing changes, in any number of passes.

    Wrong: tokens are clipped because of rounding alone (RLinf 1534: 4.6% of them at lr = 0; verl 6280).
    Invariant: ρ_t = π_θ(o_t) / π_old(o_t) = 1, exactly if π_old comes from the first pass itself.
    """
    name = "sequence_ratio" if hasattr(module, "sequence_ratio") else "ratio"
    original, seen = getattr(module, name), []

    def watched(*args):
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr(module, name, watched)
    state = subjects.build(module, precision=precision, learning_rate=0.0, critic_learning_rate=0.0, epochs=3)
    metrics = subjects.update(module, state, subjects.sample(module, state))
    assert len(seen) >= 3 and metrics["clip_fraction"] == 0
    # PPO prices the tokens in a pass of its own, where they may stand in another order.
    tolerance = 0.0 if module is not rlhf_ppo else 1e-5 if precision == "float32" else 0.05
    assert all((rho - 1).abs().max() <= tolerance for rho in seen)


def awake(original):
    """The model is left in training mode."""

    def mutant(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.module.train()

    return mutant


@sabotaged_by("foresight.nets.language.model.LanguageModel.__init__", awake)
@of(grpo, rlhf_ppo, rloo, dpo)
def test_dropout_is_never_active(module):
    """A model whose config sets dropout, as many configs do.

    Wrong: the policy, old policy and reference are three different networks, so the ratio is not 1 and the KL is not 0
    (TRL 3234, 744; trlx 508).
    Invariant: two passes over the same tokens give the same log-probabilities.
    """
    state = subjects.build(module, kl_coef=0.1)
    for model in (state.policy, state.reference):
        norm = model.module.model.norm
        norm.register_forward_hook(lambda m, _, out: torch.nn.functional.dropout(out, 0.5, m.training))
    metrics = subjects.update(module, state, subjects.sample(module, state))
    assert metrics.get("sampler_error", 0.0) < 1e-5
    assert abs(metrics["margin" if module is dpo else "kl"]) < 1e-6
    assert not any(m.training for m in state.policy.module.modules())


def in_bfloat16(original):
    return lambda logits, temperature: original(logits, temperature).bfloat16()


def both_ways(monkeypatch):
    """The compiled loop, then the operations of torch."""
    yield
    monkeypatch.setattr(fused, "able", lambda _: False)
    yield


def in_steps(original):
    return lambda logits, tokens, temperature: [x.bfloat16().float() for x in original(logits, tokens, temperature)]


@sabotaged_by("foresight.ops.tokens._wide", in_bfloat16)
@sabotaged_by("foresight.ops.fused.tokens.token_logprob", in_steps)
def test_the_softmax_is_computed_in_float32_whatever_the_logits_are(monkeypatch):
    """Log-softmax over a large vocabulary, and the division by the temperature.

    Wrong: log-probabilities have errors of several percent, which depend on the batch shape (verl 6280: 8% of the
    tokens differ; MiniMax-M1's float32 head; arXiv:2510.26788).
    Invariant: log π(a) = z_a/τ − log Σ_v exp(z_v/τ) in float32 or wider, for logits of any dtype.
    """
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(8, WIDE, generator=generator)).bfloat16()
    chosen = torch.randint(WIDE, (8,), generator=generator)
    for _ in both_ways(monkeypatch):
        for temperature in (1.0, 0.7):
            exact = (logits.double() / temperature).log_softmax(-1)
            logprob, entropy = tokens.token_logprob(logits, chosen, temperature)
            torch.testing.assert_close(logprob.double(), exact.gather(-1, chosen[:, None])[:, 0], atol=2e-5, rtol=0)
            torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), atol=2e-5, rtol=0)


@sabotaged_by(
    "foresight.planning.generation.sampling.choose", change("logits", lambda z: z.float().log_softmax(-1).bfloat16())
)
def test_the_sampler_computes_log_probabilities_in_float32_too():
    """The log-probability recorded while sampling.

    Wrong: it has the same error, and differs from the learner's (TRL 6266).
    Invariant: the recorded value is log softmax(z/τ) of the token in float32, and is finite.
    """
    logits = (4 * torch.randn(8, WIDE, generator=torch.Generator().manual_seed(0))).bfloat16()
    uniform = torch.rand(8, generator=torch.Generator().manual_seed(1))
    for temperature in (1.0, 0.7):
        token, logprob = sampling.choose(logits, uniform, temperature)
        exact = (logits.double() / temperature).log_softmax(-1).gather(-1, token[:, None])[:, 0]
        torch.testing.assert_close(logprob.double(), exact, atol=2e-5, rtol=0)


def in_place(original):
    return lambda logits, temperature: original(logits.div_(temperature), 1.0)


def once_more(original):
    return lambda logits, tokens, temperature: original(logits.detach().div_(temperature), tokens, temperature)


@sabotaged_by("foresight.ops.tokens._wide", in_place)
@sabotaged_by("foresight.ops.fused.tokens.token_logprob", once_more)
def test_dividing_by_the_temperature_does_not_change_the_logits(monkeypatch):
    """The logits are used again: for the entropy, the backward pass, or another temperature.

    Wrong: they are divided twice, or autograd raises an error (TRL 6554).
    Invariant: ∂ log p(a) / ∂z = (onehot(a) − softmax(z/τ)) / τ at the original z.
    """
    logits, chosen = torch.randn(5, 11), torch.arange(5)
    expected = (torch.nn.functional.one_hot(chosen, 11) - (logits / 0.5).softmax(-1)) / 0.5
    for _ in both_ways(monkeypatch):
        given = logits.clone().requires_grad_()
        tokens.token_logprob(given, chosen, 0.5)[0].sum().backward()
        assert torch.equal(given.detach(), logits)
        torch.testing.assert_close(given.grad, expected)


@sabotaged_by("foresight.planning.generation.sampling.choose", change("temperature", lambda t: 1.0 if t == 0 else t))
def test_greedy_is_the_limit_of_low_temperatures():
    """Temperature 0 is greedy, not a division by zero.

    Wrong: inf and NaN (TRL 3640), or a greedy answer whose log-probability is 0 everywhere (slime 2686).
    Invariant: the token is argmax z, and its log-probability is that of the model at τ = 1.
    """
    logits, uniform = torch.randn(64, 11), torch.rand(64)
    greedy, logprob = sampling.choose(logits, uniform, 0.0)
    assert torch.equal(greedy, sampling.choose(logits, uniform, 1e-4)[0])
    torch.testing.assert_close(logprob, logits.log_softmax(-1).amax(-1))


def stale(original):
    """Whatever has no gradient, and so the sampler, keeps the weights that it saw first."""
    kept: dict[int, torch.nn.Module] = {}

    def mutant(self, hidden):
        head = kept.setdefault(id(self), copy.deepcopy(self.module.get_output_embeddings()))
        return original(self, hidden) if torch.is_grad_enabled() else head(hidden)

    return mutant


@sabotaged_by("foresight.nets.language.model.LanguageModel.logits", stale)
@of(*SAMPLED)
def test_the_sampler_has_the_weights_of_the_last_update(module):
    """The sampler gets the new weights after every update.

    Wrong: answers come from an older policy; the error grows slowly and looks like staleness (verl 7495; NeMo: 1 to 2%
    per step is a sync bug).
    Invariant: log π_sampler = log π_θ after an update that changed θ.
    """
    state = subjects.build(module, learning_rate=1e-2)
    before = subjects.sample(module, state)
    subjects.update(module, state, before)
    after = complete(state.policy, PROMPTS, 4, TOKENS, 1.0, state.generator)
    moved = (state.policy.logprob(before)[0] - before.logprob).abs().max()
    gap = (state.policy.logprob(after)[0] - after.logprob).abs().max()
    assert moved > 0.1 and gap < 1e-4
