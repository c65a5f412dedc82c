"""KL estimators: the exact gradient of each, in the loss and in the reward, in the algorithms that use it.

The vocabulary can be enumerated and an answer has at most two tokens, so every expectation is an exact sum. Three
gradients of a divergence between the policy π and the reference π₀ are distinguished; d(s) = Π π is the probability
of reaching state s:

- of whole answers: ∇ Σ_s d(s) KL(π(·|s) ‖ π₀(·|s)), in which d depends on π too;
- per state: Σ_s d(s) ∇ KL(π(·|s) ‖ π₀(·|s)), with d held fixed;
- per state, reverse: Σ_s d(s) ∇ KL(π₀(·|s) ‖ π(·|s)), with d held fixed.
"""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foresight.algorithms.language import distill, grpo, rlhf_ppo, rloo
from foresight.data.text import TokenBatch
from foresight.nets.language.model import LanguageModel
from foresight.ops import kl
from foresight.ops.policy import ratio
from foresight.training import microbatch
from foresight.training.corpus import token_batch
from tests import tiny_language
from tests.invariants import subjects
from tests.invariants.subjects import of
from tests.sabotage import change, flip_sign, sabotaged_by, scaled, swap

PROMPT = "1+1?"
V = tiny_language.CHARACTERS.index("?") + 1  # digits, signs and the end
END = 0
BETA = 0.7


def _build(module: ModuleType, **fields: Any) -> tuple[Any, LanguageModel]:
    """A State whose policy is not its reference, and that reference (or teacher)."""
    fields = {"micro_tokens": 10**9, "kl_coef": BETA, "learning_rate": 0.0, **fields}
    folder = tiny_language.folder(0, V)
    state = subjects.build(module, model=folder, teacher=folder, max_new_tokens=2, **fields)
    state.policy.stop_ids = [END]
    other = state.teacher if module is distill else state.reference
    subjects.disturb(other)
    return state, other


def _answers(policy: LanguageModel) -> tuple[TokenBatch, Tensor]:
    """Every answer, as one group, with the log-probabilities of its tokens; and the chance of each, `[1, G]`."""
    rows = [[END]] + [[a, b] for a in range(V) if a != END for b in range(V)]
    batch = token_batch([policy.encode(PROMPT)], [rows])
    with torch.no_grad():
        batch.logprob.copy_(policy.logprob(batch)[0])
    chance = batch.logprob.sum(-1).exp()
    torch.testing.assert_close(chance.sum(), torch.tensor(1.0))
    return batch, chance


def _tables(model: LanguageModel) -> Tensor:
    """log π(·|s) in the state after the prompt and in those after each first token but the end, `[1 + V - 1, V]`."""
    batch = token_batch([model.encode(PROMPT)], [[[a, END] for a in range(V) if a != END]])
    logprob = model.logits(model.contexts(batch)).log_softmax(-1)
    return torch.cat([logprob[:1], logprob[1::2]])


def _exact(policy: LanguageModel, reference: LanguageModel, kind: str) -> list[Tensor]:
    """The gradient of one of the three divergences, by autograd through the definition."""
    mine, other = _tables(policy), _tables(reference).detach()
    here = torch.cat([torch.ones(1), mine[0, 1:].exp()])  # d(s)
    first, second = (other, mine) if kind == "reverse" else (mine, other)
    each = (first.exp() * (first - second)).sum(-1)
    total = ((here if kind == "whole" else here.detach()) * each).sum()
    return [BETA * g for g in torch.autograd.grad(total, list(policy.parameters()))]


def _same(ones: list[Tensor], others: list[Tensor]) -> None:
    subjects.same(ones, others, atol=2e-5, rtol=2e-3)


def _in_the_loss(penalty: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], Any]:
    """What GRPO's loss becomes, on average over all answers, with `penalty` as its KL term and no reward at all."""
    chosen = SimpleNamespace(
        penalty=lambda logprob, reference, name: penalty(logprob, reference), ESTIMATORS=kl.ESTIMATORS
    )
    monkeypatch.setattr(grpo, "kl", chosen)
    state, reference = _build(grpo)
    batch, chance = _answers(state.policy)
    weights = chance[..., None] * batch.mask
    grpo.loss(state, batch, torch.zeros_like(chance), weights, None)[0].backward()
    caught = [p.grad.clone() for p in state.policy.parameters()]
    state.policy.zero_grad()
    return caught, functools.partial(_exact, state.policy, reference)


@sabotaged_by("foresight.ops.kl.k1", change("logprob", lambda x: 2 * x.square()))
def test_k1_in_the_loss_has_no_gradient(monkeypatch):
    """k1 = log π − log π₀ as a loss.

    Wrong: it looks like a penalty but is noise with mean 0 (TRL 3025; slime 1004; verl 2953).
    Invariant: Σ_a π(a) ∇log π(a) = ∇ Σ_a π(a) = 0.
    """
    caught, exact = _in_the_loss(kl.k1, monkeypatch)
    size = max(g.abs().max() for g in exact("by state"))
    assert all(g.abs().max() < 1e-4 * size for g in caught)


@sabotaged_by("foresight.ops.kl.k2", flip_sign, scaled(2.0), change("logprob", torch.Tensor.detach))
def test_k2_in_the_loss_has_the_gradient_of_the_kl(monkeypatch):
    """k2 = ½ (log π − log π₀)² as a loss: a biased value, the exact gradient.

    Wrong: the wrong sign, which drives the policy away from the reference (verl until a65c915), or k1 or k3 in its
    place.
    Invariant: Σ_a π(a) (log π(a) − log π₀(a)) ∇log π(a) = ∇KL(π ‖ π₀), per state.
    """
    caught, exact = _in_the_loss(kl.k2, monkeypatch)
    _same(caught, exact("by state"))


@sabotaged_by("foresight.ops.kl.k3", flip_sign, scaled(2.0), swap("logprob", "ref_logprob"))
def test_k3_in_the_loss_has_the_gradient_of_the_other_kl(monkeypatch):
    """k3 = π₀/π − 1 − log(π₀/π) as a loss, the term of GRPO: an unbiased value, another gradient.

    Wrong: it is taken for a penalty of KL(π ‖ π₀); far from π₀ the two gradients differ (open-instruct 534; TRL 4638).
    Invariant: Σ_a π(a) ∇k3(a) = ∇KL(π₀ ‖ π), per state; the two agree only near π₀.
    """
    caught, exact = _in_the_loss(kl.k3, monkeypatch)
    _same(caught, exact("reverse"))
    apart = [(a - b).abs().max() / a.abs().max() for a, b in zip(caught, exact("by state"), strict=True)]
    assert max(apart) > 0.05


@sabotaged_by("foresight.ops.policy.ratio", flip_sign, change("logprob", torch.Tensor.detach))
def test_k3_times_the_ratio_has_the_gradient_of_the_kl(monkeypatch):
    """ρ_t · k3 as a loss, which corrects the gradient of k3.

    Wrong: without the ratio the gradient differs even on-policy, where the ratio is 1 (TRL 6503: by 21%).
    Invariant: Σ_a ∇(π(a) k3(a)) = ∇ Σ_a π(a) k3(a) = ∇KL(π ‖ π₀), per state.
    """
    caught, exact = _in_the_loss(lambda p, r: ratio(p, p) * kl.k3(p, r), monkeypatch)
    _same(caught, exact("by state"))


@sabotaged_by("foresight.ops.kl.k1", flip_sign, scaled(2.0), change("logprob", torch.Tensor.exp))
@of(rloo, rlhf_ppo)
def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_answers(module, monkeypatch):
    """k1 in the reward: of the whole answer (RLOO), or of each token and those after it (PPO, λ = 1).

    Wrong: the wrong sign, which maximizes the KL (verl until a65c915; Logic-RL 58), or the KL of later tokens is
    missing in a token's return.
    Invariant: ∇KL(π ‖ π₀) = E_o[ Σ_t ∇log π(o_t) Σ_{u ≥ t} (log π(o_u) − log π₀(o_u)) ], of whole answers.
    """
    state, reference = _build(module, whiten=False, gae_lambda=1.0, gamma=1.0)
    batch, chance = _answers(state.policy)
    if module is rloo:  # its slots, made to sum over all answers instead of a sample
        monkeypatch.setattr(rloo, "leave_one_out", lambda rewards: rewards)
        monkeypatch.setattr(rloo, "per_budget", lambda mask, _: mask * chance[..., None])
        caught = subjects.gradient(rloo, state, batch, torch.zeros_like(chance))
    else:
        targets, _ = rlhf_ppo.prepare(state, batch, torch.zeros_like(chance))
        rlhf_ppo.policy_loss(state, batch, targets, chance[..., None] * batch.mask)[0].backward()
        caught = [p.grad.clone() for p in state.policy.parameters()]
    state.policy.zero_grad()
    _same(caught, _exact(state.policy, reference, "whole"))


@sabotaged_by("foresight.ops.kl.k3", flip_sign, scaled(2.0), swap("logprob", "ref_logprob"))
def test_k3_in_the_reward_lacks_the_gradient_of_the_other_kl(monkeypatch):
    """k3 in the reward: lower variance than k1, but not a substitute for it.

    Wrong: it replaces k1 because its value is right; but a reward is not differentiated, so half of the gradient of
    E[k3] is missing (verl 2953).
    Invariant: Σ_a k3(a) ∇π(a) = ∇KL(π ‖ π₀) − ∇KL(π₀ ‖ π), the first of whole answers and the second per state.
    """
    monkeypatch.setattr(microbatch, "kl", SimpleNamespace(k1=kl.k3))
    monkeypatch.setattr(rloo, "leave_one_out", lambda rewards: rewards)
    state, reference = _build(rloo)
    batch, chance = _answers(state.policy)
    monkeypatch.setattr(rloo, "per_budget", lambda mask, _: mask * chance[..., None])
    caught = subjects.gradient(rloo, state, batch, torch.zeros_like(chance))
    whole, reverse = (_exact(state.policy, reference, kind) for kind in ("whole", "reverse"))
    _same(caught, [w - r for w, r in zip(whole, reverse, strict=True)])
    assert max((a - b).abs().max() / b.abs().max() for a, b in zip(caught, whole, strict=True)) > 0.3


@sabotaged_by("foresight.algorithms.language.distill.kl.k1", flip_sign)
@sabotaged_by("foresight.ops.policy.reinforce", scaled(2.0))
def test_the_kl_of_a_token_alone_has_the_gradient_of_the_kl_in_its_state(monkeypatch):
    """On-policy distillation with discount 0: each token is credited with its own reward only.

    Wrong: the teacher's top k without the rest of the vocabulary (verl 5041), or the wrong sign.
    Invariant: E_o[ Σ_t (log π(o_t) − log π₀(o_t)) ∇log π(o_t) ] = Σ_s d(s) ∇KL(π(·|s) ‖ π₀(·|s)).
    """
    state, teacher = _build(distill)
    batch, chance = _answers(state.policy)
    monkeypatch.setattr(distill, "per_token", lambda mask: mask * chance[..., None])
    caught = subjects.gradient(distill, state, batch)
    _same([BETA * g for g in caught], _exact(state.policy, teacher, "by state"))


@sabotaged_by("foresight.ops.kl.categorical", flip_sign, swap("logits", "ref_logits"))
def test_soft_targets_have_the_same_gradient_without_sampling_the_token(monkeypatch):
    """On-policy distillation over the whole vocabulary.

    Wrong: a divergence over the teacher's top k only, which a student can lower by leaving them (verl 5041).
    Invariant: Σ_s d(s) ∇ Σ_a π(a|s) (log π(a|s) − log π₀(a|s)).
    """
    state, teacher = _build(distill, soft=True)
    batch, _ = _answers(state.policy)
    # Each state once: the answers that end in it share what comes before, so only their last tokens count.
    first = torch.zeros_like(batch.mask)
    first[0, 0, 0] = True  # the state after the prompt
    first[0, 1::V, 1] = True  # the state after each first token
    here = torch.where(first, 1.0, 0.0)
    here[0, 1::V, 1] = _tables(state.policy)[0, 1:].exp().detach()
    monkeypatch.setattr(distill, "per_token", lambda mask: here)
    caught = subjects.gradient(distill, state, batch)
    _same([BETA * g for g in caught], _exact(state.policy, teacher, "by state"))
